"""How much each policy loses against the best setting, on equal terms: same keys, same calls, same noise.

    python benchmarks/policy_regret.py [--quick] [--json] [--store FILE] [--data DIR]

Data sets: every shipped fabric, the same with nothing to gain (A/A), every fabric of a store (`--store`), and
sweeps with forced settings below `--data` (NVIDIA's tuner CSV). A training step makes one call per key.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from regret_policies import Default, Problem, peers
from reporting import Result, report

from agent.nccl import cost_model, fabric
from store.database import Store
from store.errors import UserError
from store.measurements import MEASUREMENT, candidate_of
from store.records import (
    BASELINE,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    StepRecord,
    TimingSource,
    size_class,
)
from tuner import trainer
from tuner.brain import Brain, BrainSettings
from tuner.features import CostPrior
from tuner.knowledge import Knowledge
from tuner.model.baked import Baked
from tuner.model.estimators import MODELS, WINNER
from tuner.model.training_set import build, candidate_at

Facts = Mapping[str, str | int | float | bool]
COMM_SHARE_OF_STEP = 0.3
N_FOLDS = 6
KINDS = (Collective.all_gather, Collective.reduce_scatter)


class Measured(CostPrior):
    """Offers the candidates that a data set has measured, and no others."""

    def __init__(self, facts: Facts, problems: Sequence[Problem]) -> None:
        super().__init__(facts)
        self._measured: dict[tuple[CommunicatorClass, Collective], dict[Candidate, None]] = {}
        for problem in problems:
            place = problem.key.communicator, problem.key.collective
            self._measured.setdefault(place, {}).update(dict.fromkeys(problem.candidates))

    def candidates(self, communicator: CommunicatorClass, collective: Collective) -> tuple[Candidate, ...]:
        return tuple(self._measured.get((communicator, collective), {BASELINE: None}))


class Ours(Default):
    """The brain, fed as the daemon feeds it; plans are adopted at the next step."""

    def __init__(self, name: str, problems: Sequence[Problem], facts: Facts, knowledge: Knowledge) -> None:
        self.name = name
        self.brain = Brain(name, "fabric", facts, knowledge, BrainSettings(), lambda: 0.0)
        self.brain.restrict(Measured(facts, problems))
        self._problems = problems
        self._step, self._epoch = 0, 0
        self._settings: dict[DecisionKey, Candidate] = {}
        self._rows: list[tuple[object, ...]] = []
        self.measured: list[np.ndarray] = []

    def choose(self, key: int) -> int:
        problem = self._problems[key]
        asked = self._settings.get(problem.key, BASELINE)
        return problem.candidates.index(asked) if asked in problem.candidates else 0

    def learn(self, key: int, arm: int, us: float) -> None:
        problem = self._problems[key]
        ran = problem.candidates[arm] if arm else problem.ran_by_default
        place = problem.key.communicator
        cell = (255, 255) if ran.algorithm is None else (int(ran.algorithm), int(ran.protocol or 0))
        self._rows.append(
            (
                place.n_ranks,
                place.n_nodes,
                problem.message_bytes,
                us,
                self._epoch,
                self._step,
                math.nan,
                int(problem.key.collective),
                int(problem.key.phase),
                *cell,
                ran.n_channels,
                arm == 0,
                0,
                0,
                int(TimingSource.emulated),
            )
        )

    def end_of_step(self) -> None:
        block = np.array(self._rows, MEASUREMENT)
        self.measured.append(block)
        self._rows = []
        self.brain.observe(block)
        total_us = float(block["duration_us"].sum())
        self.brain.step_finished(StepRecord(self._step, self._epoch, total_us / COMM_SHARE_OF_STEP))
        self._step += 1
        plan = self.brain.propose()
        if plan is not None:
            self._epoch = plan.epoch
            self._settings = {
                DecisionKey(row.communicator, row.collective, row.phase, size_class(row.min_bytes)): row.candidate
                for row in plan.rows
            }
            self.brain.adopted(plan.epoch, self._step)


def fabric_problems(machine: fabric.Fabric, n_per_octave: float) -> list[Problem]:
    """Keys of one fabric: two collectives, 4 KiB to 128 MiB."""
    place = machine.communicator(range(min(machine.max_ranks, 16)))
    topology = machine.topology(place)
    costs = CostPrior(machine.describe())
    problems = []
    for kind in KINDS:
        for exponent in np.arange(12, 27.01, 1 / n_per_octave):
            nbytes = int(2**exponent)
            ran = cost_model.default_choice(topology, kind, nbytes)
            candidates = costs.candidates(place, kind)
            truth = []
            for candidate in candidates:
                setting = ran if candidate.is_baseline else candidate
                n_channels = min(setting.n_channels, topology.comm_channels)
                truth.append(machine.truth_us(place, kind, setting.algorithm, setting.protocol, n_channels, nbytes))
            key = DecisionKey(place, kind, Phase.other, size_class(nbytes))
            problems.append(Problem(key, nbytes, candidates, ran, tuple(truth), machine.noise.sigma))
    return problems


def block_problems(block: np.ndarray) -> list[Problem]:
    """Keys of measurements that hold the default and at least one forced setting."""
    groups: dict[tuple[DecisionKey, int], dict[Candidate, list[float]]] = {}
    for row in block:
        if row["outcome"] or not row["duration_us"] > 0:
            continue
        key = DecisionKey(
            CommunicatorClass(int(row["n_ranks"]), max(1, int(row["n_nodes"]))),
            Collective(int(row["collective"])),
            Phase.other,
            size_class(int(row["message_bytes"])),
        )
        named = candidate_of(int(row["algorithm"]), int(row["protocol"]), int(row["n_channels"]))
        candidate = BASELINE if row["is_default"] else named
        known = groups.setdefault((key, int(row["message_bytes"])), {})
        known.setdefault(candidate, []).append(float(row["duration_us"]))
    best_filled: dict[DecisionKey, tuple[int, dict[Candidate, list[float]]]] = {}
    for (key, nbytes), known in groups.items():
        if BASELINE in known and len(known) > len(best_filled.get(key, (0, {}))[1]) and len(known) > 1:
            best_filled[key] = (nbytes, known)
    problems = []
    for key, (nbytes, known) in sorted(best_filled.items()):
        candidates = (BASELINE, *(one for one in known if one != BASELINE))
        spread = [np.std(np.log(times)) for times in known.values() if len(times) > 2]
        noise = float(np.clip(np.median(spread), 0.005, 0.3)) if spread else 0.03
        truth = tuple(float(np.median(known[one])) for one in candidates)
        problems.append(Problem(key, nbytes, candidates, BASELINE, truth, noise))
    return problems


def play(problems: Sequence[Problem], policies: Sequence[Default], n_calls: int, seed: int) -> np.ndarray:
    """Arms chosen, shape [policies, keys, calls]; every policy meets the same noise."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((len(problems), n_calls))
    arms = np.zeros((len(policies), len(problems), n_calls), dtype=np.int64)
    for call in range(n_calls):
        for at, policy in enumerate(policies):
            for key, problem in enumerate(problems):
                arm = arms[at, key, call] = policy.choose(key)
                policy.learn(key, arm, problem.truth_us[arm] * math.exp(problem.noise * noise[key, call]))
            policy.end_of_step()
    return arms


