"""Scripts that never heard of zerotune, launched as a user would: what they compute stays, all they send is seen.

The first test runs by default; the others are slow, and most need their framework installed
(`pip install -e ".[dev,frameworks]"`): docs/frameworks.md says what was checked.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from framework_job import N_RANKS, SCRIPTS, TORCHRUN, Job, Node, blur, check_agreed, check_all_seen, step_of

from benchmarks.lib.free_port import free_port

FSDP2 = {"all_gather forward_gather": 4, "all_gather backward_gather": 4, "reduce_scatter gradient_scatter": 4}
ROOT_KEPT = {**FSDP2, "all_gather backward_gather": 3}  # fully_shard leaves the root whole after forward by default
ZERO2_BY_FSDP = {"all_gather forward_gather": 4, "reduce_scatter gradient_scatter": 4}
DDP = {"all_reduce gradient_scatter": 4}
ONE_BUCKET = {"all_reduce gradient_scatter": 1}

# The norm of all gradients is reduced together with them. By default DeepSpeed reduces whole gradients in stage 2, too.
DEEPSPEED_1_2 = {"all_reduce gradient_scatter": 4, "all_gather post_step_gather": 1}
DEEPSPEED_3 = {
    "all_gather forward_gather": 10,
    "all_gather backward_gather": 10,
    "reduce_scatter gradient_scatter": 3,
    "all_reduce gradient_scatter": 1,
}
FINISH_S = 1500
"""Of one job: DeepSpeed and torch.compile run a C++ compiler, and a machine may be busy."""
LIGHTNING = {"broadcast other": 1}  # whether a rank was asked to end
TRAINER = {"all_gather forward_gather": 1}  # how many labels each rank has
TORCHTITAN = {
    "all_reduce other": 1,  # how many tokens all ranks have
    "all_gather forward_gather": 8,
    "all_gather backward_gather": 7,
    "reduce_scatter gradient_scatter": 8,
    "all_reduce gradient_scatter": 1,
}


@dataclass(frozen=True)
class Case:
    """A script, what one of its steps sends by collective and phase, and the stage that this shows."""

    script: str
    words: str
    step: dict[str, int]
    stage: str
    n_steps: int = 100
    needs: str = ""

    @property
    def command(self) -> list[str]:
        return [str(SCRIPTS / self.script), *self.words.split(), "--steps", str(self.n_steps)]

    def skip_if_not_installed(self) -> None:
        for name in self.needs.split():
            pytest.importorskip(name)


CASES = {
    "fsdp2": Case("fsdp2.py", "", FSDP2, "zero3"),
    "fsdp2-keep": Case("fsdp2.py", "--keep", ZERO2_BY_FSDP, "zero1_or_2"),
    "fsdp2-bf16": Case("fsdp2.py", "--bf16", FSDP2, "zero3"),
    "fsdp2-compile": Case("fsdp2.py", "--compile", FSDP2, "zero3"),
    "fsdp2-mesh": Case("fsdp2.py", "--mesh 1", FSDP2, "zero3"),
    "fsdp2-keep-bf16-compile": Case("fsdp2.py", "--keep --bf16 --compile", ZERO2_BY_FSDP, "zero1_or_2"),
    "fsdp2-checkpoint": Case("fsdp2_checkpoint.py", "", ROOT_KEPT, "zero3"),
    "fsdp1": Case("fsdp1.py", "", ROOT_KEPT, "zero3"),
    "fsdp1-keep": Case("fsdp1.py", "--keep", ZERO2_BY_FSDP, "zero1_or_2"),
    "ddp": Case("ddp.py", "", DDP, "ddp", n_steps=400),
    "ddp-compile": Case("ddp.py", "--compile --width 256", {"all_reduce gradient_scatter": 7}, "ddp", n_steps=400),
    "nanogpt": Case("nanogpt.py", "--width 192", {"all_reduce gradient_scatter": 5}, "ddp", n_steps=100),
    "zero-redundancy-optimizer": Case("ddp.py", "--zero-optimizer", {**DDP, "broadcast other": 20}, "zero1", 300),
    "deepspeed-1": Case("deepspeed_zero.py", "--stage 1", DEEPSPEED_1_2, "zero1_or_2", 300, "deepspeed"),
    "deepspeed-2": Case("deepspeed_zero.py", "--stage 2", DEEPSPEED_1_2, "zero1_or_2", 300, "deepspeed"),
    "deepspeed-3": Case("deepspeed_zero.py", "--stage 3", DEEPSPEED_3, "zero3", 150, "deepspeed"),
    "deepspeed-3-bf16": Case("deepspeed_zero.py", "--stage 3 --bf16", DEEPSPEED_3, "zero3", 150, "deepspeed"),
    "accelerate": Case("accelerated.py", "", ONE_BUCKET, "unknown", 400, "accelerate"),
    "accelerate-zero3": Case(
        "accelerated.py", "--zero3", {**DEEPSPEED_3, "reduce_scatter gradient_scatter": 1}, "zero3", 150,
        "accelerate deepspeed",
    ),
    "lightning": Case("lightning_trainer.py", "", {**DDP, **LIGHTNING}, "ddp", 400, "lightning"),
    "lightning-sharded": Case(
        "lightning_trainer.py", "--sharded", {**ROOT_KEPT, **LIGHTNING}, "zero3", 150, "lightning"
    ),
    "hf-trainer": Case("hf_trainer.py", "", {**ONE_BUCKET, **TRAINER}, "ddp", 200, "transformers accelerate"),
    "hf-trainer-fsdp": Case(
        "hf_trainer.py", "--fsdp",
        {
            "all_gather forward_gather": 6,  # three blocks, the embedding, the root, and the number of labels
            "all_gather backward_gather": 3,
            "reduce_scatter gradient_scatter": 5,
            "all_reduce gradient_scatter": 1,
        },
        "zero3", 100, "transformers accelerate",
    ),
    "hf-trainer-zero3": Case(
        "hf_trainer.py", "--zero3",
        {
            "all_gather forward_gather": 23,
            "all_gather backward_gather": 22,
            "reduce_scatter gradient_scatter": 1,
            "all_reduce gradient_scatter": 2,
        },
        "zero3", 100, "transformers accelerate deepspeed",
    ),
    "torchtitan": Case("torchtitan_llama.py", "", TORCHTITAN, "zero3", 100, "torchtitan triton"),
}  # fmt: skip


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    # Socket paths hold 107 bytes: pytest's own folders can be longer than that.
    node = Node(tmp_path_factory.mktemp("n"))
    yield node
    node.close()


@pytest.fixture(scope="session")
def extensions(request, tmp_path_factory):
    """DeepSpeed compiles C++ on first use, and a killed compilation leaves a lock for ever."""
    cache = getattr(request.config, "cache", None)  # pytest -p no:cacheprovider has none
    return str(tmp_path_factory.mktemp("torch_extensions") if cache is None else cache.mkdir("torch_extensions"))


@pytest.fixture
def start(node, tmp_path, extensions):
    """Start a job in a folder of its own; whatever still runs at the end is killed."""
    jobs = []

    def start(name, command, agent=True, **options):
        launch = ["--endpoint", node.endpoint, "--agent" if agent else "--no-agent"]
        options = {"launch": launch, "TORCH_EXTENSIONS_DIR": extensions, **options}
        jobs.append(Job(tmp_path / name, command, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.mark.slow
def test_fsdp2_and_ddp_in_one_script(start):
    job = start("on", [*TORCHRUN, str(SCRIPTS / "fsdp2_then_ddp.py"), "--steps", "60"]).finish(100)
    for rank in range(N_RANKS):
        # Other collectives, other plans, same sums: with two ranks there is one order to add them in.
        assert job.losses[f"losses/fsdp2/rank{rank}.txt"] == job.losses[f"losses/ddp/rank{rank}.txt"]
    check_all_seen(job)
    assert check_agreed(job) > 0
    for trace in job.traces:
        assert step_of(trace, 2) == ROOT_KEPT
        assert step_of(trace, -1) == DDP


@pytest.mark.slow
@pytest.mark.timeout(2 * FINISH_S + 200)
@pytest.mark.parametrize("name", CASES)
def test_a_framework_trains_the_same_and_is_seen(start, name):
    case = CASES[name]
    case.skip_if_not_installed()
    untuned = start("off", [*TORCHRUN, *case.command], agent=False).finish(FINISH_S)
    job = start("on", [*TORCHRUN, *case.command]).finish(FINISH_S)
    assert len(job.losses) == N_RANKS
    assert all(len(losses.split()) == case.n_steps for losses in job.losses.values())
    assert job.losses == untuned.losses
    assert check_all_seen(job) > 0
    assert check_agreed(job) > 0
    for trace in job.traces:
        assert blur(step_of(trace, -2)) == blur(case.step)
    assert job.stage == case.stage


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-bf16", "ddp", "deepspeed-2"])
def test_gloo_without_us_gives_the_same_losses(start, name):
    """With two ranks a sum has one order only, so that even another backend must give the same bits."""
    case = CASES[name]
    case.skip_if_not_installed()
    plain = start("gloo", [*TORCHRUN, *case.command], launch=None)
    job = start("on", [*TORCHRUN, *case.command])
    assert job.finish(500).losses == plain.finish(500).losses


@pytest.mark.slow
@pytest.mark.timeout(2 * FINISH_S + 200)
def test_deepspeeds_own_launcher(start):
    """It counts no GPUs here: it is told how many ranks there are, and to name them as torchrun does."""
    case = CASES["deepspeed-2"]
    case.skip_if_not_installed()
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(N_RANKS), "--no_local_rank"]
    reference = start("off", [*TORCHRUN, *case.command], agent=False).finish(FINISH_S)
    job = start("on", [*launcher, *case.command]).finish(FINISH_S)
    assert job.losses == reference.losses
    assert check_all_seen(job) > 0
    assert check_agreed(job) > 0
    assert job.stage == case.stage


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["spawn", "env"])
def test_other_ways_to_start_ranks(start, way):
    words = ["--steps", "400"]
    reference = start("off", [*TORCHRUN, str(SCRIPTS / "ddp.py"), *words], agent=False).finish(300)
    ranks: tuple[int | None, ...] = (None,)
    environment = {}
    command = [sys.executable, str(SCRIPTS / "ddp.py"), *words]
    if way == "spawn":
        command[1] = str(SCRIPTS / "spawned.py")
    else:
        # One launch for each rank, as batch systems start them.
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ZEROTUNE_JOB_ID": "by-hand"}
        ranks = tuple(range(N_RANKS))
    job = start("on", command, ranks=ranks, **environment).finish(300)
    assert job.losses == reference.losses
    assert check_all_seen(job) > 0
    assert check_agreed(job) > 0
