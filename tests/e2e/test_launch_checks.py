"""Each mistake before training: one line with the remedy, exit code 2, no traceback."""

import json
import sys
import zlib

import msgspec
import pytest

from benchmarks.lib.free_port import free_port
from zerotune.store.wire import FLAG_MATCHED


def launch(world, *words, fabric="ethernet_boxes", **environment):
    world.environment.update(environment)
    options = ["--fabric", fabric] if fabric else []
    return world.zerotune("launch", "--endpoint", world.endpoint, *options, "--", *words)


def refused(done, *words):
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("zerotune:")]
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


def test_on_the_real_nccl_its_own_settings_are_its_own_business(world):
    done = launch(world, sys.executable, "-c", "0", fabric=None, NCCL_MAX_NCHANNELS="0x10", ZEROTUNE_FAULTS="foo")
    assert done.returncode == 0, done.stderr


VARIABLES = ("NCCL_TUNER_PLUGIN", "ZEROTUNE_NEXT_TUNER", "NCCL_PROFILER_PLUGIN", "ZEROTUNE_NEXT_PROFILER")
SHOW = f"print(*map(os.environ.get, {VARIABLES}))"
IMPORT, GROUP = "import os, torch", "torch.distributed.init_process_group(init_method='env://')"
ONE_RANK = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
OURS = "libnccl-tuner-zerotune.so"
OTHERS = {"NCCL_TUNER_PLUGIN": "/opt/other.so", "NCCL_PROFILER_PLUGIN": "inspector"}


def test_nccls_variables_stay_the_users_until_a_process_with_the_agent_makes_a_group(world):
    script = f"{IMPORT}; {SHOW}; {GROUP}; {SHOW}"
    done = launch(world, sys.executable, "-c", script, MASTER_PORT=str(free_port()), **ONE_RANK, **OTHERS)
    before, after = (line.split() for line in done.stdout.splitlines())
    assert before == ["/opt/other.so", "None", "inspector", "None"], done.stderr
    assert after == [OURS, "/opt/other.so", OURS, "inspector"], done.stderr
    assert done.returncode == 0


def test_without_an_agent_they_stay_the_users_for_good(world):
    done = launch(world, sys.executable, "-S", "-c", f"import os; {SHOW}", **OTHERS)
    assert done.stdout.split() == ["/opt/other.so", "None", "inspector", "None"], done.stderr


@pytest.mark.slow
def test_another_tuner_that_a_rank_is_given_after_launch_counts(world):
    late = f"{IMPORT}; os.environ['NCCL_TUNER_PLUGIN'] = 'late'; {GROUP}; {SHOW}; raise SystemExit(3)"
    done = launch(world, sys.executable, "-c", late, MASTER_PORT=str(free_port()), **ONE_RANK)
    assert done.stdout.split()[:2] == [OURS, "late"], done.stderr
    assert done.returncode == 3


def test_a_command_for_a_shell_is_no_script(world):
    done = launch(world, "bash", "-c", f"true; {sys.executable} no_such_script.py")
    assert done.returncode == 2  # python's own
    assert "no_such_script.py" in done.stderr
    assert "zerotune: script" not in done.stderr


def test_pinned_settings_and_a_missing_daemon_are_warned_of_and_training_runs(world):
    done = launch(world, sys.executable, "-c", "print('trained')", NCCL_ALGO="Ring")
    assert done.returncode == 0
    assert done.stdout == "trained\n"
    assert "NCCL_ALGO=Ring" in done.stderr
    assert world.endpoint in done.stderr


def test_exit_code_and_arguments_of_the_script_pass_through(world):
    script = world.folder / "script.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    done = launch(world, sys.executable, script, "--flag", "-x", "a b")
    assert done.returncode == 7
    assert done.stdout == "['--flag', '-x', 'a b']\n"


def test_a_sitecustomize_of_the_users_still_runs(world):
    site = world.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('mine')")
    done = launch(world, sys.executable, "-c", "print('trained')", PYTHONPATH=str(site))
    assert done.stdout == "mine\nmine\ntrained\n"  # once in zerotune's own process, once in the script's


PLAN = """{"zerotune_plan": 1, "rows": [{"n_ranks": 2, "n_nodes": 2, "collective": "all_gather",
"phase": "forward_gather", "min_bytes": 1, "max_bytes": 1000000000, "algorithm": "%s", "protocol": "simple"}]}"""


def test_a_plan_with_an_illegal_cell_is_refused(world):
    plan = world.folder / "plan.json"
    plan.write_text(PLAN % "tree")
    done = world.zerotune("launch", "--plan", plan, "--", sys.executable, "-c", "0")
    refused(done, str(plan), "row 1", "tree/simple", "all_gather", "leave it out")


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_plan_of_which_no_row_ever_applied_is_told_at_the_end(world):
    plan = world.folder / "plan.json"
    plan.write_text((PLAN % "pat").replace('"n_ranks": 2', '"n_ranks": 8'))
    returncode, output = world.finish(world.take_steps(250, launch=("--plan", plan)))
    assert returncode == 0, output
    assert output.count("(no_row)") == 1


@pytest.mark.timeout(90)
@pytest.mark.slow
def test_a_plan_file_that_applies_heeds_no_daemon(world):
    world.start_daemon()
    plan = world.folder / "plan.json"
    plan.write_text(PLAN % "pat")
    summary = world.folder / "summary.json"
    returncode, output = world.finish(world.take_steps(250, launch=("--plan", plan, "--summary", summary)))
    assert returncode == 0, output
    assert "no daemon" not in output
    assert str(plan) not in output
    steps = json.loads(summary.read_text())["steps"]
    assert steps[0]["epoch"] == 0
    assert steps[-1]["epoch"] == 1
    assert world.status().jobs == ()


def column_of(trace, name):
    """The bytes of a column of all records in a trace."""
    data, column = trace.read_bytes(), b""
    while data:
        member = zlib.decompressobj(31)
        content = msgspec.msgpack.decode(member.decompress(data))
        column += content["columns"][name] if content["type"] == "records" else b""
        data = member.unused_data
    return column


@pytest.mark.timeout(90)
@pytest.mark.parametrize("version", ["2.30.7", pytest.param("2.29.7", marks=pytest.mark.slow)])
def test_a_plan_files_chunk_sizes_are_agreed_on_like_all_of_it(world, version):
    plan, traces = world.folder / "plan.json", world.folder / "traces"
    plan.write_text((PLAN % "ring").replace("}]}", ', "chunk_bytes": 65536}]}'))
    world.environment["ZEROTUNE_NCCL_VERSION"] = version
    returncode, output = world.finish(world.take_steps(250, launch=("--plan", plan, "--log-trace", traces)))
    assert returncode == 0, output
    found = [*traces.glob("*.zttrace")]
    assert len(found) == 2
    for path in found:
        assert any(one & FLAG_MATCHED for one in column_of(path, "flags"))
        assert any(column_of(path, "chunk_bytes")) == (version == "2.30.7")