def judge(name: str, problems: Sequence[Problem], policies: Sequence[Default], arms: np.ndarray) -> Iterator[Result]:
    """The figures of every policy on one data set."""
    n_calls = arms.shape[2]
    for at, policy in enumerate(policies):
        late, cost, until = [], [], []
        total = default_total = 0.0
        for key, problem in enumerate(problems):
            truth = np.array(problem.truth_us)
            us = truth[arms[at, key]]
            best, default = truth.min(), truth[0]
            late.append(us[-n_calls // 4 :].mean() / best - 1)
            cost.append(us.mean() / default - 1)
            total, default_total = total + us.sum(), default_total + default * n_calls
            if default / best > 1.01:
                reached = default - us >= 0.95 * (default - best)
                # From here on nine in ten calls have the gain (the rest may be exploration elsewhere).
                share = np.cumsum(reached[::-1])[::-1] / np.arange(n_calls, 0, -1)
                found = np.flatnonzero((share >= 0.9) & reached)
                until.append(float(found[0]) if len(found) else float(n_calls))
        label = f"{name}:{policy.name}"
        ours = policy.name.startswith("ours")
        yield Result(f"regret_mean@{label}", 100 * float(np.mean(late)), "%", "<= 2" if ours else "")
        yield Result(f"regret_worst@{label}", 100 * float(np.max(late)), "%", "<= 10" if ours else "")
        yield Result(
            f"loss_vs_default_worst@{label}",
            100 * max(0.0, total / default_total - 1),
            "%",
            "<= 0.5" if ours else "",
        )
        if until:
            target = {"ours_warm": "<= 20", "ours_cold": "<= 60"}.get(policy.name, "")
            yield Result(f"calls_to_95_percent_gain@{label}", float(np.median(until)), "calls", target)


def warm_knowledge(problems: Sequence[Problem], facts: Facts, n_calls: int) -> Knowledge:
    """What an earlier job of another seed leaves in the store: its model and its statistics."""
    first = Ours("earlier", problems, facts, Knowledge.empty())
    play(problems, [first], n_calls, seed=1)
    block = np.concatenate(first.measured)
    record = trainer.fit(block, "fabric", facts)
    with Store.open(_scratch()) as store:
        store.record_job("earlier", "fabric", dict(facts), problems[0].key.communicator.n_ranks)
        store.record_measurements("fabric", "earlier", block)
        store.flush()
        statistics = store.statistics("fabric")
    correction = Baked.from_bytes(record.blob) if record is not None else None
    return Knowledge(statistics, correction, record.training_hash[:8] if record is not None else "")


def _scratch() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="zerotune-regret-")) / "store.db"


