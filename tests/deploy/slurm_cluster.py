"""A Slurm of our own on loopback: munge, one controller, and nodes that are daemons of this machine.

All it keeps is below one folder, and whoever talks to it does so by `environment`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel")
START_TIMEOUT_S = 60.0
CONFIG = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
InactiveLimit=0
KillWait=2
MinJobAge=300
{more}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def missing_program() -> str | None:
    """What is needed and not installed."""
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    return next((name for name in PROGRAMS if shutil.which(name, path=path) is None), None)


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class SlurmCluster:
    """Runs from construction to `close`.

    Args:
        folder: for all that it keeps; its path must be short, for the sake of sockets.
        nodes: names of its nodes.
        more: further lines of slurm.conf, such as a prolog.
        apart: each node has a name and folders of its own, as machines have: /run, /var/lib; and shares /etc/slurm and
            /mnt/shared with the others. zerotune is in /opt/zerotune. The network is one.
    """

    def __init__(
        self, folder: Path, nodes: tuple[str, ...] = ("n1", "n2"), more: str = "", *, apart: bool = False
    ) -> None:
        self.folder = folder
        self.nodes = nodes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._namespaces: set[str] = set()
        host = socket.gethostname()
        ports = free_ports(1 + len(nodes))
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=1000 State=UNKNOWN"
            for name, port in zip(nodes, ports[1:], strict=True)
        ]
        config = CONFIG.format(host=host, folder=folder, ports=ports, more=more, nodes="\n".join(lines))
        (folder / "slurm.conf").write_text(config)
        folder.chmod(0o755)  # munge insists that all may reach its socket
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "ZEROTUNE_"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": os.environ.get("PATH", "") + ":/usr/sbin",
        }
        try:
            self._start("munged", "--foreground", "--force", "--socket", f"{folder}/munge.sock", "--key-file", str(key),
                        "--pid-file", f"{folder}/munge.pid", "--log-file", f"{folder}/munge.log",
                        "--seed-file", f"{folder}/munge.seed")  # fmt: skip
            self._until(lambda: (folder / "munge.sock").exists())
            self._start("slurmctld", "-D", "-c")
            for name in nodes:
                (folder / f"spool-{name}").mkdir()
                command = ("slurmd", "-D", "-N", name)
                self._start(*(self.on_node(name, command) if apart else command))
            self._until(lambda: self.run("sinfo", "-h", "-o", "%t").stdout.split() == ["idle"])
        except BaseException:
            self.close()
            raise

    def on_node(self, name: str, command: Sequence[str]) -> list[str]:
        """What runs a command on a node of those that are apart, or with `login` where users log in."""
        own = self.folder / f"node-{name}"
        for part in ("run/user/0", "lib", "opt/zerotune"):
            (own / part).mkdir(parents=True, exist_ok=True)
        (own / "run/user/0").chmod(0o700)
        (self.folder / "etc").mkdir(exist_ok=True)
        (self.folder / "mnt/shared").mkdir(parents=True, exist_ok=True)
        hosts = self.folder / "hosts"
        hosts.write_text("".join(f"127.0.0.1 {one}\n" for one in ("localhost", socket.gethostname(), *self.nodes)))
        mounts = {
            "/run": own / "run", "/var/lib": own / "lib", "/opt": own / "opt", "/opt/zerotune": sys.prefix,
            "/etc/slurm": self.folder / "etc", "/mnt": self.folder / "mnt", "/etc/hosts": hosts,
        }  # fmt: skip
        lines = [f"mount --bind {source} {place}" for place, source in mounts.items()]
        lines += [f"hostname {name}", 'exec "$@"']
        return ["unshare", "--mount", "--uts", "sh", "-euc", "\n".join(lines), "sh", *command]

    def state_of(self, name: str) -> Path:
        """Where a node that is apart has its /var/lib."""
        return self.folder / f"node-{name}" / "lib"

    def left_on_nodes(self) -> list[psutil.Process]:
        """What runs on nodes that are apart, besides Slurm's own, also when that has ended."""
        for process in self._processes:
            if process.args[0] == "unshare" and process.poll() is None:
                self._namespaces.add(os.readlink(f"/proc/{process.pid}/ns/mnt"))
        self._namespaces.discard(os.readlink("/proc/self/ns/mnt"))
        found = []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(OSError):
                is_there = os.readlink(f"/proc/{process.pid}/ns/mnt") in self._namespaces
                if is_there and process.info["name"] not in ("slurmd", "slurmstepd"):
                    found.append(process)
        return found

    def run(self, *command: str, timeout_s: float = 300.0, **environment: str) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands, with what it says."""
        return subprocess.run(
            command, env=self.environment | environment, cwd=self.folder, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    def popen(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """One of Slurm's commands that goes on."""
        return subprocess.Popen(
            command, env=self.environment | environment, cwd=self.folder, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def until_idle(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until no job is left."""
        self._until(lambda: not self.run("squeue", "-h").stdout.strip(), timeout_s)

    def close(self) -> None:
        """Cancel what runs, and end all."""
        if len(self._processes) > 1:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.run("scancel", "--full", "-u", "root", timeout_s=20)
                with contextlib.suppress(TimeoutError):
                    self.until_idle(30)
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}-{len(self._processes)}.out").open("wb") as out:
            process = subprocess.Popen(command, env=self.environment, cwd=self.folder, stdout=out, stderr=out)
        self._processes.append(process)

    def _until(self, is_so: Callable[[], object], timeout_s: float = START_TIMEOUT_S) -> None:
        ends_at_s = time.monotonic() + timeout_s
        while not is_so():
            ended = [one.args for one in self._processes if one.poll() is not None]
            if ended or time.monotonic() > ends_at_s:
                logs = "\n".join(
                    f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}"
                    for path in sorted(self.folder.glob("*.[lo][ou][gt]"))
                )
                raise TimeoutError(f"{ended} ended\n{logs}")
            time.sleep(0.2)


@contextlib.contextmanager
def slurm_cluster(
    folder: Path, nodes: tuple[str, ...] = ("n1", "n2"), more: str = "", *, apart: bool = False
) -> Iterator[SlurmCluster]:
    """A cluster for a `with` block."""
    cluster = SlurmCluster(folder, nodes, more, apart=apart)
    try:
        yield cluster
    finally:
        cluster.close()
