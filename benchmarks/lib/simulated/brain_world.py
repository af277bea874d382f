"""A training job on a fabric's truth, played against a Brain; one process, no sleeping, seeded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from benchmarks.lib.simulated.host_view import HostView, Underway, usual_view
from zerotune.agent.nccl import cost_model, fabric
from zerotune.store.records import (
    BASELINE,
    Candidate,
    Collective,
    CommunicatorClass,
    Phase,
    Plan,
    StepRecord,
    TimingSource,
    size_class,
)
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.join import OBSERVATION
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.explaining.shadow import ShadowBrain
from zerotune.tuner.learning.knowledge import Knowledge


@dataclass(frozen=True)
class Call:
    collective: Collective
    phase: Phase
    message_bytes: int


def zero3_step(n_layers: int = 4, shard_bytes: int = 1 << 20, n_ranks: int = 16) -> list[Call]:
    """The 3 · `n_layers` calls of one ZeRO-3 step: gathers forward and backward, and reduce-scatters.

    Args:
        shard_bytes: of one layer on one rank.
        n_ranks: of the communicator.
    """
    total = shard_bytes * n_ranks
    forward = [Call(Collective.all_gather, Phase.forward_gather, total)] * n_layers
    backward = [
        call
        for _ in range(n_layers)
        for call in (
            Call(Collective.all_gather, Phase.backward_gather, total),
            Call(Collective.reduce_scatter, Phase.gradient_scatter, total),
        )
    ]
    return [*forward, *backward]


@dataclass
class World:
    fabric_name: str
    communicator: CommunicatorClass
    calls: list[Call]
    noise: float = 0.02
    step_noise: float = 0.005
    compute_us: float = 20_000.0
    seed: int = 0
    flat: bool = False
    """All settings cost the same: nothing to gain."""
    slowdown: dict[str, float] = field(default_factory=dict)
    """Factor by collective name: the effect of congestion."""
    on_its_way: list[tuple[int, Plan]] = field(default_factory=list)
    """Plans that were proposed, with the step at which they are adopted."""
    contention: float = 0.0
    memory_pressure: float = 0.3
    fixed: Callable[[Call], Candidate] | None = None
    """Runs these settings instead of the plan's."""
    factors: dict[tuple[Call, Candidate], float] = field(default_factory=dict)
    """Factor over the fabric's duration, by call and requested setting."""
    view: HostView = field(default_factory=usual_view)

    def __post_init__(self) -> None:
        self.underway = Underway(self.view)
        self.fabric = fabric.load(self.fabric_name)
        self.topology = self.fabric.topology(self.communicator)
        self.rng = np.random.default_rng(self.seed)
        self.step = 0
        self.plan = Plan(0)
        self.adopted_at = 0
        self._met: set[tuple[Collective, int]] = set()
        self.n_calls = 0
        self._truth: dict[tuple[Call, Candidate], tuple[float, Candidate]] = {}

    def setting(self, call: Call, candidate: Candidate) -> Candidate:
        if candidate.algorithm is None or candidate.protocol is None:
            return cost_model.default_choice(self.topology, call.collective, call.message_bytes)
        used = cost_model.channels_used(
            call.collective, candidate.protocol, call.message_bytes, candidate.n_channels or 64
        )
        return Candidate(candidate.algorithm, candidate.protocol, min(used, self.topology.comm_channels))

    def truth(self, call: Call, candidate: Candidate) -> tuple[float, Candidate]:
        known = self._truth.get((call, candidate))
        if known is None:
            ran = self.setting(call, candidate)
            shown = self.setting(call, BASELINE) if self.flat else ran
            assert shown.algorithm is not None
            assert shown.protocol is not None
            us = self.fabric.truth_us(
                self.communicator,
                call.collective,
                shown.algorithm,
                shown.protocol,
                shown.n_channels,
                call.message_bytes,
            )
            known = self._truth[call, candidate] = (us, ran)
        factor = self.slowdown.get(call.collective.name, 1.0) * self.factors.get((call, candidate), 1.0)
        return known[0] * factor, known[1]

    def chosen(self, call: Call) -> Candidate:
        if self.fixed is not None:
            return self.fixed(call)
        is_new = (call.collective, call.message_bytes) not in self._met
        for row in self.plan.rows:
            if is_new and row.phase is not None:
                continue  # the phase of a size's first call does not follow from the communicator's history
            if row.holds_for(self.communicator, call.collective, call.phase, call.message_bytes):
                return row.candidate
        return BASELINE

    def best(self, call: Call, candidates: tuple[Candidate, ...]) -> float:
        return min(self.truth(call, candidate)[0] for candidate in candidates)

    def follow(self, plan: Plan | None, brain: Brain) -> None:
        """All ranks run `plan` from the next step on; without a new one, a first look ends by itself."""
        later = plan or self.plan.at(self.step - self.adopted_at)
        if later is not self.plan:
            self.plan, self.adopted_at = later, self.step
            brain.adopted(later.epoch, self.step)

    def enqueue(self, brain: Brain, block: np.ndarray) -> None:
        """Called when a step's calls are enqueued."""

    def tell(self, brain: Brain, block: np.ndarray, record: StepRecord) -> None:
        """Give the brain the calls of an enqueued step, calls that have run, and a step that has ended.

        Args:
            block: measurements of the step's calls, as they will run.
        """
        self.enqueue(brain, block)
        ran, ended = self.underway.enqueued(block, record)
        if ran is not None:
            self.measured(brain, ran)
        if ended is not None:
            brain.step_finished(ended)

    def measured(self, brain: Brain, block: np.ndarray) -> None:
        brain.observe(block)

    def run_step(self) -> tuple[np.ndarray, StepRecord]:
        block = np.zeros(len(self.calls), MEASUREMENT)
        of_step = math.exp(self.rng.normal(0.0, self.step_noise))
        noises = self.rng.normal(0.0, self.noise, len(self.calls)).tolist()
        chosen = [self.chosen(call) for call in self.calls]
        truths = [self.truth(call, candidate) for call, candidate in zip(self.calls, chosen, strict=True)]
        ran = [setting for _, setting in truths]
        durations_us = [us * (of_step * math.exp(noise)) for (us, _), noise in zip(truths, noises, strict=True)]
        total_us, channels = sum(durations_us), max((setting.n_channels for setting in ran), default=0)
        block["n_ranks"], block["n_nodes"] = self.communicator.n_ranks, self.communicator.n_nodes
        block["message_bytes"] = [call.message_bytes for call in self.calls]
        block["duration_us"] = durations_us
        block["epoch"], block["step"] = self.plan.epoch, self.step
        block["memory_pressure"] = self.memory_pressure
        block["collective"] = [call.collective for call in self.calls]
        block["phase"] = [call.phase for call in self.calls]
        block["algorithm"] = [setting.algorithm for setting in ran]
        block["protocol"] = [setting.protocol for setting in ran]
        block["n_channels"] = [setting.n_channels for setting in ran]
        block["chunk_bytes"] = [setting.chunk_bytes for setting in ran]
        block["is_default"] = [candidate.is_baseline for candidate in chosen]
        block["timing_source"] = TimingSource.emulated
        self.n_calls += len(self.calls)
        self._met |= {(call.collective, call.message_bytes) for call in self.calls}
        compute_us = self.compute_us * (1.0 + self.contention * channels)
        duration = compute_us * math.exp(self.rng.normal(0.0, self.step_noise)) + total_us
        record = StepRecord(self.step, self.plan.epoch, duration, total_us, self.memory_pressure)
        self.step += 1
        return block, record


