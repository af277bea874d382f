"""The answers of a run, from its steps' results, to the questions of new users of zerotune on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from benchmarks.gpu.outcome import Outcome

UNKNOWN: Final = "not answered: its step did not end"
AHEAD: Final = 1.05
"""The host's clock is unreliable if its steps seem longer or shorter than the device's by this factor."""


def answers(outcomes: Mapping[str, Outcome]) -> list[tuple[str, str]]:
    """Questions and answers, the most important first."""
    return [(question, _answered(outcomes.get(step), answer)) for question, step, answer in QUESTIONS]


def _answered(outcome: Outcome | None, answer: Any) -> str:
    if outcome is None or outcome.outcome not in ("ok", "failed"):
        return UNKNOWN + (f" ({outcome.reason})" if outcome is not None and outcome.reason else "")
    if "skipped" in outcome.results:
        return f"not here: {outcome.results['skipped']}"
    try:
        told: str = answer(outcome.results)
    except KeyError as missing:
        return f"{UNKNOWN}: it has no {missing}"
    return f"{told}; NOT AS IT MUST BE: {outcome.reason}" if outcome.outcome == "failed" else told


def _load(seen: dict[str, Any]) -> str:
    sources = ", ".join(seen["timing_sources"]) or "nobody"
    return f"by tuner interface v{seen['tuner_abi']}, and times come from {sources}"


def _forced(seen: dict[str, Any]) -> str:
    return (
        f"{seen['n_cases'] - seen['n_other_setting']} of {seen['n_cases']} ran as asked"
        f" ({seen['n_fewer_channels']} on fewer channels), {seen['n_wrong_sums']} sums were wrong"
    )


def _times(seen: dict[str, Any]) -> str:
    share = 100.0 * seen["profiler_over_event_at_largest"]
    return f"at the largest size {share:.1f} % of what events say; the timer's steps are {seen['timer_step_ns']} ns"


def _ahead(seen: dict[str, Any]) -> str:
    ratio = seen["host_us_without_item"] / seen["event_us_without_item"]
    words = "agrees with the device's" if 1.0 / AHEAD < ratio < AHEAD else "does not agree with the device's"
    return (
        f"up to {seen['most_behind_without_item']} steps, {seen['most_behind_with_item']} if each waits for a value;"
        f" its clock {words} ({ratio:.2f} times)"
    )


def _observing(seen: dict[str, Any]) -> str:
    return (
        f"enqueuing takes {seen['enqueue_us_ratio_off']:.2f} times as long with the plugin at rest,"
        f" {seen['enqueue_us_ratio_on']:.2f} while observed; the device {seen['device_us_ratio_on']:.2f}"
    )


def _capture(seen: dict[str, Any]) -> str:
    return f"a replay takes {seen['replay_ratio_observed']:.2f} times as long"


def _beside(seen: dict[str, Any]) -> str:
    best = seen["best_channels"] or "NCCL's own number of"
    return f"{best} channels are best, and save {seen['saved_percent_by_best']:.1f} % of the two together"


def _training(seen: dict[str, Any]) -> str:
    return ", ".join(
        f"{name}: " + ("the same bits" if one["same_bits"] else f"up to {one['largest_difference']:.1e} apart")
        for name, one in seen.items()
    )


def _soak(seen: dict[str, Any]) -> str:
    return f"{seen['n_epochs']} plans in {seen['n_collectives']} collectives, {seen['n_wrong']} wrong"


def _sweep(seen: dict[str, Any]) -> str:
    best = seen["sizes_best_not_default"]
    gains = [f"{name} {ratio:.2f} times" for name, ratio in sorted(best.items(), key=lambda item: -item[1])[:3]]
    return f"{seen['n_settings']} settings; another one was faster at {len(best)} sizes: {', '.join(gains) or 'none'}"


QUESTIONS: Final = (
    ("Does NCCL load the plugin?", "load", _load),
    ("Is every setting honoured?", "forced", _forced),
    ("Are the profiler's times right?", "times", _times),
    ("How far does the host run ahead?", "ahead", _ahead),
    ("Do all ranks change plans together?", "soak", _soak),
    ("What does observing cost?", "observing", _observing),
    ("Do losses stay what they are?", "training", _training),
    ("What does observing leave in a captured graph?", "capture", _capture),
    ("What are fewer channels worth beside computation?", "beside", _beside),
    ("Where is NCCL's choice not the best?", "sweep", _sweep),
)
"""Question, the step that answers it, and a function that puts its results into words."""
