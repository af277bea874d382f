from types import SimpleNamespace

import pytest

from zerotune.agent.observing.memory import cpu_source, device_memory_here


def test_cgroup_v2_limit(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("250\n")
    sample = cpu_source(tmp_path)
    assert sample() == 0.25
    (tmp_path / "memory.current").write_text("2000\n")
    assert sample() == 1.0
    (tmp_path / "memory.current").unlink()
    assert sample() is None


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096), ""])
def test_no_limit_falls_back_to_resident_memory(tmp_path, limit):
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("250")
    assert 0 < cpu_source(tmp_path)() < 1


def test_this_machine_has_a_pressure():
    assert 0 <= device_memory_here().pressure() <= 1
    assert device_memory_here().cached_share() == 0


def test_memory_cached_by_torch_counts_as_used_and_is_told_apart(monkeypatch):
    """NCCL allocates from the driver, which does not know that torch could do without it."""
    gpu = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda _: SimpleNamespace(total_memory=1000, uuid="none of NVML's"),
        "mem_get_info": lambda _: (50, 1000),
        "memory_reserved": lambda _: 900,
        "memory_allocated": lambda _: 600,
    }
    for name, function in gpu.items():
        monkeypatch.setattr(f"torch.cuda.{name}", function)
    memory = device_memory_here()
    assert memory.pressure() == pytest.approx(0.95)
    assert memory.cached_share() == pytest.approx(0.3)