@dataclass
class Unsteady(World):
    """Calls of a step that suffer together, by `kind`.

    - slow_steps: one step in fifty takes half as long again.
    - weather: a network load that comes and goes over ten steps, 2.3 %.
    - congestion: a load that comes and goes over twenty steps, 5 %.
    - bursts: a neighbour's, 5 %, in twenty of sixty steps.
    - drift: times grow by 0.05 % with each step.
    """

    kind: str = ""
    _load: float = 0.0

    def run_step(self) -> tuple[np.ndarray, StepRecord]:
        block, record = super().run_step()
        factor = 1.0
        if self.kind == "slow_steps":
            factor = 1.5 if self.rng.random() < 0.02 else 1.0
        elif self.kind == "weather":
            self._load = 0.9 * self._load + self.rng.normal(0.0, 0.01)
            factor = math.exp(self._load)
        elif self.kind == "congestion":
            self._load = 0.95 * self._load + self.rng.normal(0.0, 0.0156)
            factor = math.exp(self._load)
        elif self.kind == "bursts":
            self._load = 0.05 * (self.rng.random() < (0.95 if self._load else 0.025))
            factor = 1.0 + self._load
        elif self.kind == "drift":
            factor = math.exp(0.0005 * self.step)
        block["duration_us"] *= factor
        return block, record


