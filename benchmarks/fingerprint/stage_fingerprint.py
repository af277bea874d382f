"""How well the stage fingerprint recognises training from its bare collectives, and what it costs the daemon.

    python -m benchmarks stage_fingerprint [--json] [--quick] [--n-each N] [--seed N] [--weights FILE] [--mistakes]
        [--traces FOLDER]

It looks at `recorded`, sequences of the frameworks themselves on the emulated NCCL, and at
`generated`, those of corpus/generator.py and corpus/others.py with another seed than training had. The answer is read
after two steps from a random place in mid-training on. It is right when stage, accumulation, partitioned activations
and tensor parallelism all are.

The shipped weights learned all that has a name, so their figures are no claim of generality. `--weights` judges other
weights: those of `python -m benchmarks stage_train --hypothetical-only --out FILE` never saw a named framework, model
or workload. `--traces` adds real traces of public clusters (a folder of `zerotune store import`'s formats).
`--quick` looks at fewer runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np

from benchmarks.fingerprint.corpus.dataset import Sequence, disturbed, generated, recorded
from benchmarks.fingerprint.evaluation import Accuracy, changes_noticed, middle, recognised
from benchmarks.lib.argument_types import a_file, a_folder, natural, positive
from benchmarks.lib.reporting import Result, report
from zerotune.tuner.fingerprint import StageFingerprint
from zerotune.tuner.fingerprint.encoding.encoders import LstmEncoder
from zerotune.tuner.fingerprint.encoding.weights import SHIPPED

TARGET = ">= 99"
N_REPEATED_STEPS = 400
N_LOSSY_STEPS = 300
LOST = 0.01
OTHER_LOST = (0.001, 0.03)
STEPS_LOSSY = 6
N_CHANGES = 1000
SEED = 7102
"""Of generated runs; seeds that the grammar was mended by are not looked at again."""


def both(metric: str, accuracy: Accuracy, *, has_target: bool = True) -> list[Result]:
    """An accuracy as two figures.

    Args:
        metric: what was looked at.
        accuracy: what was found.
        has_target: False where nobody can be right always.

    Returns:
        The whole answer right, and its stage alone.
    """
    target = TARGET if has_target else ""
    return [
        Result(metric, accuracy.percent, "%", target),
        Result(f"{metric}, stage alone", accuracy.stage_percent, "%", target),
    ]


def accuracies(
    encoder: LstmEncoder, recordings: Many[Sequence], fresh: Many[Sequence], n_changes: int, mistakes: list[str]
) -> list[Result]:
    """How often answers are right.

    Args:
        encoder: to judge.
        recordings: of real frameworks.
        fresh: generated runs.
        n_changes: pairs of runs, one after the other.
        mistakes: is appended to, one sentence each.
    """
    results = []
    looks = [("recorded", recordings, 0.0), ("fresh generated", fresh, 0.0)]
    looks += [("fresh generated", fresh, LOST), ("recorded", recordings, LOST)]
    looks += [("fresh generated", fresh, rate) for rate in OTHER_LOST]
    for name, ones, rate in looks:
        n_steps = {"n_steps": STEPS_LOSSY} if rate else {}
        found = recognised(encoder, ones, 2 if rate else 1, rate=rate, **n_steps)
        lossy = f", {100 * rate:g} % of calls lost or exchanged, {STEPS_LOSSY} steps" if rate else ""
        results += both(f"{name}{lossy} ({found.n})", found, has_target=not rate)
        mistakes += [f"{name}{lossy}: {m[0]}: {m[1]} taken for {m[2]}" for m in found.mistakes]
    changed = changes_noticed(encoder, fresh, n_changes, 3)
    return [*results, *both(f"changes_noticed_within_2_steps ({changed.n})", changed)]


def steps_to_recognise(encoder: LstmEncoder, sequences: Many[Sequence]) -> float:
    """Steps of mid-training until the right answer stands, in quarters: median."""
    found = []
    for sequence in sequences:
        for quarters in range(2, 17):
            if recognised(encoder, [sequence], 5, n_steps=quarters / 4).n_right:
                found.append(quarters / 4)
                break
    return statistics.median(found)


def cost(encoder: LstmEncoder, sequences: Many[Sequence]) -> tuple[float, float, float]:
    """CPU us per step: median and mean over long jobs that begin unknown, and for scoring one new step."""
    per_step, per_new = [], []
    rng = np.random.default_rng(4)
    for sequence in sequences:
        codes, _ = middle(sequence, rng, 2)
        step = codes[: max(1, len(codes) * 10 // 22)]
        fingerprint = StageFingerprint(encoder)
        kinds, n_bytes, unknown = step & 15, step >> 4, np.zeros(len(step))
        began = time.thread_time_ns()
        for _ in range(N_REPEATED_STEPS):
            fingerprint.add(kinds, n_bytes, unknown)
        per_step.append((time.thread_time_ns() - began) / 1e3 / N_REPEATED_STEPS)
        fresh = StageFingerprint(encoder)
        began = time.thread_time_ns()
        for _ in range(3):
            fresh.add(kinds, n_bytes, unknown)
        per_new.append((time.thread_time_ns() - began) / 1e3)
    return statistics.median(per_step), statistics.mean(per_step), statistics.median(per_new)


def lossy_cost(encoder: LstmEncoder, sequences: Many[Sequence]) -> float:
    """CPU us per step, mean over long jobs that lose or exchange 1 % of their calls all the time."""
    per_step = []
    rng = np.random.default_rng(6)
    for sequence in sequences:
        codes, _ = disturbed(*middle(sequence, rng, N_LOSSY_STEPS), rng, LOST)
        n_calls = -(-len(codes) // N_LOSSY_STEPS)
        fingerprint = StageFingerprint(encoder)
        began = time.thread_time_ns()
        for at in range(0, len(codes), n_calls):
            block = codes[at : at + n_calls]
            fingerprint.add(block & 15, block >> 4, np.zeros(len(block)))
        per_step.append((time.thread_time_ns() - began) / 1e3 / N_LOSSY_STEPS)
    return statistics.mean(per_step)


def costs(encoder: LstmEncoder, recordings: Many[Sequence], fresh: Many[Sequence]) -> list[Result]:
    """How long the encoder takes to be right, in steps, and what a step costs."""
    median_us, mean_us, new_us = cost(encoder, [*fresh, *recordings])
    return [
        Result("steps_to_recognise", steps_to_recognise(encoder, recordings), "", "<= 2"),
        Result("us_per_step", mean_us, "us CPU", "<= 50"),
        Result("us_per_step_median", median_us, "us CPU", "<= 50"),
        Result("us_once_per_new_step", new_us, "us CPU"),
        Result("us_per_step_lossy", lossy_cost(encoder, recordings[::2]), "us CPU"),
    ]


def real(folder: Path) -> list[tuple[str, str]]:
    """What real traces show."""
    from zerotune.store.errors import TraceError
    from zerotune.tuner.offline.stage_command import read

    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            try:
                reading = read(path, rank=None)
            except TraceError:
                continue
            if reading.n_calls:
                shown = f"{reading.shown} (step of {reading.period} calls)"
                found.append((f"{path.relative_to(folder)} ({reading.n_calls} calls)", shown))
    return found


def encoder_in(text: str) -> LstmEncoder:
    """The encoder whose weights a file holds."""
    try:
        return LstmEncoder.from_bytes(a_file(text).read_bytes())
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} does not hold weights: {error}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--n-each", type=positive, default=40, help="generated runs per framework")
    parser.add_argument("--seed", type=natural, default=SEED, help="of generated runs")
    parser.add_argument("--weights", type=encoder_in, default=str(SHIPPED), help="default: those shipped")
    parser.add_argument("--mistakes", action="store_true", help="list every wrong answer")
    parser.add_argument("--traces", type=a_folder, help="folder of real traces")
    arguments = parser.parse_args()
    mistakes: list[str] = []
    recordings = recorded()
    fresh = list(generated(4 if arguments.quick else arguments.n_each, arguments.seed))
    n_changes = 100 if arguments.quick else N_CHANGES
    results = accuracies(arguments.weights, recordings, fresh, n_changes, mistakes)
    trained = [one for one in fresh if not one.group.startswith("other")]
    results += costs(arguments.weights, recordings[::8], trained[::4])
    report("stage_fingerprint", results, as_json=arguments.json)
    if arguments.traces:
        for name, shown in real(arguments.traces):
            print(f"{name}: {shown}")
    if arguments.mistakes:
        print("\n".join(mistakes))


if __name__ == "__main__":
    main()
