"""One job's brain: measurements in, plans out. Pure: clock, knowledge and settings are passed in.

    observe / step_finished / sequence / cost_tables / adopted   what the job reports
    propose                                                      a new plan, or None
    decisions (`Inspection`)                                     why, for the store and for people

A plan assigns every key its incumbent or, for a window of steps, the candidate on trial. The epoch that a call ran
under says which setting was requested: that setting is judged, even if NCCL ran another. The brain runs on the
daemon's service thread, so every call's work is bounded: `tests/brain/test_brain_latency.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from ...agent.nccl.catalog import TUNABLE
from ...store.records import (
    BASELINE,
    LEAST_US,
    Collective,
    CommunicatorClass,
    DecisionKind,
    Outcome,
    Phase,
    Plan,
    Stage,
    StepRecord,
)
from ...store.step_times import NEIGHBOURS, SideBySide
from ...store.wire import FLAG_TIMED, DaemonOptions
from ..fingerprint import StageFingerprint
from ..modeling.cost_prior import CostPrior
from ..modeling.equal_channels import RunsFewer
from ..modeling.features import Floats, Ints
from .explaining.inspection import Inspection
from .knowledge import Knowledge, Promising
from .policy.accounting import Catastrophe, TrialAccounting
from .policy.change_detection import Regimes
from .policy.choice import PROVEN_GAIN, Event, Policy, WindowInput
from .policy.control import ControlWindows
from .policy.keys import CandidateTables, KeyState, KeyTable
from .policy.memory import MemoryGate, UnseenSizeRules, covering
from .policy.overrides import CHARGED, CONTROL, EXPLORING, Override, Setting
from .policy.plans import PlanInForce, Plans
from .policy.risk import FIRST_LOOK_STEPS, Budget
from .policy.step_guard import StepFeedback
from .policy.surrogate import Surrogate

MOST_CALL_US: Final = 1e10
"""Three hours. A longer duration, or one below `LEAST_US`, is no measurement: a clock stopped or jumped."""


class BrainSettings(msgspec.Struct, frozen=True):
    """Limits of a brain; `zerotune daemon` lets people change the budget, the threshold and whether it explores."""

    budget_fraction: float = 0.01
    memory_threshold: float = 0.92
    explore: bool = True
    """False: no candidate is tried; settings that earlier jobs proved are used and verified."""
    shadow: bool = False
    """Decide and explain, but carry nothing out (`ShadowBrain`)."""
    is_exact: bool = False
    """Try and use only settings that cannot change a bit of the results."""
    control_share: float = 0.0
    """Share of step time that control windows may lose; 0: no control windows."""
    tune_steps: int = 0
    """After this many steps trials end, and comparisons end unless `compare_steps` asks for them; 0: never."""
    compare_steps: int = 0
    """Number of first steps whose comparisons with NCCL's own choice do not count against `control_share`."""

    own_steps: int = 0
    """Number of first steps that run NCCL's own choice."""
    chunk_sizes: bool = False
    """NCCL asks for chunk sizes: settings with one may be used that earlier jobs or sweeps measured."""

    def options(self) -> DaemonOptions:
        """The settings as `zerotune status` shows them."""
        budget = round(100.0 * self.budget_fraction, 9)
        limits = self.tune_steps, self.compare_steps
        return DaemonOptions(budget, self.memory_threshold, self.explore, self.shadow, self.is_exact, *limits)


