"""What every combination of Python and torch must do: run by `versions.py` in an environment of its own.

Needs zerotune and its dependencies, and nothing else: no compiler, no GPU, no test library. The working folder gets all
files. Ends with a traceback where something is wrong.
"""

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
TRAINING = Path(__file__).with_name("smoke_training.py")
FABRIC = "ethernet_boxes"
N_STEPS = 300


def run(*words: object) -> str:
    """What the command prints; it must end in good order."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def zerotune(*words: object) -> str:
    return run(BIN / "zerotune", *words)


def check_names() -> None:
    import zerotune

    assert zerotune.__version__
    assert callable(zerotune.enable)
    zerotune.step_ended()  # without the agent they do nothing
    zerotune.training_ended()


def check_training() -> None:
    """Jobs under a daemon, which sees them: `launch` turns the agent on, and in the last the script itself."""
    torchrun = (BIN / "torchrun", "--nproc-per-node", 2, TRAINING)
    expected = {"ddp": "ddp", "fsdp2": "zero3", "": "zero3"}
    if importlib.metadata.version("torch").startswith("2.6."):
        del expected["fsdp2"]  # needs a GPU there
    for kind in filter(None, expected):
        zerotune("launch", "--fabric", FABRIC, "--log-trace", kind, "--name", kind, "--", *torchrun, kind)
    run(*torchrun, "zero3")
    jobs = json.loads(zerotune("jobs", "--json"))
    for job in jobs:
        assert (job["end"], job["n_ranks"], job["n_steps"]) == ("ended", 2, N_STEPS), job
    assert {job["name"]: job["stage"] for job in jobs} == expected, jobs
    for kind in filter(None, expected):
        check_replay(kind)


def check_replay(trace: str) -> None:
    replayed = json.loads(zerotune("replay", trace, "--policy", "baseline", "--policy", "model", "--json"))
    assert replayed["n_steps"] >= N_STEPS - 1  # records begin at the first boundary
    assert all(total["n_judged"] == replayed["n_collectives"] > 0 for total in replayed["totals"])


def main() -> None:
    if any(map(shutil.which, ("cc", "gcc", "clang"))):
        raise SystemExit("there is a C compiler on PATH: this is to show that none is needed")
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "ZEROTUNE_RUNTIME_DIR"):
        os.environ[name] = str(Path(name.lower()).absolute())
    check_names()
    zerotune("doctor")
    with subprocess.Popen([BIN / "zerotune", "daemon"], stderr=subprocess.DEVNULL) as daemon:
        try:
            while subprocess.run([BIN / "zerotune", "status"], capture_output=True, check=False).returncode != 0:
                assert daemon.poll() is None
                time.sleep(0.2)
            check_training()
        finally:
            daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(30) == 0


if __name__ == "__main__":
    main()