def prediction(
    name: str, block: np.ndarray, facts: Facts, truth: Mapping[tuple[int, int, Candidate], float]
) -> Iterator[Result]:
    """Regret of the predicted choice and coverage at size classes left out one by one."""
    points = build(block, CostPrior(facts))
    classes = np.unique(points.size_class)
    regrets, inside = [], []
    costs = CostPrior(facts)
    for fold in range(N_FOLDS):  # neighbours of a size left out stay in: folds take every sixth size
        held = np.isin(points.size_class, classes[fold::N_FOLDS])
        if (~held).sum() < 4:
            continue
        test = points.take(held)
        mean, std = MODELS[WINNER]().fit(points.take(~held)).predict(test)
        inside.append(np.abs(test.residual - mean) <= 1.645 * np.hypot(std, test.noise))
        for collective, held_class in np.unique(np.stack([test.collective, test.size_class]), axis=1).T:
            rows = np.flatnonzero((test.collective == collective) & (test.size_class == held_class))
            nbytes = round(2 ** float(test.log2_bytes[rows[0]]))
            place = CommunicatorClass(int(test.n_ranks[rows[0]]), int(test.n_nodes[rows[0]]))
            options = [
                candidate_at(int(test.algorithm[row]), int(test.protocol[row]), int(test.n_channels[row])) or BASELINE
                for row in rows
            ]
            predicted = mean[rows] + costs.log_cost(place, Collective(int(collective)), options, nbytes)[0]
            true = [truth.get((int(collective), nbytes, one), math.nan) for one in options]
            if not np.isnan(true).any():
                regrets.append(true[int(np.argmin(predicted))] / min(true) - 1)
    if regrets:
        yield Result(f"regret_mean@{name}:predicted", 100 * float(np.mean(regrets)), "%", "<= 2")
        yield Result(f"regret_worst@{name}:predicted", 100 * float(np.max(regrets)), "%", "<= 10")
    if inside:
        yield Result(f"interval_coverage_90@{name}", 100 * float(np.mean(np.concatenate(inside))), "%", "85 to 95")


