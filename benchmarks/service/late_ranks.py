"""Who is late: drawn jobs with known stragglers on the emulated clock, joined as daemons join them.

Run: python -m benchmarks late_ranks [--jobs N] [--nobody-jobs N] [--seed S] [--quick] [--json]

Each job has one story: nobody is late, everybody is now and then, some ranks or a node always are, one after another
is, or a link is slow. Precision and recall judge the names at the end of each part of a story. `..._at_any_time` also
counts wrong names before.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from scipy.stats import binomtest

from benchmarks.lib.argument_types import positive
from benchmarks.lib.reporting import Result, options_of, report, say
from zerotune.agent.nccl import fabric
from zerotune.agent.nccl.emulated.device.clock import Clock
from zerotune.store.records import Algorithm, Collective, Protocol, TimingSource
from zerotune.store.wire import FLAG_TIMED
from zerotune.tuner.join import OBSERVATION, Joiner
from zerotune.tuner.late_ranks.finder import LateRankFinder

FABRICS: Final = (("h100_node", 8), ("h100_ib_2", 16), ("ethernet_boxes", 8), ("h100_ib_16", 32), ("h100_node", 2))
STORIES: Final = ("nobody", "random", "bursts", "persistent", "two", "node", "moves", "slow_link")
NOBODY: Final = ("nobody", "random", "bursts", "slow_link")
"""Stories without a late rank: nobody may be named for a moment."""
N_STEPS: Final = 448
"""Of each part of a story."""
LEAST_LATE_US: Final = 50.0
EVERY_STEPS: Final = 8
"""How often the daemons join."""


@dataclass
class Story:
    """The truth of one part of a job."""

    late: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Rank: its lateness, as a share of a step without it, and the share of steps.

    At least `LEAST_LATE_US`, and beyond the noise of computation: four of its standard deviations.
    """
    node: int | None = None
    """The node that is late as a whole; `late` has its ranks."""
    is_random: bool = False
    """In each step one random rank is late by rank 0's `late`."""
    burst_steps: int = 0
    """The same rank is late for so many steps each time."""
    slow: frozenset[int] = frozenset()
    """Members of the communicator whose link is slow."""
    slower: float = 1.0


