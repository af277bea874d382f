"""`zerotune doctor`: each check by its code and status, whatever the machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.lib.nccl.other_plugins import other_profiler, other_tuner
from zerotune.agent.nccl.compiled import PLUGIN
from zerotune.agent.nccl.libnccl import DISTRIBUTIONS
from zerotune.store.sqlite.database import Store
from zerotune.store.wire import StatusReply
from zerotune.tuner import cli
from zerotune.tuner.doctor import examination, nccl, service, software
from zerotune.tuner.doctor.findings import Finding, Machine, Status
from zerotune.tuner.doctor.probing import probe
from zerotune.tuner.service.endpoint import make_keys


@pytest.fixture
def machine(tmp_path: Path, monkeypatch) -> Machine:
    monkeypatch.setenv("ZEROTUNE_RUNTIME_DIR", str(tmp_path / "run"))
    return Machine(f"ipc://{tmp_path}/d.sock", tmp_path / "s.db", None, {})


def changed(machine: Machine, **fields: object) -> Machine:
    return Machine(**{name: fields.get(name, getattr(machine, name)) for name in Machine.__struct_fields__})


def test_every_check_answers_under_its_code(machine: Machine) -> None:
    found = examination.examine(machine)
    codes = {one.code for one in found}
    assert [one.code for one in found] == [code for code in examination.CHECKS if code in codes]
    assert codes >= {"python", "torch", "gpu", "nccl", "pins", "daemon", "store", "keys"}, "of any machine"
    assert all(one.remedy for one in found if one.status is not Status.ok)


def test_a_check_that_fails_or_hangs_is_a_finding(machine: Machine, monkeypatch) -> None:
    release = threading.Event()

    def hangs(_: Machine) -> Finding:
        release.wait(60)
        return Finding("hangs", Status.ok, "")

    def fails(_: Machine) -> Finding:
        raise ZeroDivisionError("[red]")

    monkeypatch.setattr(examination, "CHECKS", {"hangs": hangs, "fails": fails, "keys": service.keys})
    try:
        found = examination.examine(machine, limit_s=0.3)
    finally:
        release.set()
    assert [(one.code, one.status) for one in found] == [
        ("hangs", Status.problem),
        ("fails", Status.warning),
        ("keys", Status.ok),
    ]
    assert examination.worst(found) is Status.problem


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.6.0", Status.ok), ("2.13.0+cpu", Status.ok), ("2.5.1", Status.problem), (None, Status.problem)],
)
def test_torch(version, status, machine, monkeypatch) -> None:
    def version_of(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(software.importlib.metadata, "version", version_of)
    assert software.torch(machine).status is status


@pytest.mark.parametrize(("is_built", "status"), [(True, Status.warning), (False, Status.problem)])
def test_no_compiler(is_built, status, machine, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(type(PLUGIN), "path", lambda _: tmp_path / "x.so" if is_built else None)
    assert software.compiler(machine).status is status
    assert nccl.plugin(machine).status is Status.problem, "what is there is no library"


def test_the_plugin_loads(machine) -> None:
    PLUGIN.build()
    assert nccl.plugin(machine).status is Status.ok


def fake_nccl(folder: Path, version: int, body: str = "*v = VERSION; return 0;") -> Path:
    source, library = folder / "fake.c", folder / "libnccl.so.2"
    source.write_text(f"#include <stdlib.h>\n#define VERSION {version}\nint ncclGetVersion(int *v) {{ {body} }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        (22809, Status.ok, "2.28.9"),
        (23007, Status.ok, "tuner v6, profiler v6"),
        (22703, Status.ok, "tuner v4, profiler v4"),
        (22502, Status.warning, "tuner v4, no profiler"),
        (22105, Status.warning, "tuner v2, no profiler"),
        (21805, Status.problem, "2.18.5"),
        (2708, Status.problem, "2.7"),
    ],
)
def test_nccl_by_its_release(version, status, words, machine, tmp_path) -> None:
    library = fake_nccl(tmp_path, version)
    found = nccl.nccl(changed(machine, environment={"NCCL_LIBRARY": str(library)}))
    assert (found.status, words in found.found, str(library) in found.found) == (status, True, True), found


def test_the_nccl_of_the_system(machine, tmp_path, monkeypatch) -> None:
    def no_package(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", no_package)
    fake_nccl(tmp_path, 22809)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert nccl.nccl(machine).status is Status.ok
    # The package of torch's comes before it.
    (tmp_path / "package/nvidia/nccl/lib").mkdir(parents=True)
    inner = fake_nccl(tmp_path / "package/nvidia/nccl/lib", 22502)
    package = SimpleNamespace(locate_file=lambda path: tmp_path / "package" / path)
    monkeypatch.setattr(
        importlib.metadata,
        "distribution",
        lambda name: package if name == DISTRIBUTIONS[0] else no_package(name),
    )
    assert str(inner) in nccl.nccl(machine).found


@pytest.mark.parametrize("body", ["abort();", "for (;;) {}", "return 0 * VERSION;"])
def test_an_nccl_that_crashes_hangs_or_says_nothing(body, machine, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("zerotune.tuner.doctor.probing.PROBE_TIMEOUT_S", 1.0)
    library = fake_nccl(tmp_path, 22809, body)
    assert probe(str(library)).nccl_version == 0
    assert nccl.nccl(changed(machine, environment={"NCCL_LIBRARY": str(library)})).status is not None


def test_a_named_nccl_that_is_none(machine, tmp_path) -> None:
    (tmp_path / "x.so").write_text("no library")
    assert probe(str(tmp_path / "x.so")).error
    found = nccl.nccl(changed(machine, environment={"NCCL_LIBRARY": str(tmp_path / "x.so")}))
    assert found.status in (Status.problem, Status.ok)  # ok where the machine has another


def test_other_plugins(machine, tmp_path, monkeypatch) -> None:
    def status(**environment: str) -> Status:
        return nccl.other_plugins(changed(machine, environment=environment)).status

    PLUGIN.build()
    fake_nccl(tmp_path, 1).rename(tmp_path / "no-tuner.so")
    other = other_tuner(tmp_path / "libnccl-tuner-other.so", 5)
    assert status(NCCL_TUNER_PLUGIN=str(PLUGIN.path())) is Status.ok
    assert status(NCCL_TUNER_PLUGIN=str(other)) is Status.ok
    assert status(NCCL_TUNER_PLUGIN=str(tmp_path / "no-tuner.so")) is Status.warning
    assert status(NCCL_TUNER_PLUGIN="libnccl-ofi-tuner.so") is Status.warning
    assert status(NCCL_PROFILER_PLUGIN="inspector") is Status.warning
    assert status(NCCL_PROFILER_PLUGIN=str(other_profiler(tmp_path / "profiler.so", 5))) is Status.ok
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert status(NCCL_TUNER_PLUGIN="other") is Status.ok
    other.rename(tmp_path / "libnccl-tuner.so")
    assert str(tmp_path / "libnccl-tuner.so") in nccl.other_plugins(machine).found


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({}, Status.ok),
        ({"NCCL_PROTO": "Simple"}, Status.warning),
        ({"NCCL_ALGO": "Tree"}, Status.problem),
        ({"NCCL_ALGO": "magic"}, Status.problem),
    ],
)
def test_pins(environment, status, machine) -> None:
    assert nccl.pins(changed(machine, environment=environment)).status is status


@pytest.mark.parametrize(("mode", "status"), [(0o700, Status.ok), (0o755, Status.problem), (None, Status.ok)])
def test_the_runtime_folder(mode, status, machine, tmp_path) -> None:
    if mode is not None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run").chmod(mode)
    assert service.runtime_folder(machine).status is status


def test_a_runtime_folder_of_another_user_or_nowhere(machine, tmp_path, monkeypatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setattr(service.os, "getuid", lambda: os.geteuid() + 1)
    assert service.runtime_folder(machine).status is Status.problem
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZEROTUNE_RUNTIME_DIR", str(tmp_path / "file" / "run"))
    assert service.runtime_folder(machine).status is Status.problem


def test_the_daemon(machine, monkeypatch) -> None:
    assert service.daemon(machine).status is Status.ok
    for health, status in (("ok", Status.ok), ("degraded", Status.warning)):
        reply = StatusReply(1, "0", "ipc://x", "s.db", 1.0, 1, 0, health=health)
        monkeypatch.setattr(service, "fetch_status", lambda *_, reply=reply, **__: reply)
        assert service.daemon(machine).status is status
    assert service.daemon(changed(machine, endpoint="ipc://" + 200 * "x")).status is Status.problem


def test_the_store(machine, tmp_path, monkeypatch) -> None:
    assert service.store(machine).status is Status.ok, "the first daemon makes it"
    Store.open(machine.store_path).close()
    assert service.store(machine).status is Status.ok
    for free_bytes, status in ((10**8, Status.warning), (10**6, Status.problem)):
        with monkeypatch.context() as patched:
            patched.setattr(service.shutil, "disk_usage", lambda _, free=free_bytes: SimpleNamespace(free=free))
            assert service.store(machine).status is status
    machine.store_path.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 64)
    assert service.store(machine).status is Status.problem
    assert service.store(changed(machine, store_path=Path("/proc/none/s.db"))).status is Status.problem


def test_keys(machine, tmp_path) -> None:
    folder = tmp_path / "keys"
    assert service.keys(machine).status is Status.ok
    assert service.keys(changed(machine, endpoint="tcp://h:1")).status is Status.problem
    named = changed(machine, keys_dir=folder)
    assert service.keys(named).status is Status.problem
    make_keys(folder)
    assert service.keys(named).status is Status.ok
    (folder / "client.key_secret").chmod(0o644)
    assert service.keys(named).status is Status.problem
    (folder / "client.key_secret").chmod(0o600)
    (folder / "server.key").unlink()
    assert service.keys(named).status is Status.problem


def test_gpus(machine, monkeypatch) -> None:
    def nothing() -> None:
        raise RuntimeError("no driver")

    fake = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda at: at, nvmlDeviceGetName=lambda handle: b"H100",
        nvmlSystemGetDriverVersion=lambda: "570.1",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    found = software.gpu(machine)
    assert (found.status, "2 x H100" in found.found, "570.1" in found.found) == (Status.ok, True, True)
    fake.nvmlInit = nothing
    assert software.gpu(machine).status is Status.ok, "none is fine"


@pytest.mark.parametrize(("status", "code"), [(Status.ok, 0), (Status.warning, 0), (Status.problem, 1)])
def test_exit_code(status, code, monkeypatch, capsys) -> None:
    checks = {"one": lambda _: Finding("one", status, "[/found]", "do this" if status is not Status.ok else "")}
    monkeypatch.setattr(examination, "CHECKS", checks)
    for words in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["zerotune", "doctor", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == code
        told = capsys.readouterr().out
        assert "[/found]" in told
    document = json.loads(told)
    assert (document["status"], document["checks"][0]["status"]) == (status.value, status.value)


def test_a_default_endpoint_that_cannot_be_is_a_row(monkeypatch, capsys) -> None:
    monkeypatch.setattr(examination, "CHECKS", {"daemon": service.daemon})
    monkeypatch.delenv("ZEROTUNE_ENDPOINT", raising=False)
    monkeypatch.setenv("ZEROTUNE_RUNTIME_DIR", f"/{'x' * 120}")
    monkeypatch.setattr(sys, "argv", ["zerotune", "doctor", "--json"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    (row,) = json.loads(capsys.readouterr().out)["checks"]
    assert (left.value.code, row["status"]) == (1, "problem")
    assert "longer than 107 bytes" in row["found"]


def test_it_loads_no_torch() -> None:
    code = "import sys; sys.argv[1:] = ['doctor', '--json']; from zerotune.tuner import cli\n"
    code += "try: cli.main()\nexcept SystemExit: print('torch' in sys.modules, 'sklearn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"
