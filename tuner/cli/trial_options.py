"""Options that limit the daemon's trials, for `zerotune daemon` and the `launch` that starts one."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ...store.errors import UserError
from .sizes import percent, share

if TYPE_CHECKING:
    from ..learning.brain import BrainSettings

CONTROL_SHARE: Final = 0.001
"""Share of step time that control windows may lose."""

BudgetPercent = Annotated[
    float | None,
    typer.Option(
        "--budget-percent",
        help="What trials of settings may cost, in percent of training time; default: 1.",
        metavar="PERCENT",
        parser=percent,
    ),
]
MemoryThreshold = Annotated[
    float | None,
    typer.Option(
        "--memory-threshold",
        help="Share of device memory above which nothing new is connected and no channel is added; default: 0.92.",
        metavar="SHARE",
        parser=share,
    ),
]
NoExplore = Annotated[
    bool, typer.Option("--no-explore", help="Begin no trials; what earlier jobs proved is used and verified.")
]

Shadow = Annotated[
    bool, typer.Option("--shadow", help="Decide and explain, but change nothing: training runs untuned.")
]
TuneFor = Annotated[
    int | None,
    typer.Option("--tune-for", help="Freeze each job's settings after this many steps.", metavar="STEPS", min=1),
]
Compare = Annotated[
    int | None,
    typer.Option(
        "--compare",
        help="Compare up to this many steps with NCCL's own choice, in blocks at random times; see `jobs`.",
        metavar="STEPS",
        min=40,
    ),
]


class NumericsChoice(str, Enum):
    """Values of --numerics."""

    any = "any"
    exact = "exact"

    def __str__(self) -> str:
        return self.value


Numerics = Annotated[
    NumericsChoice,
    typer.Option(
        "--numerics",
        help="exact: tune only collectives that compute nothing, so that no bit of the results can change.",
        envvar="ZEROTUNE_NUMERICS",
    ),
]


def brain_settings(
    budget_percent: float | None,
    memory_threshold: float | None,
    no_explore: bool,
    shadow: bool,
    numerics: NumericsChoice = NumericsChoice.any,
    tune_for: int | None = None,
    compare: int | None = None,
) -> BrainSettings:
    """The settings of these options; missing ones have the defaults of `BrainSettings`.

    Args:
        budget_percent: in percent of training time, above 0 and up to 100.
        memory_threshold: share of device memory above which nothing is added, above 0 and up to 1.

    Raises:
        UserError: a value is out of range, or options contradict each other.
    """
    from ..learning.brain import BrainSettings

    usual = BrainSettings()
    if budget_percent is not None and not 0.0 < budget_percent <= 100.0:
        raise UserError(
            f"--budget-percent {budget_percent:g} is not above 0 and up to 100",
            "give 1 for a hundredth of training time, or --no-explore to try nothing",
        )
    if memory_threshold is not None and not 0.0 < memory_threshold <= 1.0:
        raise UserError(
            f"--memory-threshold {memory_threshold:g} is no share of device memory above 0 and up to 1",
            f"give {usual.memory_threshold:g} for {100 * usual.memory_threshold:.0f} %",
        )
    if no_explore and budget_percent is not None:
        raise UserError(
            "--no-explore makes --budget-percent useless: where nothing is tried, nothing is spent",
            "leave one of them out",
        )
    if shadow and compare is not None:
        raise UserError("--shadow makes --compare useless: nothing is tuned to compare", "leave one of them out")
    return BrainSettings(
        budget_fraction=usual.budget_fraction if budget_percent is None else budget_percent / 100.0,
        memory_threshold=usual.memory_threshold if memory_threshold is None else memory_threshold,
        explore=not no_explore,
        shadow=shadow,
        is_exact=numerics is NumericsChoice.exact,
        control_share=CONTROL_SHARE,
        tune_steps=tune_for or 0,
        compare_steps=compare or 0,
    )


def given_arguments(
    budget_percent: float | None,
    memory_threshold: float | None,
    no_explore: bool,
    shadow: bool,
    numerics: NumericsChoice = NumericsChoice.any,
    tune_for: int | None = None,
    compare: int | None = None,
) -> list[str]:
    """The given options, as in `brain_settings`, as words of a command line."""
    words = [] if budget_percent is None else ["--budget-percent", str(budget_percent)]
    words += [] if memory_threshold is None else ["--memory-threshold", str(memory_threshold)]
    words += ["--no-explore"] if no_explore else []
    words += ["--shadow"] if shadow else []
    words += [] if tune_for is None else ["--tune-for", str(tune_for)]
    words += [] if compare is None else ["--compare", str(compare)]
    return [*words, *(["--numerics", numerics.value] if numerics is not NumericsChoice.any else [])]
