"""inductor's own overlap scheduling asks for times: the pass itself, and (opt-in) a compiled job of two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerotune.inductor
from zerotune.store.records import Collective
from zerotune.tuner.inductor.measured_times import MeasuredTimes

N_RANKS = 8
SHARD_BYTES = 64 * 64 * 4


@pytest.fixture
def overlap_scheduling():
    """inductor's pass; imported here, as it takes seconds that other tests need not wait for."""
    found = pytest.importorskip("torch._inductor.fx_passes.overlap_scheduling")
    if not hasattr(found, "schedule_overlap_bucketing_from_inductor_configs"):
        pytest.skip("an older torch")
    return found


@pytest.fixture
def graph(overlap_scheduling):
    """All-gather, matmul and reduce-scatter of a group of eight ranks that sends nothing."""
    import torch.distributed._functional_collectives as functional
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def step(shard, weight):
        gathered = functional.all_gather_tensor(shard, 0, dist.group.WORLD)
        product = weight @ weight
        return gathered.sum() + product.sum(), functional.reduce_scatter_tensor(product, "sum", 0, dist.group.WORLD)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=N_RANKS)
    try:
        yield make_fx(step, tracing_mode="fake")(torch.ones(64, 64), torch.ones(64, 64))
    finally:
        dist.destroy_process_group()


def schedule(overlap_scheduling, graph, estimation):
    """What the pass got to hear, by the collective's name."""
    import torch._inductor.config as inductor

    heard = {}

    def listening(node, override_size):
        heard[str(node.target)] = estimation(node, override_size)
        return heard[str(node.target)]

    chosen = {
        "custom_runtime_estimation": listening,
        "compute_estimator": "analytical",
        "enable_fusion_regions": False,
    }
    with (
        pytest.MonkeyPatch.context() as patched,
        inductor.patch({f"aten_distributed_optimizations.{name}": value for name, value in chosen.items()}),
    ):
        # Roofs of a GPU, which torch asks triton for.
        patched.setattr("torch.utils._runtime_estimation.get_gpu_dram_gbps", lambda: 2000.0)
        patched.setattr("torch.utils._runtime_estimation.get_device_tflops", lambda *_: 100.0)
        overlap_scheduling.schedule_overlap_bucketing_from_inductor_configs(graph)
    return heard


def test_the_pass_hears_what_was_measured_and_no_more(overlap_scheduling, graph):
    gathered = (int(Collective.all_gather), N_RANKS, 1), ((SHARD_BYTES * N_RANKS, 750.0),)
    scattered = (int(Collective.reduce_scatter), N_RANKS, 1), ((SHARD_BYTES, 250.0),)
    heard = schedule(
        overlap_scheduling,
        graph,
        zerotune.inductor.RuntimeEstimation(MeasuredTimes({gathered[0]: gathered[1], scattered[0]: scattered[1]})),
    )
    told_ms = {name.split(".")[1]: ms for name, ms in heard.items() if ms is not None}
    assert told_ms == {"all_gather_into_tensor": 0.75, "reduce_scatter_tensor": 0.25}
    assert len(heard) > len(told_ms)


def test_nodes_say_how_ranks_lie_on_nodes(graph):
    two_nodes = (int(Collective.all_gather), N_RANKS, 2), ((SHARD_BYTES * N_RANKS, 750.0),)
    times = MeasuredTimes({two_nodes[0]: two_nodes[1]})
    starts = next(one for one in graph.graph.nodes if "all_gather" in str(one.target))
    assert zerotune.inductor.RuntimeEstimation(times, 4)(starts) == 0.75
    assert zerotune.inductor.RuntimeEstimation(times, 8)(starts) is None
    assert zerotune.inductor.RuntimeEstimation(times, 4)(starts, 0) is None


def test_without_a_store_torch_estimates(graph, tmp_path):
    assert zerotune.inductor.runtime_estimation(tmp_path / "none.db").times == MeasuredTimes()


def test_without_a_job_torch_estimates(tmp_path):
    assert zerotune.inductor.runtime_estimation(tmp_path / "none.db").times == MeasuredTimes()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_of_a_compiled_job_plan_alike(overlap_scheduling, tmp_path):
    """Only rank 0 has a store; the compiled step of both says which times its scheduling heard."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "RENDEZVOUS": str(tmp_path / "rendezvous"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    worker = Path(__file__).with_name("compiled_job.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(tmp_path / f"rank{rank}.db")],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    heard = [rank.communicate(timeout=500)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert heard[0] == heard[1]
    assert heard[0].startswith("all_gather_into_tensor 0.7")
