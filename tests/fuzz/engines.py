"""Runs a target for some time in a process of its own: Atheris for those in Python, engine.c for the plugin in C."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from zerotune.agent.nccl.compiled import PLUGIN

HERE: Final = Path(__file__).parent
HANG_S: Final = 10
MOST_MEMORY_MB: Final = 2048
MOST_CRASHES: Final = 5
"""Of one target in one run: then it is left."""
PLUGIN_TARGET: Final = "plugin"
_SANITIZED: Final = (
    "-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-pthread", "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)  # fmt: skip


class Outcome(NamedTuple):
    """What came of fuzzing one target."""

    n_runs: int
    n_reached: int
    """Points of the code, as the engine counts them."""
    crashes: tuple[Path, ...]


def build_plugin_engine(folder: Path) -> Path | None:
    """The engine with the plugin in it, under sanitizers; None, said to stderr, where no compiler here can.

    Raises:
        subprocess.CalledProcessError: the compiler could, but not these sources.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    traced = [*_SANITIZED, "-fsanitize-coverage=trace-pc"]
    try:
        probe = ["cc", *traced, "-c", folder / "probe.c", "-o", folder / "probe.o"]
        subprocess.run(probe, check=True, capture_output=True)
        subprocess.run(["cc", *_SANITIZED, folder / "probe.c", "-o", folder / "probe"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        print(
            "the plugin is left out: gcc with sanitizers and -fsanitize-coverage=trace-pc is not here", file=sys.stderr
        )
        return None
    root, objects = PLUGIN.root / "plugin", []
    for source in sorted(root.rglob("*.c")):
        objects.append(folder / f"{'-'.join(source.relative_to(root).parts)}.o")
        subprocess.run(["cc", *traced, "-c", source, "-o", objects[-1]], check=True)
    sources = sorted((HERE / "plugin").glob("*.c"))
    cc = ["cc", *_SANITIZED, "-no-pie", f"-I{root}", "-o", folder / "engine", *sources, *objects, "-ldl"]
    subprocess.run(cc, check=True)
    return folder / "engine"


def run_plugin(engine: Path, seconds: float, seed: int, folder: Path, seeds: Path, crashes: Path) -> Outcome:
    """Fuzz the plugin; `folder` keeps what was found for the next time."""
    current = folder.parent / "current"
    found = folder / "found"
    found.mkdir(parents=True, exist_ok=True)
    command = [engine, str(seconds), str(seed), current, seeds, found]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        n_runs, n_reached = map(int, re.findall(r"\d+", done.stdout)[:2])
        return Outcome(n_runs, n_reached, ())
    packed = current.read_bytes()
    (n_bytes,) = struct.unpack("<I", packed[:4])
    crash = crashes / f"{PLUGIN_TARGET}-{seed}"
    crash.write_bytes(packed[4 : 4 + n_bytes])
    crash.with_suffix(".log").write_text(done.stderr[-20_000:])
    return Outcome(0, 0, (crash,))


def run_python(
    name: str,
    ends_at_s: float,
    seed: int,
    folder: Path,
    seeds: Path,
    crashes: Path,
    dictionary: Sequence[bytes],
    most: int,
) -> Outcome:
    """Fuzz a Python target until `ends_at_s` of time.monotonic(); `folder` keeps what was found for the next time."""
    found, words = folder / "found", folder / "dictionary"
    found.mkdir(parents=True, exist_ok=True)
    lines = ('"' + "".join(f"\\x{byte:02x}" for byte in word[:64]) + '"' for word in dictionary)
    words.write_text("\n".join(lines) + "\n")
    prefix = crashes / f"{name}-"
    before = set(crashes.glob(f"{name}-*"))
    command = [
        sys.executable, str(HERE / "one_target.py"), str(ends_at_s), name, f"-seed={seed}",
        f"-timeout={HANG_S}", f"-rss_limit_mb={MOST_MEMORY_MB}", f"-artifact_prefix={prefix}", f"-max_len={most}",
        f"-dict={words}", f"-report_slow_units={HANG_S}", "-print_final_stats=1", str(found), str(seeds),
    ]  # fmt: skip
    # libFuzzer ends its process at once: what that leaves behind goes with this folder.
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="zerotune-fuzz-", dir=memory) as files:
        told = {**os.environ, "TMPDIR": files}
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=told)
    said = done.stdout + done.stderr
    n_runs = max(
        (int(number) for number in re.findall(r"(?m)^(?:#|stat::number_of_executed_units: )(\d+)", said)), default=0
    )
    n_reached = max((int(number) for number in re.findall(r"cov: (\d+)", said)), default=0)
    new = tuple(sorted(set(crashes.glob(f"{name}-*")) - before))
    if done.returncode and not new:  # it did not even begin
        new = (Path(f"{prefix}failed"),)
        new[0].write_bytes(b"")
    for crash in new:
        crash.with_name(crash.name + ".log").write_text(said[-20_000:])
    return Outcome(n_runs, n_reached, new)


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
