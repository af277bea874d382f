"""What policies and predictions are judged on: keys with the true time of every candidate.

From shipped fabrics, from generated ones (`generated_fabrics`), from the sweeps in a store, and from files that
somebody else measured: NVIDIA's tuner CSV, our own, and published nccl-tests output (`recorded_grids`).
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.lib.argument_types import natural
from benchmarks.lib.data.generated_fabrics import Surface, generate
from benchmarks.lib.data.recorded_grids import load as load_grids
from benchmarks.lib.reporting import say
from benchmarks.policy.regret_policies import Problem
from zerotune.agent.nccl import cost_model, fabric
from zerotune.store.errors import StoreError, TraceError
from zerotune.store.records import BASELINE, Candidate, Collective, CommunicatorClass, DecisionKey, Phase, size_class
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.rows.measurements import MEASUREMENT, candidate_of
from zerotune.tuner.modeling.features import CostPrior
from zerotune.tuner.traces import read_trace

Facts = Mapping[str, "str | int | float | bool"]
KINDS = (Collective.all_gather, Collective.reduce_scatter)
GENERATED_BASES = ("ethernet_boxes", "few_sms_node", "h100_ib_16", "h100_ib_2", "h100_node")
LEAST_NOISE, MOST_NOISE, USUAL_NOISE = 0.005, 0.3, 0.03


class DataSet(NamedTuple):
    """Keys of one machine, and its description."""

    name: str
    problems: list[Problem]
    facts: Facts


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


def fabric_problems(
    machine: fabric.Fabric,
    facts: Facts,
    *,
    n_per_octave: float = 1.0,
    n_ranks: int = 16,
    surface: Surface | None = None,
) -> list[Problem]:
    """Keys of one fabric: two collectives, 4 KiB to 128 MiB.

    Args:
        machine: the fabric, whose truth is known.
        facts: what is told to whoever learns, see `Fabric.describe`.
        n_per_octave: sizes per doubling.
        n_ranks: of the communicator, at most; a smaller fabric has fewer.
        surface: makes the truth bend; None: as the fabric's file says.

    Returns:
        One entry per collective and size.
    """
    place = machine.communicator(range(min(machine.max_ranks, n_ranks)))
    topology = machine.topology(place)
    costs = CostPrior(facts)
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
                us = machine.truth_us(place, kind, setting.algorithm, setting.protocol, n_channels, nbytes)
                if surface is not None:
                    assert setting.protocol is not None, "NCCL's own choice says what ran"
                    used = cost_model.channels_used(kind, setting.protocol, nbytes, n_channels)
                    us *= surface.factor(int(kind), Candidate(setting.algorithm, setting.protocol, used), nbytes)
                truth.append(us)
            key = DecisionKey(place, kind, Phase.other, size_class(nbytes))
            problems.append(Problem(key, nbytes, candidates, ran, tuple(truth), machine.noise.sigma))
    return problems


def shipped(n_per_octave: float = 1.0) -> Iterator[DataSet]:
    """Every shipped fabric."""
    for name in fabric.names():
        machine = fabric.load(name)
        facts = machine.describe()
        yield DataSet(name, fabric_problems(machine, facts, n_per_octave=n_per_octave), facts)


def generated(seeds: Iterable[int], n_per_octave: float = 1.0, n_ranks: int = 16) -> Iterator[DataSet]:
    """Random variations of the shipped fabrics, in turn.

    Args:
        seeds: one fabric each.
        n_per_octave: sizes per doubling.
        n_ranks: of the communicator, at most.

    Yields:
        A data set per seed, with bends of its own.
    """
    for seed in seeds:
        machine, facts = generated_fabric(seed, GENERATED_BASES[seed % len(GENERATED_BASES)])
        problems = fabric_problems(machine, facts, n_per_octave=n_per_octave, n_ranks=n_ranks, surface=Surface(seed))
        yield DataSet(f"generated_{seed}", problems, facts)


def as_undescribed(data: DataSet) -> DataSet:
    """This machine without its description; what NCCL chooses there by itself is still seen."""
    return data._replace(name=f"undescribed_{data.name}", facts={})


def generated_fabric(seed: int, base: str) -> tuple[fabric.Fabric, Facts]:
    """A random variation of the shipped fabric `base`, and its description."""
    path = generate(seed, base)
    machine = fabric.load(path)
    return machine, {**machine.describe(), "emulated": str(path)}


def of_store(path: Path) -> Iterator[DataSet]:
    """Every fabric of a store that holds the default and forced settings."""
    with Store.open(path, read_only=True) as store:
        n_jobs = Counter(job.fabric_id for job in store.jobs())
        for fabric_id, facts in store.fabrics().items():
            problems = block_problems(store.measurements(fabric_id))
            if problems:
                if n_jobs[fabric_id] > 1:
                    say(f"{fabric_id}: {n_jobs[fabric_id]} jobs or imported files, taken together")
                yield DataSet(fabric_id, problems, facts)
            else:
                why = "no size has both NCCL's own choice (import it with --default) and a forced setting"
                say(f"{fabric_id}: left out, {why}")


SOURCES: Final[dict[str, dict[str, Any]]] = {
    "store": {"type": Path, "help": "judge on the sweeps of this store, too"},
    "data": {"type": Path, "help": "judge on everything measured below this folder, too"},
    "generated": {"type": natural, "default": 0, "metavar": "N", "help": "judge on N random fabrics, too"},
    "only": {"default": "", "metavar": "TEXT", "help": "data sets whose name holds this"},
    "undescribed": {"action": "store_true", "help": "as if nobody had described any of these machines"},
}
"""Options of several benchmarks that choose their data sets."""


def add_sources(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add these options of SOURCES."""
    for name in names:
        parser.add_argument(f"--{name}", **SOURCES[name])