def drawn(kind: str, n_ranks: int, per_node: int, rng: np.random.Generator) -> list[Story]:
    def lateness() -> tuple[float, float]:
        return float(rng.uniform(0.03, 0.4)), float(rng.uniform(0.8, 1.0))

    ranks = [int(one) for one in rng.permutation(n_ranks)]
    match kind:
        case "nobody":
            return [Story()]
        case "random":
            return [Story({0: lateness()}, is_random=True)]
        case "bursts":
            return [Story({0: lateness()}, is_random=True, burst_steps=int(rng.integers(2, 16)))]
        case "persistent":
            return [Story({ranks[0]: lateness()})]
        case "two":
            return [Story({rank: lateness() for rank in ranks[: 2 if n_ranks > 4 else 1]})]
        case "node" if n_ranks > per_node:
            node, how = int(rng.integers(n_ranks // per_node)), lateness()
            return [Story(dict.fromkeys(range(node * per_node, (node + 1) * per_node), how), node=node)]
        case "moves":
            return [Story({ranks[0]: lateness()}), Story({ranks[1]: lateness()}), Story()]
        case "slow_link" if n_ranks > 4:
            return [Story(slow=frozenset([-1]), slower=float(rng.uniform(1.5, 4.0)))]
    return [Story()]


class World:
    """One job on the emulated clock, and the daemons of its nodes."""

    def __init__(self, kind: str, seed: int) -> None:
        rng = np.random.default_rng([seed, STORIES.index(kind)])
        name, n_ranks = FABRICS[int(rng.integers(len(FABRICS)))]
        self.fabric = fabric.load(name)
        self.n_ranks, self.per_node = n_ranks, min(self.fabric.ranks_per_node, n_ranks)
        self.rng, self.seed = rng, seed
        self.clocks = [Clock() for _ in range(n_ranks)]
        self.stream_end_us: dict[int, float] = defaultdict(float)
        self.sequence: Counter[int] = Counter()
        everyone = tuple(range(n_ranks))
        self.is_hybrid = kind == "slow_link" or bool(rng.random() < 0.4)
        self.per_group = max(2, self.per_node // 2 if n_ranks == self.per_node else self.per_node)
        groups = [everyone[at : at + self.per_group] for at in range(0, n_ranks, self.per_group)]
        replicas = [everyone[at :: self.per_group] for at in range(self.per_group)]
        self.shards = groups if self.is_hybrid and n_ranks > 4 else [everyone]
        self.replicas = replicas if self.is_hybrid and n_ranks > 4 else []
        self.n_layers = int(rng.integers(3, 8))
        self.layer_bytes = 1 << int(rng.integers(20, 27))
        self.compute_us = float(rng.uniform(300, 5000))
        self.noise = float(rng.choice([0.002, 0.01, 0.04]))
        self.uneven = rng.normal(0.0, 0.0015, n_ranks)
        self.stories = drawn(kind, n_ranks, self.per_node, rng)
        for story in self.stories:
            if story.slow:
                story.slow = frozenset(self.replicas[int(rng.integers(len(self.replicas)))])
        n_nodes = n_ranks // self.per_node
        self.finders = [LateRankFinder() for _ in range(n_nodes)]
        self.joiners = [Joiner(finder.observe) for finder in self.finders]
        for node in range(1, n_nodes):
            self.finders[0].node_reported(node * self.per_node, self.per_node)
        self.records: list[list[tuple[object, ...]]] = [[] for _ in range(n_ranks)]
        self.step, self.steps_us, self.usual_us = 0, [0.0], 0.0
        for _ in range(EVERY_STEPS):
            self.play(Story())
        self.usual_us = self.steps_us[-1] / EVERY_STEPS

    def collective(self, members: Sequence[int], collective: Collective, message_bytes: int, slower: float) -> None:
        """One call, which all members wait for."""
        comm_id = hash(tuple(members)) & 0x7FFFFFFF
        index = self.sequence[comm_id]
        self.sequence[comm_id] += 1
        shape = self.fabric.communicator(members)
        noise = self.fabric.noise
        truth_us = self.fabric.truth_us(shape, collective, Algorithm.ring, Protocol.simple, 1, message_bytes) * slower
        truth_us *= noise.factor(self.seed, comm_id, index, 0)
        arrivals = [self.clocks[one].arrival_us() + noise.skew_us(self.seed, comm_id, index, one) for one in members]
        start_us = max(*arrivals, self.stream_end_us[comm_id])
        end_us = start_us + truth_us
        for rank, arrival_us in zip(members, arrivals, strict=True):
            began_us = max(arrival_us, self.stream_end_us[comm_id])
            duration_us = end_us - began_us
            self.records[rank].append((comm_id, message_bytes, int(began_us * 1e3), duration_us, index, len(members),
                                       shape.n_nodes, rank, int(collective), self.step))  # fmt: skip
            self.clocks[rank].wait_until(end_us)
        self.stream_end_us[comm_id] = end_us

    def play(self, story: Story) -> None:
        """One step."""
        late = dict(story.late)
        if story.is_random:
            who = np.random.default_rng([self.seed, self.step // max(1, story.burst_steps)]).integers(self.n_ranks)
            late = {int(who): story.late[0]}
        # Ranks of a late node are late together.
        draws = self.rng.random(self.n_ranks)
        chance = {rank: float(draws[0 if story.node is not None else rank]) for rank in late}
        total_us = self.compute_us * (1.0 + self.uneven) * self.rng.lognormal(0.0, self.noise, self.n_ranks)
        least_us = max(LEAST_LATE_US, 4 * self.noise * self.compute_us)
        for rank, (share, often) in late.items():
            total_us[rank] += max(least_us, self.usual_us * share) * (chance[rank] < often)
        part_us = total_us / (2 * self.n_layers)
        for kind in (Collective.all_gather, Collective.reduce_scatter):
            for _ in range(self.n_layers):
                for rank in range(self.n_ranks):
                    self.clocks[rank].advance(part_us[rank])
                for group in self.shards:
                    self.collective(group, kind, self.layer_bytes, 1.0)
        for group in self.replicas:
            slower = story.slower if set(group) == set(story.slow) else 1.0
            self.collective(group, Collective.all_reduce, self.layer_bytes, slower)
        self.steps_us.append(self.clocks[0].now_us())
        self.step += 1

    def report(self) -> None:
        """Ranks send, and daemons join; the leading one last."""
        for rank, rows in enumerate(self.records):
            block = np.zeros(len(rows), OBSERVATION)
            names = ("comm_id", "message_bytes", "start_ns", "duration_us", "sequence", "n_ranks", "n_nodes", "rank",
                     "collective", "step")  # fmt: skip
            for name, values in zip(names, zip(*rows, strict=True), strict=True):
                block[name] = values
            block["flags"], block["timing_source"] = FLAG_TIMED, TimingSource.emulated
            self.joiners[rank // self.per_node].add(rank, block)
            rows.clear()
        for node in reversed(range(len(self.joiners))):
            n_reporters = self.per_node + (len(self.joiners) - 1 if node == 0 else 0)
            observed, _ = self.joiners[node].join(float(self.step), n_reporters)
            if node:
                seen = self.finders[node].lateness(self.recent_us())
                self.finders[0].node_reported(node * self.per_node, self.per_node, f"node{node}", seen)
                self.joiners[0].add(node * self.per_node, observed)

    def recent_us(self) -> float:
        return float(np.median(np.diff(self.steps_us[-64:])))

    def named(self) -> tuple[set[int], bool]:
        """Ranks that the leading daemon names, all of a node if it names the node; and whether it names a link."""
        lateness = self.finders[0].lateness(self.recent_us())
        ranks = set()
        for one in lateness.late:
            first = one.rank // self.per_node * self.per_node
            ranks |= set(range(first, first + self.per_node)) if one.is_node else {one.rank}
        return ranks, bool(lateness.slow)


@dataclass(frozen=True)
class Part:
    """The daemon's answers in one part of a job."""

    kind: str
    right: int
    """Names at its end that are right, wrong ones, and late ranks that are missing."""
    wrong: int
    missing: int
    is_link_right: bool
    """The link was judged rightly at its end."""
    ever_wrong: bool
    """A rank was named at any time that was late neither in this part nor in the one before."""
    steps_to_name: int | None
    """From its begin on until all late ranks are named; None: there is none, or they never were."""


def judged(kind: str, seed: int) -> list[Part]:
    """The daemon's answers in each part of a job."""
    world = World(kind, seed)
    found: list[Part] = []
    before: set[int] = set()
    for story in world.stories:
        truth = set() if story.is_random else set(story.late)
        ever_wrong, steps_to_name = False, None
        for at in range(N_STEPS):
            world.play(story)
            if at % EVERY_STEPS == EVERY_STEPS - 1:
                world.report()
                named, link = world.named()  # as `status` and the store ask all the time
                ever_wrong |= bool(named - truth - before)
                if steps_to_name is None and truth and truth <= named:
                    steps_to_name = at + 1
        counts = len(named & truth), len(named - truth), len(truth - named)
        found.append(Part(kind, *counts, link == bool(story.slow), ever_wrong, steps_to_name))
        before = truth
    return found


def played(n_jobs: int, n_nobody: int, seed: int) -> Iterator[Result]:
    """Play jobs, in two processes."""
    parts: list[Part] = []
    began_s, cases = time.monotonic(), [(kind, seed + one) for one in range(n_jobs) for kind in STORIES]
    cases += [(kind, seed + one) for one in range(n_jobs, n_nobody) for kind in NOBODY]
    with ProcessPoolExecutor(2) as pool:
        for done, of_job in enumerate(pool.map(judged, *zip(*cases, strict=True), chunksize=4), 1):
            parts += of_job
            if done % 40 == 0:
                say(f"{done} of {len(cases)} jobs after {time.monotonic() - began_s:.0f} s")
    right, wrong, missing = (sum(getattr(one, name) for one in parts) for name in ("right", "wrong", "missing"))
    yield Result("jobs", len(cases), "jobs")
    yield Result("late_rank_precision", right / max(1, right + wrong), "of ranks named", ">= 0.99")
    yield Result("late_rank_recall", right / max(1, right + missing), "of late ranks", ">= 0.99")
    for kind in STORIES:
        of_kind = [one for one in parts if one.kind == kind]
        yield Result(f"blamed_wrongly@{kind}", _share(one.wrong > 0 for one in of_kind), "of parts of jobs", "<= 0.01")
        ever = _share(one.ever_wrong for one in of_kind)
        target = "<= 0.01" if kind in NOBODY else ""
        yield Result(f"blamed_wrongly_at_any_time@{kind}", ever, "of parts of jobs", target)
        if n := sum(one.right + one.missing for one in of_kind):
            recall = sum(one.right for one in of_kind) / n
            yield Result(f"late_rank_recall@{kind}", recall, "of late ranks", ">= 0.99")
    in_noise = [one.ever_wrong for one in parts if one.kind in NOBODY]
    test = binomtest(sum(in_noise), len(in_noise))
    share, upper = test.statistic, test.proportion_ci(0.9).high  # one end of the interval, so 95 %
    yield Result("jobs_without_late_ranks", len(in_noise), "jobs")
    yield Result("blamed_wrongly_without_late_ranks", share, "of jobs, at any time", "<= 0.01")
    yield Result("blamed_wrongly_without_late_ranks_upper_95", upper, "of jobs, at any time", "<= 0.01")
    steps = [one.steps_to_name for one in parts if one.steps_to_name is not None]
    yield Result("steps_to_name_median", float(np.median(steps)), "steps")
    yield Result("steps_to_name_p99", float(np.percentile(steps, 99)), "steps")
    yield Result("slow_link_accuracy", _share(one.is_link_right for one in parts), "of parts of jobs", ">= 0.99")


def _share(which: Iterable[bool]) -> float:
    return float(np.mean(list(which)))


def main() -> None:
    parser = options_of(__doc__, quick="few jobs of every kind; ends within 60 s")
    parser.add_argument("--jobs", type=positive, default=50, help="of every kind")
    parser.add_argument("--nobody-jobs", type=positive, default=75, help="of every kind in which nobody is late")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    n_jobs, n_nobody = (2, 2) if arguments.quick else (arguments.jobs, arguments.nobody_jobs)
    results = list(played(n_jobs, n_nobody, arguments.seed))
    report("late_ranks", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
