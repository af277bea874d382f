"""What `zerotune launch` refuses before anything is started, in the daemon's own words."""

import errno
import os
from functools import partial

import pytest

from zerotune.agent.launch import LaunchRequest, check
from zerotune.store.errors import UserError
from zerotune.store.job_options import JobOptions
from zerotune.tuner.cli.live.launch import launch
from zerotune.tuner.service.serving import run_daemon


@pytest.fixture(autouse=True)
def no_program_takes_our_place(request, monkeypatch):
    """Were something not refused, exec would end pytest in the middle, with no test failed."""
    if "real_exec" not in request.fixturenames:
        monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("launched"))


@pytest.fixture
def real_exec():
    """For what the system itself refuses."""


def refusal(call):
    with pytest.raises(UserError) as refused:
        call()
    return str(refused.value)


@pytest.mark.parametrize("endpoint", ["bogus", "ipc://", "udp://host:1", "ipc:///tmp/" + 110 * "x"])
def test_an_endpoint_that_no_daemon_could_have(tmp_path, endpoint):
    by_launch = refusal(lambda: launch(["true"], endpoint=endpoint, daemon=True))
    by_daemon = refusal(lambda: run_daemon(endpoint, tmp_path / "store.db"))
    assert by_launch == by_daemon
    assert "--endpoint" in by_launch


def test_a_runtime_directory_with_too_long_a_name(tmp_path, monkeypatch):
    monkeypatch.delenv("ZEROTUNE_ENDPOINT", raising=False)
    monkeypatch.setenv("ZEROTUNE_RUNTIME_DIR", str(tmp_path / (110 * "x")))
    assert "longer than 107 bytes" in refusal(lambda: launch(["true"]))


def test_a_file_that_is_not_executable_is_not_called_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text("echo trained")
    said = refusal(lambda: launch(["./train.sh"], agent=False))
    assert "'./train.sh'" in said
    assert "chmod +x" in said
    for missing in ("train.sh", "./other.sh"):
        said = refusal(partial(launch, [missing], agent=False))
        assert f"'{missing}'" in said
        assert "chmod" not in said


@pytest.mark.usefixtures("real_exec")
def test_a_file_that_the_system_cannot_run(tmp_path):
    script = tmp_path / "train"
    script.write_text("echo trained")
    script.chmod(0o755)
    said = refusal(lambda: launch([str(script)], agent=False))
    assert os.strerror(errno.ENOEXEC).lower() in said.lower()
    assert "interpreter" in said


def test_no_daemon_is_started_for_a_command_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "zerotune.tuner.client.background_daemon.ensure_daemon", lambda *_, **__: pytest.fail("started a daemon")
    )
    endpoint = f"ipc://{os.path.relpath(tmp_path)}/d"[:100]
    assert "not found" in refusal(lambda: launch(["no-such-program"], endpoint=endpoint, daemon=True))


@pytest.mark.parametrize(("nccl_version", "is_warned"), [("2.28.9", True), ("2.30.7", False)])
def test_a_wish_for_chunk_sizes_that_nccl_cannot_take_is_no_secret(nccl_version, is_warned):
    request = LaunchRequest(
        ["true"],
        fabric="h100_node",
        job_options=JobOptions(chunk_sizes=True),
        environment={**os.environ, "ZEROTUNE_NCCL_VERSION": nccl_version},
    )
    found = [str(one) for one in check(request, daemon_answers=True) if "chunk" in str(one)]
    assert [line.count("--chunk-sizes has no effect here") for line in found] == [1] * is_warned
