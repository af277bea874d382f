"""How well the stage fingerprint recognises training from its bare collectives, and what it costs the daemon.

    python -m benchmarks stage_fingerprint [--json] [--quick] [--unnamed-only | --shipped-only] [--n-each N] [--seed N]
        [--learned FOLDER] [--mistakes] [--traces FOLDER]

Two protocols, on `recorded`, sequences of the frameworks themselves on the emulated NCCL
(stage_recordings.py), and on `generated`, those of tuner/fingerprint/corpus/generator.py and others.py:

- unnamed: encoders learned hypothetical runs only (corpus/grammar.py), so that every framework, every family of
  models and every workload that has a name is left out at once;
- without: one framework, or one family of models, is left out, recorded and generated, and the others are learned too.

The answer is read after two steps from a random place in mid-training on; it is right when stage, accumulation,
partitioned activations and tensor parallelism all are. `--traces` adds real traces of public clusters (a folder of
`zerotune import`'s formats). `--quick` learns from fewer runs and looks at fewer; `--unnamed-only` with `--n-each`
looks at more of them, in the harder protocol alone. `--shipped-only` looks at the weights that ship, which learned from
all of this: on fresh runs, with calls lost, and at what they cost. `--learned` keeps what was learned from hypothetical
runs in a folder for the next time; the same code would learn the same again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.lib.argument_types import a_folder, a_folder_to_write, natural, positive
from benchmarks.lib.reporting import Result, report
from zerotune.tuner.fingerprint import StageFingerprint
from zerotune.tuner.fingerprint.corpus.dataset import Sequence, disturbed, generated, recorded
from zerotune.tuner.fingerprint.encoding.encoders import Encoder, LstmEncoder, encoder_from_bytes
from zerotune.tuner.fingerprint.encoding.weights import KINDS, shipped_blob
from zerotune.tuner.fingerprint.training.evaluation import Accuracy, changes_noticed, middle, recognised
from zerotune.tuner.fingerprint.training.held_out import (
    FRAMEWORKS,
    N_HYPOTHETICAL,
    Fold,
    looked_at,
    on_hypothetical,
    one_left_out,
    parts_of,
    total,
    train_both,
)
from zerotune.tuner.fingerprint.training.train import N_EPOCHS, Examples

TARGET = ">= 99"
N_REPEATED_STEPS = 400
N_LOSSY_STEPS = 300
LOST = 0.01
OTHER_LOST = (0.001, 0.03)
STEPS_LOSSY = 6
N_CHANGES = 1000
SEED = 7101
"""Of generated runs to look at; seeds that the grammar was mended by are not looked at again."""


def both(metric: str, kind: str, accuracy: Accuracy, *, has_target: bool = True) -> list[Result]:
    """An accuracy as two figures.

    Args:
        metric: what was looked at.
        kind: of the encoder; n-grams are the peer, without a target.
        accuracy: what was found.
        has_target: False where nobody can be right always.

    Returns:
        The whole answer right, and its stage alone.
    """
    target = TARGET if has_target and kind == LstmEncoder.kind else ""
    return [
        Result(metric, accuracy.percent, "%", target),
        Result(f"{metric}, stage alone", accuracy.stage_percent, "%", target),
    ]


def rows(name: str, found: Iterable[Fold], mistakes: list[str]) -> list[Result]:
    """A table's rows, and the mean over all that was left out for each encoder.

    Args:
        name: of the table.
        found: accuracies by what was left out.
        mistakes: is appended to, one sentence each.

    Returns:
        A row per fold and encoder, then the totals.
    """
    results = []
    sums: dict[tuple[str, str], Accuracy] = {}
    for fold in found:
        for origin, accuracies in (
            ("recorded", fold.recorded),
            ("generated", fold.generated),
            ("changes", fold.changes),
        ):
            for kind, accuracy in accuracies.items():
                if not accuracy.n:
                    continue
                results += both(f"{kind} {name} {fold.left_out}, {origin} ({accuracy.n})", kind, accuracy)
                key = (kind, origin)
                sums[key] = total({"a": sums.get(key, Accuracy()), "b": accuracy})
                mistakes += [f"{kind} {fold.left_out}: {m[0]}: {m[1]} taken for {m[2]}" for m in accuracy.mistakes]
    for (kind, origin), accuracy in sums.items():
        results += both(f"accuracy_{kind}_{name}_{origin} ({accuracy.n})", kind, accuracy)
    return results


def unnamed(encoders: dict[str, Encoder], sequences: list[Sequence], mistakes: list[str]) -> list[Result]:
    """Encoders that learned hypothetical runs only, judged on frameworks, model families and workloads.

    Args:
        encoders: by their kind.
        sequences: runs to recognise.
        mistakes: is appended to, one sentence each.

    Returns:
        Accuracies, and how soon a change is noticed.
    """
    trained = [one for one in sequences if one.group in FRAMEWORKS]
    results = []
    for name, key in (("framework", "group"), ("family", "family"), ("workload", "group")):
        ones = [one for one in sequences if one.group.startswith("other_")] if name == "workload" else trained
        values = sorted({getattr(one, key) for one in ones})
        found = [looked_at(encoders, value, [one for one in ones if getattr(one, key) == value], 0) for value in values]
        results += rows(name, found, mistakes if name != "family" else [])
    for kind, encoder in encoders.items():
        changed = changes_noticed(encoder, sequences, N_CHANGES, 3)
        results += both(f"changes_noticed_within_2_steps_held_out_{kind} ({changed.n})", kind, changed)
    return results


def without(start: LstmEncoder, learned: Examples, sequences: list[Sequence], mistakes: list[str]) -> list[Result]:
    """Encoders that learned everything but one framework, or one family of models, judged on that one.

    Args:
        start: encoder that goes on learning.
        learned: examples of hypothetical runs.
        sequences: runs to learn and to recognise.
        mistakes: is appended to, one sentence each.

    Returns:
        Accuracies by what was left out.
    """
    results = []
    parts = parts_of(sequences, 0)
    for key in ("group", "family"):
        names = sorted({getattr(one, key) for one in sequences if one.group in FRAMEWORKS})
        found = (
            looked_at({"lstm": encoder}, name, [one for one in sequences if getattr(one, key) == name], 0, sequences)
            for name, encoder in one_left_out(parts, start, learned, key, 0, names)
        )
        results += rows(f"without_{key}", found, mistakes)
    return results


def learned_in(folder: Path | None, n_hypothetical: int, n_epochs: int) -> tuple[Examples, dict[str, Encoder]]:
    """What is learned from hypothetical runs, or was learned before and kept.

    Args:
        folder: where it is kept; None: nowhere.
        n_hypothetical: runs to generate.
        n_epochs: passes over them.

    Returns:
        The examples, and the trained encoders by kind.
    """
    arrays = folder / "examples.npz" if folder else None
    if folder and arrays and arrays.exists():
        kept = np.load(arrays)
        encoders = {kind: encoder_from_bytes((folder / f"{kind}.weights").read_bytes()) for kind in KINDS}
        return Examples(*(kept[name] for name in ("frames", "n_frames", "ngrams", "labels"))), encoders
    learned = on_hypothetical(n_hypothetical, 0)
    encoders = train_both(learned, 0, n_epochs)
    if folder and arrays:
        folder.mkdir(parents=True, exist_ok=True)
        for kind, encoder in encoders.items():
            (folder / f"{kind}.weights").write_bytes(encoder.to_bytes())
        np.savez(arrays, frames=learned.frames, n_frames=learned.n_frames, ngrams=learned.ngrams, labels=learned.labels)
    return learned, encoders


def shipped(recordings: list[Sequence], sequences: list[Sequence], quick: bool) -> list[Result]:
    """The shipped encoders on runs generated with another seed: nothing left out, so no claim of generality.

    Args:
        recordings: of real frameworks.
        sequences: generated runs.
        quick: fewer pairs of runs for changes.

    Returns:
        Accuracies of each shipped encoder.
    """
    results = []
    n_pairs = 100 if quick else N_CHANGES
    for kind in KINDS:
        encoder = encoder_from_bytes(shipped_blob(kind))
        fresh = total(recognised(encoder, sequences, 1))
        results += both(f"{kind} shipped, fresh generated ({fresh.n})", kind, fresh)
        looks = [("the same", sequences, LOST), ("recorded", recordings, LOST)]
        looks += [("the same", sequences, rate) for rate in OTHER_LOST if kind == LstmEncoder.kind]
        for name, ones, rate in looks:
            lossy = total(recognised(encoder, ones, 2, rate=rate, n_steps=STEPS_LOSSY))
            metric = f"{kind} {name}, {100 * rate:g} % of calls lost or exchanged, {STEPS_LOSSY} steps ({lossy.n})"
            results += both(metric, kind, lossy, has_target=False)
        changed = changes_noticed(encoder, sequences, n_pairs, 3)
        results += both(f"changes_noticed_within_2_steps_{kind} ({changed.n})", kind, changed)
    return results


def steps_to_recognise(encoder: Encoder | None, sequences: list[Sequence]) -> float:
    """Steps of mid-training until the right answer stands, in quarters: median."""
    found = []
    for sequence in sequences:
        for quarters in range(2, 17):
            accuracy = total(recognised(encoder, [sequence], 5, n_steps=quarters / 4))
            if accuracy.n_right:
                found.append(quarters / 4)
                break
    return statistics.median(found)


def cost(encoder: Encoder | None, sequences: list[Sequence]) -> tuple[float, float, float]:
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


def lossy_cost(encoder: Encoder | None, sequences: list[Sequence]) -> float:
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


def costs(recordings: list[Sequence], fresh: list[Sequence]) -> list[Result]:
    """How long the shipped encoders take to be right, in steps, and what a step costs."""
    results = []
    for kind in KINDS:
        encoder = encoder_from_bytes(shipped_blob(kind))
        results.append(Result(f"steps_to_recognise_{kind}", steps_to_recognise(encoder, recordings), "", "<= 2"))
        median_us, mean_us, new_us = cost(encoder, [*fresh, *recordings])
        results.append(Result(f"us_per_step_{kind}", mean_us, "us CPU", "<= 50"))
        results.append(Result(f"us_per_step_median_{kind}", median_us, "us CPU", "<= 50"))
        results.append(Result(f"us_once_per_new_step_{kind}", new_us, "us CPU"))
        results.append(Result(f"us_per_step_lossy_{kind}", lossy_cost(encoder, recordings[::2]), "us CPU"))
    return results


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--unnamed-only", action="store_true", help="nothing of the second protocol, nor of what ships")
    parser.add_argument("--shipped-only", action="store_true", help="only the weights that ship")
    parser.add_argument("--learned", type=a_folder_to_write, help="folder that keeps what hypothetical runs taught")
    parser.add_argument("--n-each", type=positive, default=60, help="generated runs per framework")
    parser.add_argument("--seed", type=natural, default=SEED, help="of generated runs")
    parser.add_argument("--mistakes", action="store_true", help="list every wrong answer")
    parser.add_argument("--traces", type=a_folder, help="folder of real traces")
    arguments = parser.parse_args()
    quick = arguments.quick
    if arguments.unnamed_only and arguments.shipped_only:
        parser.error("--unnamed-only and --shipped-only leave nothing to judge; give one of them")
    mistakes: list[str] = []
    recordings = recorded()
    results: list[Result] = []
    if not arguments.shipped_only:
        runs = list(generated(8 if quick else arguments.n_each, arguments.seed))
        n_hypothetical, n_epochs = (6000, 15) if quick else (N_HYPOTHETICAL, N_EPOCHS)
        learned, encoders = learned_in(arguments.learned, n_hypothetical, n_epochs)
        results += unnamed(encoders, [*recordings, *runs], mistakes)
        if not arguments.unnamed_only:
            start = encoders["lstm"]
            assert isinstance(start, LstmEncoder)
            results += without(start, learned, [*recordings, *runs], mistakes)
    if not arguments.unnamed_only:
        fresh = list(generated(4 if quick else 40, arguments.seed + 1))
        results += shipped(recordings, fresh, quick)
        results += costs(recordings[::8], [one for one in fresh if not one.group.startswith("other")][::4])
    report("stage_fingerprint", results, as_json=arguments.json)
    if arguments.traces:
        for name, shown in real(arguments.traces):
            print(f"{name}: {shown}")
    if arguments.mistakes:
        print("\n".join(mistakes))


if __name__ == "__main__":
    main()