class Brain(Inspection):
    """Learns one job and proposes its plans; not thread-safe, raises on programming errors only."""

    def __init__(
        self,
        job_id: str,
        fabric_id: str,
        fabric: Mapping[str, str | int | float | bool],
        knowledge: Knowledge,
        settings: BrainSettings,
        clock: Callable[[], float],
    ) -> None:
        self.job_id = job_id
        self.fabric_id = fabric_id
        self.settings = settings
        self._clock = clock
        self._costs = CostPrior(fabric, is_exact=settings.is_exact or fabric.get("numerics") == "exact")
        self.budget = Budget(settings.budget_fraction if settings.explore else 0.0)
        self.memory = MemoryGate(settings.memory_threshold, fabric)
        self._regimes = Regimes()
        self._tables = CandidateTables(self._costs)
        self.knowledge = knowledge
        self._surrogate = Surrogate(self._tables, self._regimes)
        self._policy = Policy(self._surrogate, self.budget, self.memory, self._note)
        self._latency = self._policy.trial_cost.latency
        self._unseen_sizes = UnseenSizeRules(self.memory, self._surrogate, may_try=settings.explore)
        self._fingerprint = StageFingerprint()
        self._steps_of: Counter[Stage] = Counter()
        self._keys = KeyTable(self._tables)
        self._states = self._keys.states
        self._plans = Plans(self._latency, self._surrogate)
        self._accounting = TrialAccounting(self.budget, self._surrogate)
        self._fewer = RunsFewer()
        self._step_feedback = StepFeedback(self._policy, self._plans, self._accounting, self._note)
        share = 0.0 if settings.shadow else settings.control_share
        self._controls = ControlWindows(share, compare_steps=settings.compare_steps)
        self._side_by_side = SideBySide()
        self._step = 0
        self._urgent = True
        self._asks_book = True  # only recommended settings may begin the first time, whatever is known
        self._offered_by = 0
        """The revision of the cost tables that offered all settings in force."""
        self._pending: list[tuple[Event, int]] = []

    @property
    def knowledge(self) -> Knowledge:
        """Knowledge from earlier runs; assign to swap in a newly fitted model."""
        return self._tables.knowledge

    @knowledge.setter
    def knowledge(self, knowledge: Knowledge) -> None:
        self._tables.knowledge = knowledge if self.settings.chunk_sizes else knowledge.without_chunk_sizes()

    def restrict(self, costs: CostPrior) -> None:
        """Predict from `costs`, not from the fabric's description, as replays do; before the first measurement."""
        self._costs = self._tables.costs = costs

    # ---- what the job reports -----------------------------------------------------------------

    def observe(self, block: npt.NDArray[np.void]) -> None:
        """Take in measurements joined over the ranks (MEASUREMENT_FIELDS), in the order they happened."""
        duration_us = block["duration_us"]
        usable = (block["outcome"] == Outcome.ok) & (block["message_bytes"] > 0)
        block = block.compress(usable & (duration_us > LEAST_US) & (duration_us < MOST_CALL_US))
        if not len(block):
            return
        self._policy.trial_cost.exposed.measured(block["step"].astype(np.int64), block["duration_us"])
        keys = self._keys.indices(block)
        self._meet_new_keys()
        block, keys = block.compress(keys >= 0), keys[keys >= 0]
        if not len(block):
            return
        self._latency.observed(int(block["step"].min()), int(block["step"].max()))
        logs = self._keys.logs(block, keys)
        for epoch in sorted(set(block["epoch"].tolist())):
            here = block["epoch"] == epoch
            self._take_in(epoch, block.compress(here), keys[here], logs[here])
        if self._regimes.recognise():
            self._new_evidence(f"the network is as it was in regime {self._regimes.evidence.regime}")

    def cost_tables(self, block: npt.NDArray[np.void]) -> None:
        """Take in live cost tables (COST_FIELDS)."""
        for row in block[np.isin(block["collective"], [*Collective]) & (block["message_bytes"] > 0)]:
            place = CommunicatorClass(int(row["n_ranks"]), int(row["n_nodes"]))
            collective, message_bytes = Collective(int(row["collective"])), int(row["message_bytes"])
            self._urgent |= self._costs.learn_live(place, collective, message_bytes, row["cost_us"])

    def step_finished(self, step: StepRecord) -> None:
        """Rank 0 has finished a training step."""
        self._step = max(self._step, step.step)
        if self._steps_of or self._fingerprint.stage is not Stage.unknown:
            self._steps_of[self._fingerprint.stage] += 1
        is_timed = LEAST_US < step.duration_us < math.inf
        if is_timed:
            self.budget.earn(step.duration_us)
        if step.memory_pressure is not None and math.isfinite(step.memory_pressure):
            before = self.memory.is_short, self.memory.is_falling
            self.memory.take_reading(step.memory_pressure)
            if self.memory.is_overbooked or (self.memory.is_short and not before[0]):
                self._policy.connect_nothing()
            self._urgent |= before != (self.memory.is_short, self.memory.is_falling)
        self._plans.step_ran(step.epoch)
        if (in_force := self._plans.get(step.epoch)) is not None:
            self._side_by_side.add(step, is_control=in_force.is_control)
        if step.exposed_us is not None and math.isfinite(step.exposed_us):
            self._policy.trial_cost.exposed.finished(step.step, step.exposed_us)
        if is_timed and step.is_whole:
            self._urgent |= self._step_feedback.step_finished(step, self._step)

    def sequence(self, block: npt.NDArray[np.void]) -> None:
        """Take in rank 0's records (OBSERVATION_FIELDS) in the order they were enqueued."""
        # Decisions come before their step's record; timed records and records of other ranks may come later.
        decisions = block[(block["flags"] & FLAG_TIMED) == 0]
        steps, message_bytes = decisions["step"].astype(np.int64), decisions["message_bytes"].astype(np.int64)
        self._step_feedback.kinds.moved_bytes.add(steps, message_bytes)
        known = decisions[decisions["memory_pressure"] >= 0]
        if len(known):
            self.memory.filled(known)
            self._keys.meet_proven(known[np.isin(known["collective"], TUNABLE) & np.isin(known["phase"], [*Phase])])
            self._meet_new_keys()
        if self._fingerprint.add_records(block):
            self._urgent = True

    def adopted(self, epoch: int, step: int) -> None:
        """All ranks run under `epoch` from `step` on."""
        self._plans.adopted(epoch, step)
        self._urgent |= self._plans.must_repeat

    # ---- what the job is sent ---------------------------------------------------------------------

    def propose(self) -> Plan | None:
        """The next plan; None while the plan in force, or on its way, should stay."""
        self._latency.looked()
        plans = self._plans
        if not self._states or not (self._urgent or plans.is_due(self._step)) or self._step < self.settings.own_steps:
            return None
        is_urgent, self._urgent = self._urgent, False
        plans.plan_at(self._step)
        if plans.takes_over:
            plans.takes_over = False
            words = "another daemon took over: what earlier measurements do not prove is decided anew"
            self._note(Event(self._states[0], self._states[0].incumbent, DecisionKind.takeover, words))
        if self._costs.revision != self._offered_by:
            self._offered_by = self._costs.revision
            self._policy.withdraw_what_is_not_offered()
        self._policy.trial_cost.connection_us = self._accounting.connection_us
        self._policy.trial_cost.traffic = self._keys.traffic()
        is_new = self._step_feedback.is_new
        canaries_only = is_new or (self._asks_book and bool(self.knowledge.recommendations))
        self._asks_book &= is_new
        is_frozen = 0 < self.settings.tune_steps <= self._step
        if self.settings.explore and not is_frozen:
            self._step_feedback.consider_variants(self._step)
        forced, variant = self._step_feedback.forced(), self._step_feedback.variants.running
        compares = self.settings.compare_steps or not is_frozen
        windows = self._control_windows() if compares and not is_urgent else []
        if windows:
            wanted = self._policy.usual()
        else:
            now = WindowInput(
                forced=forced,
                provisionals_rest_at=() if is_frozen else self._step_feedback.variants.provisionals_rest_at,
                may_start=not (self._step_feedback.is_busy or is_frozen),
                may_promote=not self._accounting.is_suspicious,
                canaries_only=canaries_only,
                needs_looks=self._latency.needs_looks and variant is None,
            )
            wanted = self._policy.next_window(self._step, now)
        differs = plans.ask(wanted) or bool(windows)
        differs |= self._unseen_sizes.refresh() or plans.must_repeat
        plans.must_repeat = False
        latest, gathers_after_step = plans.latest, self._fingerprint.gathers_after_step
        if latest is not None and not differs and latest.plan.gathers_after_step == gathers_after_step:
            # A setting that was promoted runs already, on trial: it is in force without a new plan.
            was_tentative = bool(latest.tentative)
            latest = latest._replace(overrides=plans.overrides[: len(latest.candidates)], variant=variant)
            plans.add(latest)
            if bool(latest.tentative) == was_tentative and not plans.is_fading(self._step):
                return None
            # The plan has the same settings, but it lasts now, or ends by itself now, or is renewed.
        entry = self._scheduled(gathers_after_step, windows)
        plans.offer(entry, self._step)
        return entry.plan

    def _control_windows(self) -> list[int]:
        """The control windows that begin next: after how many steps the first one does, and then each further one.

        None begins while an experiment or a variant compares steps. None begins if NCCL's own choice could connect
        something: while memory is short, or if it has not run yet at a key that runs another setting.
        """
        if self._step_feedback.is_busy or not self._controls.is_due(self._step):
            return []
        if self.budget.remaining_us < 0 or not self._latency.stages_end:
            self._controls.put_off(self._step)
            return []
        is_expected = self._policy.trial_cost.traffic.is_expected
        tuned = [state for state in self._states if not state.usual.is_baseline and is_expected[state.index]]
        if not tuned or self.memory.is_short or any(one.default_setting is None for one in tuned):
            self._controls.put_off(self._step)
            return []
        if not self._controls.is_calm(self._step, tuple(one.usual for one in tuned), self._latency.steps):
            return []
        saved = self._side_by_side.saved()
        gaps = self._controls.begun(self._step, None if saved is None else saved.share, self._latency.steps)
        words = "NCCL's own choice runs for two steps, to compare it with the plan"
        event = Event(self._states[0], BASELINE, DecisionKind.control, words, self._step)
        self._pending += [(event, self._plans.next + 1 + 2 * number) for number in range(1 + len(gaps))]
        return [NEIGHBOURS, *gaps]

    def _scheduled(self, gathers_after_step: bool, windows: Sequence[int]) -> PlanInForce:
        """The requested settings as a plan that ends by itself: first looks after two steps, trials unless renewed."""
        plans = self._plans
        looks, explored, changed = (
            np.flatnonzero(which).tolist()
            for which in (
                plans.overrides == Override.first_look,
                EXPLORING[plans.overrides],
                plans.overrides == Override.variant,
            )
        )
        first = [*looks, *changed, *explored]
        entry = self._stage(plans.next, gathers_after_step, first)
        last = entry
        if looks:
            plans.ask(self._policy.usual(looks))
            last = self._stage(plans.next + 1, gathers_after_step, first)
            n_steps = self._policy.trial_cost.look_steps(looks)
            entry = entry.followed_by(last, n_steps)
            plans.follow(last, n_steps)
        own = [CONTROL.candidate] * len(plans.asked), np.full(len(plans.asked), CONTROL.why, np.int8)
        for number, usual_steps in enumerate(windows):
            epoch = plans.next + 1 + 2 * number
            last = self._stage(epoch + 1, gathers_after_step, first)
            window = PlanInForce(*own, Plan(epoch, (), gathers_after_step))
            for stage, n_steps in ((window, usual_steps), (last, FIRST_LOOK_STEPS)):
                entry = entry.followed_by(stage, n_steps)
                plans.follow(stage, n_steps)
        if last.tentative:
            asked = {index: plans.setting(index) for index in last.tentative}
            plans.ask({index: Setting(self._states[index].incumbent, Override.incumbent) for index in asked})
            rest = self._stage(last.plan.epoch + 1, gathers_after_step, first)._replace(variant=None)
            plans.ask(asked)
            entry = entry.followed_by(rest, self._latency.trial_steps)
            plans.rest(rest, self._latency.trial_steps)
        return entry

    # ---- inside ------------------------------------------------------------------------------------

    def _stage(self, epoch: int, gathers_after_step: bool, first: Sequence[int]) -> PlanInForce:
        """The requested settings as one stage of a plan; the rows of keys `first` come first."""
        plans, variant = self._plans, self._step_feedback.variants.running
        plan = Plan(epoch, (*plans.rows(dict.fromkeys(first)), *self._unseen_sizes.rows), gathers_after_step)
        return PlanInForce(plans.asked.copy(), plans.overrides, plan, variant, self._unseen_sizes.rows)

    def _note(self, event: Event) -> None:
        self._pending.append((event if event.step is not None else event._replace(step=self._step), self._plans.next))

    def _meet_new_keys(self) -> None:
        for state in self._keys.new():
            self._meet(state)

    def _meet(self, state: KeyState) -> None:
        self._plans.meet(state)
        self._policy.register(state)
        if self._costs.leaves_alone(Collective(state.key.collective)):
            state.incumbent_reason = "--numerics exact leaves what computes to NCCL"
            self._note(Event(state, state.incumbent, DecisionKind.keep, state.incumbent_reason))
        row = covering(self._unseen_sizes.rows, state.key)
        if row is None and self.memory.is_short:
            row = self._plans.row_of_other_phases(state.key)
        if row is not None and self.memory.is_short:
            if state.provisional is not None:
                self._policy.drop(state, state.provisional, row.reason, ban=False)
            self._policy.set_incumbent(Event(state, row.candidate, DecisionKind.prior, row.reason))
        elif row is not None and state.provisional is None and not row.candidate.is_baseline:
            self._policy.begin_provisional(state, Promising(row.candidate, PROVEN_GAIN, row.reason, is_proven=True))
        self._urgent |= row is not None or state.provisional_is_proven

    def _stop(self, catastrophe: Catastrophe) -> None:
        (state, candidate, ratio), variants = catastrophe, self._step_feedback.variants
        is_variants = variants.on_trial is not None and variants.on_trial.changes.get(state.index) == candidate
        if is_variants or candidate in (state.trial, state.provisional):
            why = f"{ratio:.1f} times slower than {state.incumbent}, not tried here again"
            self._policy.drop(state, candidate, why, ban=True)
            self._urgent = True
        if is_variants:
            variants.give_up(ratio, self._step)

    def _take_in(self, epoch: int, block: npt.NDArray[np.void], keys: Ints, logs: Floats) -> None:
        in_force = self._plans.get(epoch)
        if in_force is None:
            return  # another daemon's plan: the requested settings are unknown
        evidence, slots = self._regimes.evidence, self._plans.slots(epoch)[keys]
        steps = block["step"].astype(np.int64)
        self._keys.count(keys, steps)
        self._step = max(self._step, int(steps.max()))
        self._keys.learn_defaults(block, keys)
        connects = np.zeros(len(block), np.bool_)
        connects[self.memory.ran(block)] = True
        is_obeyed = ~self._accounting.refused(block, slots)
        for slot in sorted(set(slots[is_obeyed].tolist())):
            state, candidate = self._states[int(evidence.key[slot])], evidence.candidates[slot]
            is_tried = candidate in (state.trial, state.provisional)
            if is_tried and (ran := self._fewer.seen(state.key, candidate, block[is_obeyed & (slots == slot)])):
                self._policy.drop(state, candidate, f"NCCL runs it {ran}", ban=True)
        is_obeyed &= block["chunk_bytes"] == evidence.chunk_bytes[slots]
        if not is_obeyed.any():
            return
        block, keys, logs, slots = block[is_obeyed], keys[is_obeyed], logs[is_obeyed], slots[is_obeyed]
        steps, connects = steps[is_obeyed], connects[is_obeyed]
        why = in_force.why(len(self._states))
        is_trial = EXPLORING[why]
        self._accounting.forget_slow_firsts(slots, logs)
        calls = evidence.calls(slots, logs)
        shift = self._accounting.shift(calls, steps, is_trial)
        if shift is not None:
            self._regimes.begin(shift)
            self._new_evidence(f"calls take {math.exp(shift):.2f} times as long as before")
            evidence = self._regimes.evidence
            slots = self._plans.slots(epoch)[keys]
            calls = evidence.calls(slots, logs)
        kept = np.ones(len(slots), np.bool_)
        share = np.where(CHARGED[why], self._policy.trial_cost.charged_share, 0.0)
        tried = (CHARGED[why] | (why == Override.variant))[keys]
        if tried.any():
            self._accounting.n_explored += int(np.count_nonzero(is_trial[keys]))
            kept[tried] = self._accounting.charge(
                slots[tried], logs[tried], steps[tried], exposed_share=share[keys[tried]], connects=connects[tried]
            )
            for catastrophe in self._accounting.catastrophes():
                self._stop(catastrophe)
        if not kept.all():
            if not kept.any():
                return
            calls, steps = evidence.calls(slots[kept], logs[kept]), steps[kept]
        evidence.add(calls, steps)

    def _new_evidence(self, reason: str) -> None:
        """The regime ended: verdicts are open again; settings in force stay until measurements speak against them."""
        self._accounting.reset()
        self._step_feedback.reset()
        if self._states:
            state = self._states[0]
            self._note(Event(state, state.incumbent, DecisionKind.regime, reason))
        self._policy.reopen()
        self._urgent = True
