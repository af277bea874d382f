"""`zerotune advise` from outside: documents, pictures, configurations to paste."""

from __future__ import annotations

import ast
import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zerotune.tuner import cli
from zerotune.tuner.advice.models.model_shape import from_parameters
from zerotune.tuner.advice.problem import ZeroConfiguration
from zerotune.tuner.advice.snippets import snippet
from zerotune.zero_runtime.settings import Settings


def advise(monkeypatch, capsys, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["zerotune", "advise", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    captured = capsys.readouterr()
    assert not left.value.code, captured.err
    return captured.out


def test_the_document_says_what_was_assumed(monkeypatch, capsys):
    found = json.loads(advise(monkeypatch, capsys, "7.5B", "--nodes", "2", "--top", "3", "--json"))
    assert found["n_gpus"] == 16
    assert len(found["choices"]) == 3
    assert len(found["assumptions"]) == 5
    assert found["measured"] == []
    named = json.loads(
        advise(monkeypatch, capsys, "--layers", "32", "--hidden", "4096", "--heads", "32", "--sequence", "4096",
               "--vocabulary", "32000", "--gpu", "a100_40gb", "--fabric", "p4d", "--json")
    )  # fmt: skip
    assert len(named["assumptions"]) == 3


def test_tables_and_a_picture(monkeypatch, capsys, tmp_path):
    path = tmp_path / "advice.svg"
    assert advise(monkeypatch, capsys, "1.3B", "--fabric", "h100_ib_2", "--nodes", "2", "--picture", str(path))
    assert ElementTree.parse(path).getroot().tag.endswith("svg")


@pytest.mark.parametrize("options", [(), ("--stage", "3"), ("--model-parallel", "4", "--recompute", "full")])
def test_printed_configurations_are_python_or_json(options, monkeypatch, capsys):
    for framework in ("fsdp2", "zero_runtime"):
        ast.parse(advise(monkeypatch, capsys, "7.5B", "--nodes", "2", *options, "--config", framework))
    document = json.loads(advise(monkeypatch, capsys, "7.5B", "--nodes", "2", *options, "--config", "deepspeed"))
    assert document["zero_optimization"]["stage"] in (0, 1, 2, 3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("shard_ranks", [0, 8])
def test_every_configuration_can_be_written(stage, shard_ranks):
    shape = from_parameters(1e9)
    one = ZeroConfiguration(
        stage=stage, micro_batch=2, shard_ranks=shard_ranks if stage == 3 else 0, recompute="half", prefetch=2
    )
    ast.parse(snippet("fsdp2", one, shape, 16, "bf16"))
    own = ast.parse(snippet("zero_runtime", one, shape, 16, "bf16"))
    calls = [node for node in ast.walk(own) if isinstance(node, ast.Call)]
    if stage:
        Settings(**{word.arg: ast.literal_eval(word.value) for word in calls[0].keywords})
    document = json.loads(snippet("deepspeed", one, shape, 16, "bf16"))
    assert "tensor_parallel" not in document
    assert ("zero_hpz_partition_size" in document["zero_optimization"]) == (stage == 3 and shard_ranks == 8)


@pytest.fixture
def sixteen_ranks():
    """A process group whose other fifteen ranks are not there."""
    dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    yield
    dist.destroy_process_group()


PASTED = {
    "stage 0": ZeroConfiguration(stage=0, micro_batch=1),
    "stage 0, model parallel": ZeroConfiguration(stage=0, micro_batch=1, n_model_parallel=8, bucket_bytes=1 << 25),
    "stage 2": ZeroConfiguration(stage=2, micro_batch=1, recompute="half", bucket_bytes=1 << 20),
    "stage 3": ZeroConfiguration(stage=3, micro_batch=1, recompute="full", prefetch=2),
    "hybrid": ZeroConfiguration(stage=3, micro_batch=1, shard_ranks=8),
    "hybrid, model parallel": ZeroConfiguration(stage=3, micro_batch=1, shard_ranks=2, n_model_parallel=4),
    "model parallel": ZeroConfiguration(stage=3, micro_batch=1, n_model_parallel=4),
}


@pytest.mark.parametrize("name", PASTED)
def test_fsdp2_takes_the_printed_configuration(name, sixteen_ranks):
    one = PASTED[name]
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
    n_groups = 16 // one.n_model_parallel
    text = snippet("fsdp2", one, from_parameters(1e9), n_groups, "bf16").replace('"cuda"', '"cpu"')
    pasted = {"model": model}
    exec(text, pasted)
    placed = pasted["model"]
    assert isinstance(
        placed, torch.distributed.fsdp.FSDPModule if one.stage else torch.nn.parallel.DistributedDataParallel
    )
    if one.stage:
        mesh = placed.layers[0].get_parameter("weight" if one.recompute == "none" else WRAPPED).device_mesh
        assert mesh.size() == n_groups
        assert mesh.shape[-1] == (one.shard_ranks or n_groups)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", PASTED)
def test_deepspeed_takes_the_printed_configuration(name, precision):
    config = pytest.importorskip("deepspeed.runtime.config", reason="pip install -e .[frameworks]")
    one = PASTED[name]
    document = json.loads(snippet("deepspeed", one, from_parameters(1e9), 16 // one.n_model_parallel, precision))
    taken = config.DeepSpeedConfig(document)
    assert taken.zero_config.stage == one.stage
    assert taken.train_micro_batch_size_per_gpu == one.micro_batch


WRAPPED = "_checkpoint_wrapped_module.weight"