def check_sources(parser: argparse.ArgumentParser, store: Path | None, folder: Path | None) -> None:
    """End with a message (exit code 2) where `--store` or `--data` name nothing that can be used.

    Args:
        parser: prints the message.
        store: a store's file; None: not given.
        folder: with files that somebody measured; None: not given.
    """
    if folder is not None:
        if not folder.is_dir():
            parser.error(f"--data {folder} is no folder; name the one that holds the files")
        _refuse_nothing(parser, f"--data {folder}", of_folder(folder))
    if store is not None:
        if store.is_dir():
            parser.error(f"--store {store} is a folder; name a store's file in it")
        try:
            Store.open(store, read_only=True).close()
        except StoreError as error:
            remedy = error.remedy if store.exists() else f"make one with `zerotune store import FILE --store {store}`"
            parser.error(f"--store: {error.problem}; {remedy}")
        _refuse_nothing(parser, f"--store {store}", of_store(store))


def _refuse_nothing(parser: argparse.ArgumentParser, source: str, data_sets: Iterator[DataSet]) -> None:
    """Figures of no keys at all would look as if every target were met."""
    if next(data_sets, None) is None:
        parser.error(f"{source}: nothing in it can be judged on; it needs NCCL's own choice and a forced setting")


def of_folder(folder: Path) -> Iterator[DataSet]:
    """Every machine below `folder`: published grids of nccl-tests, and tuner CSVs (ours or NVIDIA's)."""
    for grid in load_grids(folder):
        place = CommunicatorClass(grid.n_ranks, max(1, grid.n_nodes))
        found = {
            (DecisionKey(place, grid.collective, Phase.other, size_class(nbytes)), nbytes): known
            for nbytes, known in grid.places().items()
        }
        if problems := _problems(found):
            yield DataSet(f"{grid.name}:{grid.collective.name}", problems, {})
    paths = sorted(folder.rglob("*.csv*"))
    alike = Counter(path.stem for path in paths)
    for path in paths:
        blocks: dict[str | None, list[np.ndarray]] = {}
        try:
            trace = read_trace(path)
            for portion in trace.portions() if trace.is_measurements else ():
                blocks.setdefault(portion.fabric_id, []).append(portion.rows)
        except TraceError as error:
            say(f"{path}: left out, {error}")
            continue
        name = path.stem if alike[path.stem] == 1 else str(path.relative_to(folder).with_suffix(""))
        n_found = 0
        for fabric_id, parts in blocks.items():
            if problems := block_problems(np.concatenate(parts)):
                n_found += 1
                yield DataSet(f"{name}:{fabric_id}" if len(blocks) > 1 else name, problems, {})
        if not n_found:
            say(f"{path}: left out, no size has both NCCL's own choice and a forced setting")


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
    return _problems(groups)


