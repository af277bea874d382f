"""A machine without a compiler: the platform's wheel does all, the pure one all but tuning, and says so once."""

import os

import pytest
from builds import Environment, run

ENABLING = """
import zerotune, torch.distributed as dist
zerotune.enable(fabric="ethernet_boxes")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
print(dist.get_backend())
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["wheel", "pure"])
def installed(request, built, tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("e"))
    environment.install(built(request.param))
    environment.lend_packages()
    return request.param, environment


@pytest.fixture
def zerotune(installed, tmp_path):
    """Run the command with nothing but the environment's own programs."""
    kind, environment = installed
    variables = {name: value for name, value in os.environ.items() if name != "CC"}
    variables |= {"PATH": str(environment.python.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    variables |= {"ZEROTUNE_RUNTIME_DIR": str(tmp_path / "r"), "OMP_NUM_THREADS": "1"}

    def of(*words, exit_code=0):
        return run(environment.python.parent / "zerotune", *words, env=variables, cwd=tmp_path, exit_code=exit_code)

    of.kind, of.python, of.variables = kind, environment.python, variables
    return of


def compiler_lines(done):
    return [line for line in done.stderr.splitlines() if "C compiler" in line]


def test_training_runs_and_one_line_names_the_missing_compiler(zerotune):
    done = zerotune("launch", "--", zerotune.python, "-c", "import torch; print('trained')")
    assert done.stdout == "trained\n"
    assert len(compiler_lines(done)) == (1 if zerotune.kind == "pure" else 0)


def test_the_emulation_is_refused_only_where_it_cannot_be_built(zerotune, tmp_path):
    refused = zerotune.kind == "pure"
    done = zerotune("launch", "--fabric", "ethernet_boxes", "--", zerotune.python, "-c", "0", exit_code=2 * refused)
    assert len(compiler_lines(done)) == (1 if refused else 0)


def test_commands_that_tune_nothing_work(zerotune):
    assert "ethernet_boxes" in zerotune("fabrics").stdout


@pytest.mark.timeout(400)
def test_the_demo_runs_from_the_platforms_wheel(zerotune, tmp_path):
    if zerotune.kind == "pure":
        pytest.skip("the emulated NCCL needs a library")
    zerotune("demo", "--out", tmp_path / "out")
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


def test_a_script_that_asks_for_the_emulation_trains_without_it_where_it_cannot_be_built(zerotune, tmp_path):
    done = run(zerotune.python, "-c", ENABLING, env=zerotune.variables, cwd=tmp_path)
    assert done.stdout == ("gloo\n" if zerotune.kind == "pure" else "emulated_nccl\n")
    assert len(compiler_lines(done)) == (1 if zerotune.kind == "pure" else 0)
