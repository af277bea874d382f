"""What a rehearsal takes from its environment, and what it charges for collectives."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.rehearse.environments import REPOSITORY
from benchmarks.rehearse.mock_gpu import QUEUE
from benchmarks.rehearse.prices import MESSAGES, Prices
from benchmarks.rehearse.settings import AHEAD, FABRIC, MOVES_MB, SLOWER, Rehearsal, environment_of
from zerotune.agent.nccl.fabric import load
from zerotune.agent.nccl.mock_cuda.device_functions import DeviceFunction
from zerotune.store.errors import UserError
from zerotune.store.records import Algorithm, Collective, CommunicatorClass, Protocol

RING = DeviceFunction(Collective.reduce_scatter, Algorithm.ring, Protocol.simple)


@pytest.mark.parametrize(
    "wrong",
    [
        {FABRIC: "nowhere"},
        {FABRIC: "as_believed"},  # names no machine
        {FABRIC: "h100_node", SLOWER: "fast"},
        {FABRIC: "h100_node", SLOWER: "0"},
        {FABRIC: "h100_node", MOVES_MB: "nan"},
        {FABRIC: "h100_node", AHEAD: "-1"},
        {FABRIC: "h100_node", AHEAD: "1025"},
        {FABRIC: "h100_node", AHEAD: "1.5"},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(UserError):
        Rehearsal.from_environment(wrong)


def test_hosts_run_ahead_as_gpus_let_them_unless_told_otherwise():
    assert Rehearsal.from_environment({FABRIC: "h100_node"}).ahead == QUEUE
    assert Rehearsal.from_environment({FABRIC: "h100_node", AHEAD: "0"}).ahead == 0


def test_the_environment_leads_to_the_mock_first(tmp_path):
    rehearsal = Rehearsal.from_environment({FABRIC: "h100_node"})
    made = environment_of(rehearsal, {"PYTHONPATH": "/theirs", "LD_LIBRARY_PATH": "/libraries"}, tmp_path)
    assert made["PYTHONPATH"].endswith(":/theirs")
    assert made["LD_LIBRARY_PATH"].endswith(":/libraries")
    (driver,) = tmp_path.glob("*/libcuda.so.1")
    assert made["LD_LIBRARY_PATH"].startswith(str(driver.parent))
    again = environment_of(rehearsal, made, tmp_path)
    assert again == made


def test_a_collective_costs_what_the_fabric_says():
    fabric = load("h100_node")
    prices = Prices(fabric, {7: RING}, slower=3.0)
    truth_us = fabric.truth_us(CommunicatorClass(4, 1), *RING, 8, 4 * 1000 * 2)
    assert prices(4, 1, 7, 8, 1000, 2) == pytest.approx(3 * truth_us)
    assert prices(2, 1, MESSAGES, 0, 1 << 20, 1) > 0


def test_what_has_no_price_takes_no_time_and_is_said(capsys):
    prices = Prices(load("h100_node"), {}, slower=1.0)
    assert prices(2, 1, 99, 8, 1000, 2) == 0.0
    assert "99" in capsys.readouterr().err


def test_a_command_that_is_not_there_is_refused():
    command = [sys.executable, "-m", "benchmarks.rehearse", "h100_node", "--", "no-such-command"]
    assert subprocess.run(command, capture_output=True, check=False, cwd=REPOSITORY).returncode == 2
