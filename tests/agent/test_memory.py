import pytest

from zerotune.agent.observing.memory import cpu_source, pressure_source


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
    assert 0 <= pressure_source()() <= 1