def _problems(groups: Mapping[tuple[DecisionKey, int], Mapping[Candidate, Sequence[float]]]) -> list[Problem]:
    """One problem per key: the size with the most settings stands for its class."""
    best_filled: dict[DecisionKey, tuple[int, dict[Candidate, list[float]]]] = {}
    for (key, nbytes), known in _pooled(groups).items():
        if BASELINE in known and len(known) > max(1, len(best_filled.get(key, (0, {}))[1])):
            best_filled[key] = (nbytes, known)
    problems = []
    for key, (nbytes, known) in sorted(best_filled.items()):
        candidates = (BASELINE, *(one for one in known if one != BASELINE))
        spread = [np.std(np.log(times)) for times in known.values() if len(times) > 2]
        noise = float(np.clip(np.median(spread), LEAST_NOISE, MOST_NOISE)) if spread else USUAL_NOISE
        truth = tuple(float(np.median(known[one])) for one in candidates)
        problems.append(Problem(key, nbytes, candidates, BASELINE, truth, noise))
    return problems


def _pooled(
    groups: Mapping[tuple[DecisionKey, int], Mapping[Candidate, Sequence[float]]],
) -> dict[tuple[DecisionKey, int], dict[Candidate, list[float]]]:
    """The measurements of settings that are one and the same to NCCL, joined: on little traffic it runs fewer channels
    than it is asked for (`cost_model.channels_used`), and the luckiest of several equal ones would pass for the best.

    Joined settings go by the lowest count that was asked of the cell at any size and comes to the same: so does the
    tuner, which offers settings of one effect once.
    """
    counts: dict[tuple[CommunicatorClass, Collective], dict[Candidate, None]] = {}
    for (key, _), known in groups.items():
        counts.setdefault((key.communicator, key.collective), {}).update(dict.fromkeys(known))
    asked = {place: sorted(known, key=lambda one: one.n_channels) for place, known in counts.items()}
    pooled: dict[tuple[DecisionKey, int], dict[Candidate, list[float]]] = {}
    for (key, nbytes), known in groups.items():
        names: dict[Candidate, Candidate] = {}
        for one in asked[key.communicator, key.collective]:
            names.setdefault(cost_model.in_effect(key.collective, nbytes, one), one)
        here = pooled.setdefault((key, nbytes), {})
        for one, times in known.items():
            here.setdefault(names[cost_model.in_effect(key.collective, nbytes, one)], []).extend(times)
    return pooled


def sweep_block(problems: Sequence[Problem], seed: int = 3, n_each: int = 3) -> np.ndarray:
    """A sweep of all candidates, as measurements.

    Args:
        problems: keys with true times.
        seed: of the noise.
        n_each: calls per key and candidate.

    Returns:
        MEASUREMENT, shape (n,).
    """
    rng = np.random.default_rng(seed)
    rows = []
    for problem in problems:
        place = problem.key.communicator
        for arm, (candidate, us) in enumerate(zip(problem.candidates, problem.truth_us, strict=True)):
            ran = candidate if arm else problem.ran_by_default
            cell = (255, 255) if ran.algorithm is None else (int(ran.algorithm), int(ran.protocol or 0))
            for _ in range(n_each):
                noisy_us = us * math.exp(rng.normal(0, problem.noise))
                where = place.n_ranks, place.n_nodes, problem.message_bytes, noisy_us, 0, 0, math.nan
                what = int(problem.key.collective), 0, *cell, ran.n_channels, arm == 0, 1, 0, 4, 0
                rows.append((*where, *what))
    return np.array(rows, MEASUREMENT)
