"""Two nodes as network namespaces: one link for training, one for the daemons, and what may be lost of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from node_world import FABRIC, ZEROTUNE, losses_of

from zerotune.tuner.client.status import fetch_status

STEPS = 400
NAMES = ("zt-a", "zt-b")


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespaces():
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    remove_namespaces()  # what a killed run has left would look like a machine that has none
    try:
        ip("netns", "add", NAMES[0])
    except subprocess.CalledProcessError as error:
        # Root in a container may still lack the capability: nothing of ours could give it to this machine.
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        # Whatever fails from here on is a failure of the test.
        ip("netns", "add", NAMES[1])
        for link in ("train", "tune"):
            ip("link", "add", link, "netns", NAMES[0], "type", "veth", "peer", "name", link, "netns", NAMES[1])
        for number, name in enumerate(NAMES, start=1):
            ip("-n", name, "link", "set", "lo", "up")
            for link, net in (("train", "10.71.0"), ("tune", "10.72.0")):
                ip("-n", name, "addr", "add", f"{net}.{number}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
        yield
    finally:
        remove_namespaces()


def remove_namespaces():
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


class Node:
    """One namespace with a daemon of its own and half of the job's ranks."""

    def __init__(self, world, number):
        self.world, self.number = world, number
        self.runtime = world.folder / f"node{number}"
        self.runtime.mkdir(mode=0o700)
        self.endpoint = f"ipc://{self.runtime}/d.sock"
        self.prefix = ["ip", "netns", "exec", NAMES[number]]

    def start_daemon(self):
        daemon = self.world.start(
            *self.prefix, *ZEROTUNE, "daemon", "--endpoint", self.endpoint, "--store", self.runtime / "store.db", "-v",
            "--listen", f"tcp://10.72.0.{self.number + 1}:5577", "--curve-keys", self.world.keys,
        )  # fmt: skip
        self.world.wait_for(lambda: fetch_status(self.endpoint, timeout_s=0.3), "the daemon's answer", daemon)
        return daemon

    def train(self, *options):
        return self.world.start(
            *self.prefix, *ZEROTUNE, "launch", "--fabric", FABRIC, "--endpoint", self.endpoint, *options, "--",
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={self.number}",
            "--nproc-per-node=1", "--master-addr=10.71.0.1", "--master-port=29555",
            "-m", "zerotune.zero_runtime.examples.train", "--stage", "3", "--steps", STEPS, "--losses", self.losses,
        )  # fmt: skip

    @property
    def losses(self):
        return self.world.folder / f"losses{self.number}.jsonl"

    def job(self):
        status = fetch_status(self.endpoint, timeout_s=0.3)
        return status.jobs[0] if status and status.jobs else None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_connection_between_nodes_costs_tuning_alone(world, namespaces, kill9):
    world.use_tcp()
    world.environment |= {"GLOO_SOCKET_IFNAME": "train", "ZEROTUNE_JOB_ID": "both"}
    nodes = [Node(world, number) for number in range(2)]

    def finish(trainings):
        for training in trainings:
            returncode, output = world.finish(training, timeout_s=300)
            assert returncode == 0, output

    finish([node.train("--no-agent") for node in nodes])
    reference = losses_of(nodes[0].losses)
    nodes[0].losses.unlink()

    daemons = [node.start_daemon() for node in nodes]
    trainings = [node.train() for node in nodes]
    leading, other = nodes

    def n_seen():
        job = leading.job()
        return job.n_ranks_seen if job is not None else 0

    def goes_on():
        before = len(losses_of(leading.losses))
        assert before < STEPS - 20, "training ended too soon: this shows nothing"
        world.wait_for(lambda: len(losses_of(leading.losses)) > before + 5, "training to go on", trainings[0])

    world.wait_for(lambda: n_seen() == 2, "both nodes' ranks", trainings[0])
    world.wait_for(lambda: leading.job().epoch > 0, "a first plan", trainings[0])
    world.wait_for(lambda: other.job().health == "forwards to tcp://10.72.0.1:5577", "forwarding", trainings[1])

    ip("-n", NAMES[0], "link", "set", "tune", "down")
    goes_on()
    world.wait_for(lambda: n_seen() == 1 and "silent" in other.job().health, "the cut to be seen", trainings[0])
    goes_on()
    ip("-n", NAMES[0], "link", "set", "tune", "up")
    world.wait_for(lambda: n_seen() == 2, "the link to be used again", trainings[0])

    kill9(daemons[1].pid)
    goes_on()
    daemons[1] = other.start_daemon()
    kill9(daemons[0].pid)
    goes_on()
    daemons[0] = leading.start_daemon()
    world.wait_for(lambda: n_seen() == 2, "new daemons to find each other", trainings[0])
    goes_on()
    finish(trainings)
    assert losses_of(leading.losses) == reference
    assert len(reference) == STEPS
    assert not Path(other.losses).exists() or losses_of(other.losses) == []