@dataclass
class Varying(World):
    """Steps that differ because of training itself, by `kind`.

    - batches: five lengths, which move fewer bytes accordingly.
    - two_lengths: computation takes once or two and a half times as long.
    - scattered: computation scatters by 30 %.
    - validation: ten steps of each hundred only validate.
    - checkpoints: one step of each hundred computes twenty times as long.
    - busy_host: from step 100 on the host is late, by 15 % or so, and by much more in one step of twenty.
    """

    kind: str = "steady"
    whole: list[Call] = field(default_factory=list)
    """The calls of a training step with the longest batch."""

    def now(self) -> tuple[list[Call], float]:
        """The calls of the next step, and its computation (a share of `compute_us`)."""
        chance, place = np.random.default_rng((self.seed, self.step)), self.step % 100
        if self.kind == "batches":
            share = chance.choice([1.0, 1.0, 0.7, 0.5, 0.25])
            return [replace(one, message_bytes=int(one.message_bytes * share)) for one in self.whole], 1.0
        if self.kind == "validation" and place >= 90:
            return [one for one in self.whole if one.phase is Phase.forward_gather], 0.35
        computes = {
            "two_lengths": chance.choice([1.0, 2.5]),
            "scattered": math.exp(chance.normal(0.0, 0.3)),
            "checkpoints": 20.0 if place == 99 else 1.0,
            "busy_host": 1.0 if self.step < 100 else self._late(chance),
        }
        return self.whole, computes.get(self.kind, 1.0)

    def _late(self, chance: np.random.Generator) -> float:
        """Delays of a busy host, which come and go within some steps."""
        at = self.step // 5
        before, after = (np.random.default_rng((self.seed, 1, one)).normal(0.0, 0.2) for one in (at, at + 1))
        load = abs(before + (after - before) * (self.step % 5) / 5.0)
        return math.exp(load) * (1.0 + (chance.random() < 0.05) * chance.exponential(2.0))

    def enqueue(self, brain: Brain, block: np.ndarray) -> None:
        decisions = np.zeros(len(block), OBSERVATION)
        for name in ("collective", "message_bytes", "n_ranks", "step"):
            decisions[name] = block[name]
        brain.sequence(decisions)

    def run_step(self) -> tuple[np.ndarray, StepRecord]:
        usual_us = self.compute_us
        self.calls, share = self.now()
        self.compute_us *= share
        found = super().run_step()
        self.compute_us = usual_us
        return found


@dataclass
class NothingToGain(Unsteady):
    """Every setting but NCCL's own choice takes 2 % longer."""

    def truth(self, call: Call, candidate: Candidate) -> tuple[float, Candidate]:
        usual_us, usual = super().truth(call, BASELINE)
        ran = self.setting(call, candidate)
        return (usual_us if ran == usual else 1.02 * usual_us), ran


@dataclass
class OverlappedWorld(World):
    """Collectives hide behind computation, each behind an equal part of it.

    A collective's channels slow that part down. Training waits for any excess over the part, and for all collectives of
    the phases in `waited_for`.
    """

    waited_for: frozenset[Phase] = frozenset()

    def hides_us(self) -> float:
        """The time of a collective that can hide."""
        return self.compute_us / max(1, sum(call.phase not in self.waited_for for call in self.calls))

    def training_us(self, phase: Phase, duration_us: float, n_channels: int) -> tuple[float, float]:
        """Microseconds that training waits for one collective, and by which it slows computation down."""
        if phase in self.waited_for:
            return duration_us, 0.0
        hidden_us = min(duration_us, self.hides_us())
        return duration_us - hidden_us, hidden_us * (self.fabric.sms_slowdown(n_channels) - 1.0)

    def run_step(self) -> tuple[np.ndarray, StepRecord]:
        block, record = super().run_step()
        costs = [
            self.training_us(Phase(int(row["phase"])), float(row["duration_us"]), int(row["n_channels"]))
            for row in block
        ]
        exposed_us, slowed_us = sum(exposed for exposed, _ in costs), sum(slowed for _, slowed in costs)
        computed_us = (self.compute_us + slowed_us) * math.exp(self.rng.normal(0.0, self.step_noise))
        return block, StepRecord(record.step, record.epoch, computed_us + exposed_us, exposed_us, self.memory_pressure)


@dataclass
class SeeminglyHidden(World):
    """Computation claims to wait for a share of calls' time, but waits for all of it; channels cost it nothing.

    So variants with fewer channels are tried, and lose.
    """

    share: float = 0.6

    def run_step(self) -> tuple[np.ndarray, StepRecord]:
        block, record = super().run_step()
        assert record.exposed_us is not None
        return block, msgspec.structs.replace(record, exposed_us=self.share * record.exposed_us)