def sweep_block(problems: Sequence[Problem], seed: int = 3, n_each: int = 3) -> np.ndarray:
    """A sweep of all candidates, as measurements."""
    rng = np.random.default_rng(seed)
    rows = []
    for problem in problems:
        place = problem.key.communicator
        for arm, (candidate, us) in enumerate(zip(problem.candidates, problem.truth_us, strict=True)):
            ran = candidate if arm else problem.ran_by_default
            cell = (255, 255) if ran.algorithm is None else (int(ran.algorithm), int(ran.protocol or 0))
            for _ in range(n_each):
                noisy = us * math.exp(rng.normal(0, problem.noise))
                rows.append(
                    (
                        place.n_ranks,
                        place.n_nodes,
                        problem.message_bytes,
                        noisy,
                        0,
                        0,
                        math.nan,
                        int(problem.key.collective),
                        0,
                        *cell,
                        ran.n_channels,
                        arm == 0,
                        1,
                        0,
                        4,
                    )
                )
    return np.array(rows, MEASUREMENT)


def data_sets(arguments: argparse.Namespace) -> Iterator[tuple[str, list[Problem], Facts]]:
    """(name, keys, description of the fabric)."""
    for name in fabric.names():
        machine = fabric.load(name)
        yield name, fabric_problems(machine, 0.5 if arguments.quick else 1), machine.describe()
    if arguments.store is not None:
        with Store.open(arguments.store, read_only=True) as store:
            for fabric_id, facts in store.fabrics().items():
                yield fabric_id, block_problems(store.measurements(fabric_id)), facts
    if arguments.data is not None:
        from tuner.traces.trace import read_trace

        for path in sorted(Path(arguments.data).rglob("*.csv*")):
            try:
                blocks = list(read_trace(path).measurements())
            except UserError:
                continue
            if blocks:
                yield path.stem, block_problems(np.concatenate(blocks)), {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and calls; ends within 60 s")
    parser.add_argument("--store", type=Path, help="judge on the sweeps of this store, too")
    parser.add_argument("--data", type=Path, help="judge on tuner CSV files below this folder, too")
    arguments = parser.parse_args()
    n_calls = 100 if arguments.quick else 200
    results: list[Result] = []
    n_keys = n_promoted = 0
    started = time.monotonic()
    for name, problems, facts in data_sets(arguments):
        if not problems:
            continue
        print(f"{name}: {len(problems)} keys", file=sys.stderr, flush=True)
        if arguments.quick and time.monotonic() - started > 45:
            break
        rng = np.random.default_rng(0)
        warm = warm_knowledge(problems, facts, n_calls)
        policies = [
            *peers(problems, rng),
            Ours("ours_cold", problems, facts, Knowledge.empty()),
            Ours("ours_warm", problems, facts, warm),
        ]
        results += judge(name, problems, policies, play(problems, policies, n_calls, seed=0))
        # Where nothing is to be gained: every candidate costs what NCCL's choice costs.
        flat = [
            Problem(p.key, p.message_bytes, p.candidates, p.ran_by_default, (p.truth_us[0],) * len(p.truth_us), p.noise)
            for p in problems
        ]
        same = Ours("ours_cold", flat, facts, Knowledge.empty())
        arms = play(flat, [same], n_calls, seed=2)
        promoted = {one.key for one in same.brain.decisions() if one.kind == "promote"}
        n_keys, n_promoted = n_keys + len(flat), n_promoted + len(promoted)
        assert arms.shape[1] == len(flat)
        if not arguments.quick:
            truth = {
                (int(p.key.collective), p.message_bytes, candidate): us
                for p in problems
                for candidate, us in zip(p.candidates, p.truth_us, strict=True)
            }
            results += prediction(name, sweep_block(problems), facts, truth)
    results.append(Result("aa_false_promotion_rate", 100 * n_promoted / max(1, n_keys), "% of keys", "<= 1"))
    report("policy_regret", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
