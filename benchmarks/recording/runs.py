"""The runs that are recorded: which benchmark with which options, and the README's figures.

A new claim is a new line here; `python -m benchmarks record NAME` runs it, `python -m benchmarks results` shows it.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.lib.reporting import Result

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Run:
    name: str
    """Of its file below benchmarks/results."""
    command: str
    """The benchmark's name, and its options except `--json`."""
    is_timed: bool = False
    """Its figures are seconds or bytes of this machine, so nothing else may run beside it."""
    timeout_s: float = 1800.0
    """A benchmark that hangs must not hold the others up."""
    shown: tuple[str, ...] = ()
    """Figures without a target that the page shows all the same, by their name before `@`."""

    @property
    def benchmark(self) -> str:
        return shlex.split(self.command)[0]

    @property
    def words(self) -> list[str]:
        """The command's words behind `python -m benchmarks`."""
        return [*shlex.split(self.command), "--json"]

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.json"


FAULTS: Final = (
    "events_there_are",
    *(f"events:{kind}" for kind in ("write", "sync", "rename", "truncate", "unlink", "open", "read", "malloc")),
    "events:power_cut",
)
"""The counts of faults by kind."""

STALLS: Final = ("worst_step_ms", "worst_step_beyond_twin_ms")
"""The figures of chaos beside which a reader needs the worst stall."""

RUNS: Final = (
    Run("demo", "demo --picture docs/pictures/demo.svg"),
    Run("first_contact", "first_contact", timeout_s=2 * 3600.0),
    Run("brain_safety", "brain_safety"),
    Run("gain_interval", "gain_interval", shown=("gain_interval_width", "gain_of_5_percent_seen")),
    Run("policy_regret", "policy_regret", shown=("calls_to_95_percent_of_all_gain",)),
    Run("policy_regret_recorded", "policy_regret --data benchmarks/recordings --sealed", shown=("recorded_grids",)),
    Run(
        "policy_family",
        "policy_regret --family --sealed --data benchmarks/recordings",
        shown=("net_time_saved@ours", "machines_with_gain", "sealed_gap_standard_error"),
        timeout_s=2 * 3600.0,
    ),
    Run(
        "environment",
        "environment --sealed --data benchmarks/recordings",
        shown=(
            "best_in_hindsight_share_after_12_jobs",
            "time_lost_share",
            "first_failures",
            "net_time_saved",
            "machines_with_gain",
            "recorded_machines",
        ),
    ),
    Run("training_reward", "training_reward --quick", shown=("share_of_gain",)),
    Run("stage_fingerprint", "stage_fingerprint"),
    Run("advise_error", "advise_error", shown=("memory_error_median",)),
    Run("zero_paper", "zero_paper"),
    Run(
        "late_ranks",
        "late_ranks --jobs 25 --nobody-jobs 75 --seed 30000",  # seeds that nothing was changed after
        timeout_s=2 * 3600.0,
        shown=("blamed_wrongly_at_any_time", "jobs_without_late_ranks", "steps_to_name_median", "steps_to_name_p99"),
    ),
    Run("replay", "replay_speed --check-only --seed 3"),
    Run("sweep_recorded", "sweep_speed --quick --data benchmarks/recordings"),
    Run("store_faults", "store_faults", timeout_s=2 * 3600.0, shown=FAULTS),
    Run("field", "field"),
    Run("doors", "doors", timeout_s=3600.0),
    Run("never_in_the_way", "never_in_the_way", is_timed=True, timeout_s=2 * 3600.0, shown=("longest_wait_ms",)),
    Run("plugin_lookup", "plugin_lookup --quick", is_timed=True),
    Run("chaos", "chaos", is_timed=True, shown=STALLS),
    Run("chaos_two_nodes", "chaos --minutes 5 --nodes 2", is_timed=True, shown=STALLS),
    Run(
        "chaos_daemon_deaths",
        "chaos --deaths 1000 --minutes 60 --jobs zero_runtime --events kill_daemon kill_rank",
        is_timed=True,
        timeout_s=4 * 3600.0,
        shown=("daemon_deaths", "daemon_deaths_while_recording", *STALLS),
    ),
    Run("overhead", "overhead", is_timed=True),
    Run("real_nccl", "real_nccl --quick", is_timed=True),
    Run("daemon_load", "daemon_load --quick", is_timed=True),
    Run("fleet", "fleet", is_timed=True, shown=("book_rows_per_s",)),
    Run("soak_daemon", "soak_daemon", is_timed=True, timeout_s=4 * 3600.0, shown=("hours_of_the_daemons_clock",)),
    Run("agreement_scale", "agreement_scale --quick", is_timed=True),
    Run("replay_speed", "replay_speed --quick --no-check", is_timed=True),
    Run("sweep_speed", "sweep_speed --quick", is_timed=True),
    Run("zero_vs_peers", "zero_vs_peers --quick", is_timed=True),
)
"""Counts and times of a virtual clock come first: they may run on a busy machine."""


@dataclass(frozen=True)
class ReadmeFigure:
    run: str
    metric: str
    """A regular expression: the worst of all matching figures is shown."""
    text: str
    """The line's words; `{NAME}` is another figure of the same run."""


README_FIGURES: Final = (
    ReadmeFigure("demo", "step_time_change_percent", "step time of the demo against NCCL's own choices"),
    ReadmeFigure(
        "policy_regret",
        "calls_to_95_percent_gain@.*:ours_cold",
        "calls until a collective has 95 % of what it can gain, worst of the shipped fabrics",
    ),
    ReadmeFigure(
        "policy_regret",
        "loss_where_nccl_is_best@.*",
        "time lost to trials where NCCL's own choice is the best, worst of the same",
    ),
    ReadmeFigure(
        "chaos_daemon_deaths",
        "disagreements",
        "collectives for which ranks disagree, in {steps} steps while the daemon dies {daemon_deaths} times",
    ),
    ReadmeFigure("plugin_lookup", "lookup_record_p50_ns", "what the plugin adds to a collective"),
    ReadmeFigure("overhead", "step_overhead_percent", "what the agent adds to a training step"),
)


@dataclass(frozen=True)
class Recorded:
    results: tuple[Result, ...]
    environment: dict[str, Any]
    command: str
    """As it was run."""
    date: str
    commit: str
    """Ends in `+` if files were changed since that commit."""
    wall_s: float

    @classmethod
    def load(cls, path: Path) -> Recorded:
        document = json.loads(path.read_text())
        results = tuple(Result(**one) for one in document.pop("results"))
        return cls(results, **document)

    def save(self, path: Path) -> None:
        """Write it with one figure a line, so that differences between two runs can be read."""
        fields = {name: value for name, value in vars(self).items() if name != "results"}
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
        figures = ",\n".join(f"  {json.dumps(vars(one))}" for one in self.results)
        path.parent.mkdir(exist_ok=True)
        path.write_text("{" + ",\n".join(lines) + ',\n"results": [\n' + figures + "\n]}\n")