@dataclass
class SlowInSecret(World):
    """Settings that NCCL would not choose take 1 % less in calls, but slow whole steps down if all calls run them."""

    slow: float = 0.0
    n_slow: int = 0
    lost: float = 0.0

    def truth(self, call: Call, candidate: Candidate) -> tuple[float, Candidate]:
        _, ran = super().truth(call, candidate)
        return 300.0 * (1.0 if ran == self.setting(call, BASELINE) else 0.99), ran

    def run_step(self) -> tuple[np.ndarray, StepRecord]:
        share = np.mean([self.truth(call, self.chosen(call))[0] < 300.0 for call in self.calls])
        block, record = super().run_step()
        self.n_slow += bool(share)
        self.lost += self.slow * float(share)
        return block, msgspec.structs.replace(record, duration_us=record.duration_us * (1.0 + self.slow * float(share)))


ALONE = [Call(Collective.all_reduce, Phase.gradient_scatter, 1 << 23)] * 4
NINE = [
    Call(collective, phase, n_bytes)
    for collective, phase in (
        (Collective.all_gather, Phase.forward_gather),
        (Collective.all_gather, Phase.backward_gather),
        (Collective.reduce_scatter, Phase.gradient_scatter),
    )
    for n_bytes in (1 << 19, 3 << 20, 1 << 23)
    for _ in range(2)
]
"""Calls of a step with one key, and with nine."""


def secretly_slow_job(calls: list[Call], slow: float, seed: int) -> SlowInSecret:
    """A job on 8 ranks of one H100 node: the fastest setting by its calls is the slowest for training.

    Args:
        calls: of one step.
        slow: the share of a step by which this setting slows it down.
    """
    place = fabric.load("h100_node").communicator(range(8))
    compute_us = 250.0 * len(calls)
    return SlowInSecret("h100_node", place, calls, noise=0.05, compute_us=compute_us, seed=seed, slow=slow)


def make_brain(world: World, knowledge: Knowledge | None = None, settings: BrainSettings | None = None) -> Brain:
    """A brain for a new job in this world, whose clock stands still. `knowledge` None: of no earlier jobs."""
    settings = settings or BrainSettings()
    return (ShadowBrain if settings.shadow else Brain)(
        "job",
        world.fabric.fabric_id,
        {**world.fabric.describe(), "emulated": world.fabric_name},
        knowledge or Knowledge(),
        settings,
        clock=lambda: 0.0,
    )


def play(world: World, brain: Brain, n_steps: int, *, latency_steps: int = 1, looks_every: int = 1) -> list[Plan]:
    """Run the loop of steps, proposals and adoptions.

    Args:
        latency_steps: boundaries between a plan's proposal and its adoption.
        looks_every: steps between two requests for a plan, as the daemon asks; several if steps are short.

    Returns:
        All proposed plans, also those that are not adopted yet.
    """
    plans: list[Plan] = []
    on_its_way = world.on_its_way
    for _ in range(n_steps):
        block, record = world.run_step()
        world.tell(brain, block, record)
        plan = brain.propose() if world.step % looks_every == 0 else None
        if plan is not None:
            plans.append(plan)
            on_its_way.append((world.step + latency_steps - 1, plan))
        due = None
        while on_its_way and on_its_way[0][0] <= world.step:
            due = on_its_way.pop(0)[1]
        world.follow(due, brain)
    return plans


def decided(brain: Brain) -> Callable[[Call], Candidate]:
    """The brain's settled choices, without current trials."""
    incumbents = {(s.key.collective, s.key.phase, s.key.size_class): s.incumbent for s in brain.keys}
    return lambda call: incumbents[call.collective, call.phase, size_class(call.message_bytes)]


def gain_share(world: World, brain: Brain) -> dict[Call, tuple[float, float, float]]:
    """Per distinct call: (baseline, best, chosen incumbents) in noise-free microseconds."""
    found = {}
    for call in dict.fromkeys(world.calls):
        candidates = brain.costs.candidates(world.communicator, call.collective)
        state = next(
            s
            for s in brain.keys
            if s.key.collective is call.collective
            and s.key.phase is call.phase
            and s.key.size_class == size_class(call.message_bytes)
        )
        found[call] = (
            world.truth(call, BASELINE)[0],
            world.best(call, candidates),
            world.truth(call, state.incumbent)[0],
        )
    return found
