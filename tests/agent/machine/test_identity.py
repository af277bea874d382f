"""Two nodes of a cluster and two jobs of a user have one identity; what changes what a collective costs has another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zerotune.agent.machine import adapters, identity, nccl_variables
from zerotune.agent.settings import is_first_of_node


class Node:
    """Files as Linux has them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def port(self, device: str, *, rate: str = "400 Gb/sec (4X NDR)", state: str = "4: ACTIVE") -> None:
        port = self.root / "infiniband" / device / "ports" / "1"
        port.mkdir(parents=True)
        for name, text in (("rate", rate), ("state", state), ("link_layer", "InfiniBand")):
            (port / name).write_text(text + "\n")

    def interface(self, name: str, *, speed: str = "100000", is_hardware: bool = True) -> None:
        folder = self.root / "net" / name
        folder.mkdir(parents=True)
        (folder / "operstate").write_text("up\n")
        (folder / "speed").write_text(speed + "\n")
        if is_hardware:
            (folder / "device").mkdir()

    def adapters(self, **variables: str) -> str:
        return adapters.described({f"NCCL_{name}": value for name, value in variables.items()}, self.root)


def test_nodes_are_known_where_the_launcher_is_slurms(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"LOCALID": "1", "NODEID": "1", "STEP_TASKS_PER_NODE": "8(x2)"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 16)
    _, described = identity.describe(None)
    assert (described["n_nodes"], described["n_ranks_per_node"]) == (2, 8)
    assert not is_first_of_node()


def test_variables_of_an_emulated_job_are_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    usual_id, usual = identity.describe("ethernet_boxes")
    monkeypatch.setenv("NCCL_SOCKET_NTHREADS", "4")
    changed_id, changed = identity.describe("ethernet_boxes")
    assert changed_id != usual_id
    assert dict(changed.items() - usual.items()) == {"NCCL_SOCKET_NTHREADS": "4"}


def test_variables_of_network_plugins_count_unless_they_are_names_or_paths() -> None:
    of_paths = {"OFI_NCCL_TUNER_DEBUG": "1", "FI_PROVIDER": "efa", "UCX_NET_DEVICES": "mlx5"}
    found = {"FI_CXI_RDZV_PROTO": "Alt_Read", **of_paths}
    assert nccl_variables.cost_variables(found) == {"FI_CXI_RDZV_PROTO": "alt_read"}


NCCL = "int ncclGetVersion(int *version) { *version = 23203; return 0; }"
LOADED = """
import ctypes, sys, torch
torch.cuda.is_available = lambda: True
torch.cuda.nccl.version = lambda: (2, 27, 5)
from zerotune.agent.machine.identity import nccl_version
built_with = nccl_version()
ctypes.CDLL(sys.argv[1])
print(built_with, nccl_version())
"""


