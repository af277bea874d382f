"""Which processes of a launched job get the agent, whoever looked for torch before and whatever was handed on."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.lib.free_port import free_port
from zerotune.agent.settings import AgentSettings, pack_variables, unpack_variables

LAUNCHED = {"ZEROTUNE_LAUNCH": "1", "ZEROTUNE_FABRIC": "ethernet_boxes"}
AT_START = "import zerotune.agent.bootstrap\n"
"""What the line in site-packages does."""
SHOW = """
import sys
agent = sys.modules.get("zerotune.agent.activate")
print(bool(agent and agent.installed), flush=True)
"""


def shown(script: str, tmp_path: Path, **environment: str) -> list[str]:
    """What a script prints that runs as a process of a launched job."""
    file = tmp_path / "script.py"
    file.write_text(AT_START + textwrap.dedent(script))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ZEROTUNE_", "NCCL_"))}
    names = clean | {"ZEROTUNE_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"} | (environment or LAUNCHED)
    command = [sys.executable, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=names)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


PROBES = {
    "find_spec": "import importlib.util; importlib.util.find_spec('torch')",
    "an import that fails": """
        import sys, types
        sys.modules["numpy"] = None
        class Broken:
            def find_spec(self, name, path=None, target=None):
                if name == "torch._C":
                    raise ImportError(name)
        sys.meta_path.insert(0, Broken())
        try:
            import torch
        except ImportError:
            print("failed")
        sys.meta_path.pop(0)
        sys.modules.pop("numpy")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
            del sys.modules[name]
        """,
    "a tool that asks all finders": """
        import importlib.util, sys
        class Tool:
            busy = False
            def find_spec(self, name, path=None, target=None):
                if name == "torch" and not self.busy:
                    self.busy = True
                    try:
                        return importlib.util.find_spec(name)
                    finally:
                        self.busy = False
        sys.meta_path.insert(0, Tool())
        sys.meta_path.append(Tool())
        """,
}


@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(probe, id=name, marks=() if name == "find_spec" else pytest.mark.slow)
        for name, probe in PROBES.items()
    ],
)
def test_the_agent_starts_though_torch_was_looked_for_before(probe: str, tmp_path: Path) -> None:
    script = textwrap.dedent(probe) + "\nimport torch\n" + SHOW
    assert shown(script, tmp_path)[-1] == "True"


def test_torch_that_is_there_already(tmp_path: Path) -> None:
    script = """
        import torch
        import sys
        del sys.modules["zerotune.agent.bootstrap"]
        sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != "_AfterTorch"]
        """
    found = shown(textwrap.dedent(script) + AT_START + SHOW, tmp_path)
    assert found == ["True"]


def test_processes_that_were_not_launched_get_no_agent(tmp_path: Path) -> None:
    found = shown("import torch\n" + SHOW, tmp_path, ZEROTUNE_LAUNCH="0", NCCL_ZEROTUNE="ZEROTUNE_LAUNCH=1")
    assert found == ["False"]


def test_a_job_that_is_handed_only_what_begins_with_nccl(tmp_path: Path) -> None:
    environment = dict(LAUNCHED, ZEROTUNE_AGENT="1")
    pack_variables(environment)
    only = environment["NCCL_ZEROTUNE"]
    found = shown("import torch\n" + SHOW, tmp_path, NCCL_ZEROTUNE=only)
    assert found == ["True"]


def test_variables_are_handed_on_and_set_ones_count() -> None:
    environment = {"ZEROTUNE_JOB_NAME": "a, b=c; $(d) ü\udcff", "ZEROTUNE_ENDPOINT": "ipc:///x y/d.sock", "OTHER": "1"}
    pack_variables(environment)
    assert set(environment["NCCL_ZEROTUNE"]) & set(" ;$()'\"&") == set()
    there = {"NCCL_ZEROTUNE": environment["NCCL_ZEROTUNE"] + ",PATH=/evil", "ZEROTUNE_ENDPOINT": "ipc:///own"}
    unpack_variables(there)
    assert there.pop("NCCL_ZEROTUNE")
    assert there == {"ZEROTUNE_JOB_NAME": "a, b=c; $(d) ü\udcff", "ZEROTUNE_ENDPOINT": "ipc:///own"}
    assert AgentSettings.from_environment(there).endpoint == "ipc:///own"


CHILDREN = """
import os, sys, threading, torch, torch.distributed as dist

def look(at=None):
    agent = sys.modules.get("zerotune.agent.activate")
    ours = any("zerotune" in thread.name for thread in threading.enumerate())
    is_hooked = hasattr(torch.autograd.backward, "__wrapped__")
    print(int(bool(agent and agent.installed)) + 2 * ours + 4 * is_hooked, flush=True)
    return at

def train(rank):
    look()
    os.environ.update(RANK=str(rank), WORLD_SIZE="1")
    dist.init_process_group(init_method="env://")
    agent = sys.modules["zerotune.agent.activate"]
    print(bool(agent.installed), os.environ["NCCL_TUNER_PLUGIN"], dist.get_backend(), flush=True)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, at):
        return look(at)

if __name__ == "__main__":
    method = os.environ["METHOD"]
    list(torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context=method))
    torch.multiprocessing.start_processes(train, nprocs=1, start_method=method)
"""


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_children_get_it_when_they_make_a_group_and_not_before(method: str, tmp_path: Path) -> None:
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    found = shown(CHILDREN, tmp_path, METHOD=method, **LAUNCHED, **port)
    assert found == ["0", "0", "True", "libnccl-tuner-zerotune.so", "emulated_nccl"]
