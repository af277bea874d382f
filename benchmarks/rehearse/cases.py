"""The rehearsed cases: scripts as users have them, and faults in between."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu.run import LITTLE

FRAMEWORK_SCRIPTS: Final = Path(__file__).parents[2] / "tests" / "frameworks" / "scripts"
OWN_SCRIPTS: Final = Path(__file__).parents[2] / "tests" / "rehearsal" / "scripts"
"""They import the others' model."""
SHARED: Final = "ethernet_boxes"
"""Ranks that share a GPU talk over sockets, as hosts of their own."""
MISJUDGED: Final = str(Path(__file__).parent / "misjudged_node.toml")


@dataclass(frozen=True)
class Case:
    """One script under `zerotune launch` with a daemon, or a module that starts its own processes."""

    name: str
    script: Path = Path()
    words: tuple[str, ...] = ()
    module: str = ""
    """Instead of a script."""
    needs: str = ""
    """Module without which it is skipped."""
    n_steps: int = 60
    n_ranks: int = 2
    n_nodes: int = 1
    """With a daemon each."""
    n_gpus: int = 0
    """Visible GPUs; 0 = all."""
    fabric: str = "h100_node"
    moves_mb: float = 1e12
    fault: str = ""
    """`daemon` or `rank`: killed in the middle of training."""
    finds: float = 0.0
    """The tuner must come within this factor of the best setting's time; 0 = no condition."""
    withdraws: bool = False
    """The tuner must withdraw a setting: steps speak against it, calls speak for it."""
    timeout_s: float = 300.0
    trains: bool = True
    """Else it has no steps, and the daemon measures nothing."""


def _theirs(name: str, script: str, *words: str, needs: str = "", n_steps: int = 60) -> Case:
    return Case(name, FRAMEWORK_SCRIPTS / script, words, needs=needs, n_steps=n_steps)


def _ours(name: str, script: str, *words: str) -> Case:
    return Case(name, OWN_SCRIPTS / script, words)


def _module(name: str, module: str, *words: str, fabric: str = SHARED, n_gpus: int = 1) -> Case:
    return Case(name, words=words, module=module, fabric=fabric, n_gpus=n_gpus, trains=False, timeout_s=3600.0)


CASES: Final = (
    _theirs("ddp", "ddp.py"),
    _theirs("ddp-zero-optimizer", "ddp.py", "--zero-optimizer"),
    _theirs("fsdp1", "fsdp1.py"),
    _theirs("fsdp1-keep", "fsdp1.py", "--keep"),
    _theirs("fsdp2", "fsdp2.py"),
    _theirs("fsdp2-keep", "fsdp2.py", "--keep"),
    _theirs("fsdp2-bf16", "fsdp2.py", "--bf16"),
    _theirs("fsdp2-mesh", "fsdp2.py", "--mesh", "1"),
    Case("fsdp2-hsdp", FRAMEWORK_SCRIPTS / "fsdp2.py", ("--mesh", "2"), n_ranks=4),
    Case("fsdp2-tensor-parallel", OWN_SCRIPTS / "tensor_parallel.py", n_ranks=4),
    _theirs("fsdp2-compile", "fsdp2.py", "--compile"),
    Case("fsdp2-variants", OWN_SCRIPTS / "fsdp2_variants.py", n_steps=200),
    _theirs("fsdp2-checkpoint", "fsdp2_checkpoint.py"),
    _theirs("fsdp2-then-ddp", "fsdp2_then_ddp.py"),
    _theirs("zero3", "zero3.py"),
    Case(
        "zero3-beside-fsdp2", OWN_SCRIPTS / "beside_fsdp2.py", ("--width", "1024", "--blocks", "16"), n_steps=5,
        moves_mb=0.1,
    ),
    _theirs("deepspeed-1", "deepspeed_zero.py", "--stage", "1", "--no-norm", needs="deepspeed"),
    _theirs("deepspeed-3", "deepspeed_zero.py", "--stage", "3", needs="deepspeed"),
    _theirs("accelerate", "accelerated.py", needs="accelerate"),
    _theirs("hf-trainer", "hf_trainer.py", needs="transformers"),
    Case("transformers-first", OWN_SCRIPTS / "transformers_first.py", needs="transformers"),
    _theirs("lightning", "lightning_trainer.py", needs="lightning"),
    Case("cuda-graph", OWN_SCRIPTS / "graph.py", n_steps=300),
    _ours("several-communicators", "several.py"),
    _ours("destroyed-and-again", "again.py"),
    Case("object-collectives", OWN_SCRIPTS / "objects.py", n_steps=10, trains=False),
    _ours("memory-pressure", "pressure.py"),
    Case("two-nodes", FRAMEWORK_SCRIPTS / "fsdp2.py", n_steps=200, n_nodes=2, fabric="h100_ib_2"),
    Case("daemon-killed", FRAMEWORK_SCRIPTS / "fsdp2.py", n_steps=60, fault="daemon"),
    Case("rank-killed", FRAMEWORK_SCRIPTS / "fsdp2.py", n_steps=4000, fault="rank"),
    Case(
        "promotion", OWN_SCRIPTS / "two_layers.py", n_steps=5000, fabric=MISJUDGED, moves_mb=0.1, finds=1.05,
        timeout_s=900.0,
    ),
    Case(
        "step-guard", OWN_SCRIPTS / "disturbing.py", n_steps=400, fabric=MISJUDGED, moves_mb=0.1, withdraws=True,
    ),
    _module("gpu-run", "benchmarks.gpu.run", "--afresh", "--out", "build/rehearse/gpu", *LITTLE),
    _module(
        "gpu-run-several", "benchmarks.gpu.run", "--afresh", "--out", "build/rehearse/gpus", *LITTLE,
        fabric="h100_node", n_gpus=0,
    ),
    _module("gpu-tests", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu/test_gpu_nccl.py"),
)  # fmt: skip