def test_the_nccl_that_is_loaded_counts_and_not_that_of_the_build(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    compile_it = ["cc", "-shared", "-x", "c", "-", "-Wl,-soname,libnccl.so.2", "-o", str(library)]
    subprocess.run(compile_it, input=NCCL, text=True, check=True)
    done = subprocess.run([sys.executable, "-c", LOADED, library], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["22705", "23203"]


def test_adapters_count_by_kind_and_not_by_name(tmp_path: Path) -> None:
    first, second = Node(tmp_path / "first"), Node(tmp_path / "second")
    for node, names in ((first, ("mlx5_0", "mlx5_1")), (second, ("ibp3", "ibp9"))):
        node.interface("eth0")
        for name in names:
            node.port(name)
    second.port("ibp10", state="1: DOWN")
    assert first.adapters() == second.adapters() == "2 x InfiniBand 400 Gb/sec (4X NDR)"
    assert first.adapters(IB_HCA="mlx5_0") == second.adapters(IB_HCA="^=ibp3") != first.adapters()
    assert first.adapters(IB_DISABLE="1") == first.adapters(NET="Socket") == "1 x Ethernet 100000 Mb/s"


def test_interfaces_that_are_no_hardware_are_not_counted(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.interface("docker0", is_hardware=False)
    assert node.adapters() == ""
    node.interface("eth0")
    node.interface("eth1", speed="-1")
    assert node.adapters() == "1 x Ethernet, 1 x Ethernet 100000 Mb/s"
    assert node.adapters(SOCKET_IFNAME="=eth0") == "1 x Ethernet 100000 Mb/s"


@pytest.mark.parametrize(
    ("name", "choice", "is_chosen"),
    [
        ("mlx5_0:1", "", True),
        ("mlx5_10:1", "mlx5_1", True),
        ("mlx5_10:1", "=mlx5_1", False),
        ("mlx5_1:2", "=mlx5_1:1,mlx5_2", False),
        ("mlx5_1:1", "mlx5_1:1", True),
        ("mlx5_1:1", "^mlx5_1", False),
        ("eth0", "^docker,lo", True),
    ],
)
def test_lists_of_prefixes_are_read_as_nccl_reads_them(name: str, choice: str, is_chosen: bool) -> None:
    assert adapters.is_chosen(name, choice) == is_chosen


def counted(environment: dict[str, str], system_file: Path = Path("/nowhere")) -> dict[str, str]:
    return nccl_variables.cost_variables(nccl_variables.in_effect(environment | {"HOME": "/nowhere"}, system_file))


def test_only_variables_that_change_costs_count() -> None:
    own = {"NCCL_SOCKET_IFNAME": "eth7", "NCCL_IB_HCA": "mlx5_3", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/tmp/job-7"}
    assert counted(own) == {}
    assert counted(own | {"NCCL_ALGO": "Ring"}) == counted({"NCCL_ALGO": "ring "}) == {"NCCL_ALGO": "ring"}


def test_variables_in_files_count_and_the_environment_comes_first(tmp_path: Path) -> None:
    system, own = tmp_path / "nccl.conf", tmp_path / "mine.conf"
    system.write_text("NCCL_BUFFSIZE=1048576\nNCCL_NTHREADS=256\n# NCCL_ALGO=Tree\nno variable\n")
    own.write_text("NCCL_NTHREADS = 512  # mine\nNCCL_CROSS_NIC=1\n")
    found = counted({"NCCL_CONF_FILE": str(own), "NCCL_CROSS_NIC": "0"}, system)
    assert found == {"NCCL_BUFFSIZE": "1048576", "NCCL_NTHREADS": "512", "NCCL_CROSS_NIC": "0"}


def test_of_a_topology_file_the_content_counts(tmp_path: Path) -> None:
    here, there, other = (tmp_path / name for name in ("here.xml", "there.xml", "other.xml"))
    for path, text in ((here, "<system/>"), (there, "<system/>"), (other, "<system version='1'/>")):
        path.write_text(text)
    ids = [counted({"NCCL_TOPO_FILE": str(path)}) for path in (here, there, other)]
    assert ids[0] == ids[1] != ids[2]


def test_jobs_of_other_sizes_and_nodes_of_other_names_share_one_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(world_size: int, **environment: str) -> tuple[str, identity.Description]:
        monkeypatch.setattr(identity.dist, "get_world_size", lambda: world_size)
        monkeypatch.setattr(identity.adapters, "described", lambda variables: "8 x InfiniBand")
        with monkeypatch.context() as context:
            for name, value in environment.items():
                context.setenv(name, value)
            return identity.describe(None)

    usual, facts = found(16, LOCAL_WORLD_SIZE="8", NCCL_SOCKET_IFNAME="eth0")
    assert (facts["n_nodes"], facts["n_ranks_per_node"]) == (2, 8)
    assert usual == found(8, LOCAL_WORLD_SIZE="4", NCCL_SOCKET_IFNAME="ens3", NCCL_COMM_ID="10.0.0.1:99")[0]
    assert usual != found(16, LOCAL_WORLD_SIZE="8", NCCL_IB_QPS_PER_CONNECTION="4")[0]
