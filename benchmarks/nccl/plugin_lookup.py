"""What the plugin costs NCCL per call: lookup, lookup with a record, the tail at 8 threads, a plan flip.

Run: python -m benchmarks plugin_lookup [--quick] [--json]

Measured in C (plugin_lookup_driver.c) with a plan of one row per quarter octave for the five (collective, phase) pairs
of ZeRO training. Figures are medians over fresh processes, without the clock's own cost. `chained_lookup_added_ns` is
the time of a call with another tuner before ours, less the time of both alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.lib.nccl.other_plugins import other_tuner
from benchmarks.lib.reporting import Result, options_of, report
from zerotune.agent.nccl import compiled

DRIVER = Path(__file__).with_name("plugin_lookup_driver.c")
PLUGIN = Path(compiled.__file__).parent / "plugin"


def compile_driver(folder: Path) -> Path:
    driver = folder / "driver"
    flags = ["-std=c11", "-O2", "-D_GNU_SOURCE", "-pthread", f"-I{PLUGIN}", "-o", str(driver)]
    subprocess.run(["cc", *flags, str(DRIVER), "-ldl"], check=True)
    return driver


def _one_round(driver: Path, plugin: Path, other: Path) -> dict[str, float]:
    done = subprocess.run([str(driver), str(plugin), str(other)], capture_output=True, text=True, check=True)
    return {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}


def main() -> None:
    parser = options_of(__doc__, quick="ends within 60 s")
    arguments = parser.parse_args()
    plugin = compiled.PLUGIN.build()
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        driver = compile_driver(Path(name))
        other = other_tuner(Path(name) / "other.so", 5)
        for number in range(7 if arguments.quick else 41):
            rounds.append(_one_round(driver, plugin, other))
            print(f"round {number + 1} done", file=sys.stderr)

    def middle(metric: str) -> float:
        return median(each[metric] for each in rounds)

    growth = median(each["lookup_1000"] / each["lookup_10"] for each in rounds)
    growth_4000 = median(each["lookup_4000"] / each["lookup_10"] for each in rounds)
    added_ns = median(each["chained"] - each["ours_alone"] - each["other_alone"] for each in rounds)
    report(
        "plugin_lookup",
        [
            Result("lookup_p50_ns_1000_rows", middle("lookup_1000"), "ns", "<= 100"),
            Result("agreed_lookup_p50_ns_1000_rows", middle("agreed_1000"), "ns", "<= 100"),
            Result("lookup_growth_10_to_1000", growth, "ratio", "<= 1.5"),
            Result("lookup_growth_10_to_4000", growth_4000, "ratio"),
            Result("lookup_record_p50_ns", middle("lookup_record"), "ns", "<= 150"),
            Result("lookup_record_p50_ns_8_threads", middle("threads_p50"), "ns"),
            Result("lookup_record_p999_ns_8_threads", middle("threads_p999"), "ns", "<= 1000"),
            Result("dropped_percent_8_threads", middle("dropped"), "%"),
            Result("plan_flip_p50_ns", middle("flip"), "ns", "<= 1000"),
            Result("chained_lookup_added_ns", added_ns, "ns", "<= 30"),
            Result("other_tuner_alone_ns", middle("other_alone"), "ns"),
            Result("clock_ns", middle("clock"), "ns"),
        ],
        as_json=arguments.json,
    )


if __name__ == "__main__":
    main()
