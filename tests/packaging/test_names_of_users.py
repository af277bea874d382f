"""A project that has modules of the names of our folders goes on with its own, and zerotune with its own."""

import json
import os

import pytest
from builds import Environment, run

OURS = ("agent", "store", "tuner", "zero_runtime")
SCRIPT = """
import agent, store.shelf, tuner.knob, zero_runtime
import json, pathlib, sys

here = str(pathlib.Path(__file__).parent)
for module in (agent, store.shelf, tuner.knob, zero_runtime):
    assert module.__file__.startswith(here) and module.mine, module

import zerotune.agent.settings, zerotune.store.errors, zerotune.tuner, zerotune.zero_runtime.stages
for module in (zerotune.agent.settings, zerotune.store.errors, zerotune.tuner, zerotune.zero_runtime.stages):
    assert not module.__file__.startswith(here), module
"""
TRAINING = """
import torch, torch.distributed as dist

dist.init_process_group()
for _ in range(6):
    dist.all_reduce(torch.ones(64))
    zerotune.step_ended()
dist.destroy_process_group()
"""


def project(folder, *, packages, script=SCRIPT):
    """A user's project; its folders are `packages` with an `__init__.py`, or namespaces without."""
    for module in ("agent.py", "zero_runtime.py", "store/shelf.py", "tuner/knob.py"):
        file = folder / module
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine = True\n")
        if packages and file.parent != folder:
            (file.parent / "__init__.py").write_text("")
    (folder / "train.py").write_text(script)
    return folder


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = Environment(tmp_path_factory.mktemp("e"))
            made[kind].install(built(kind))
            made[kind].lend_packages()
        return made[kind]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "packages"), [("wheel", True), ("editable", False)])
def test_a_project_keeps_its_own_modules(environment, tmp_path, kind, packages):
    run(environment(kind).python, project(tmp_path, packages=packages) / "train.py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize("packages", [False, True])
def test_a_project_keeps_its_own_modules_under_launch(environment, tmp_path, kind, packages):
    python, summary = environment(kind).python, tmp_path / "summary.json"
    folder = project(tmp_path / "project", packages=packages, script=SCRIPT + TRAINING)
    torchrun = (python, "-m", "torch.distributed.run", "--nproc-per-node", 2)
    run(
        *(python.parent / "zerotune", "launch", "--fabric", "ethernet_boxes", "--summary", summary, "--"),
        *(*torchrun, "train.py"),
        cwd=folder,
        env={**os.environ, "ZEROTUNE_RUNTIME_DIR": str(tmp_path / "r")},
    )
    assert json.loads(summary.read_text())["steps"]  # the agent saw them


def test_the_environment_gets_one_name(built, tmp_path):
    fresh = Environment(tmp_path)
    before = fresh.files()
    fresh.install(built("wheel"))
    importable = {path.name for path in fresh.files() - before if path.parent == fresh.site and path.suffix == ""}
    assert importable == {"zerotune"}
    assert importable.isdisjoint(OURS)
