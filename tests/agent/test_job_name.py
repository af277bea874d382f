import pytest
import torch.distributed as dist

from zerotune.agent.daemon_link.job_name import JobName


@pytest.fixture(autouse=True)
def first_start(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)


def test_all_ranks_take_the_name_that_rank_0_was_given():
    store = dist.HashStore()
    first, other = JobName(store, 0, "ours"), JobName(store, 1, "theirs")
    assert first.learn(None) is None
    assert other.learn(1) is None, "rank 0 has not said it"
    assert first.learn(1) is not None
    assert other.learn(1) is not None
    assert first.name == other.name == other.likely() == "ours"


def test_a_restarted_job_has_a_name_of_its_own(monkeypatch):
    store = dist.HashStore()
    JobName(store, 0, "job").learn(1)
    again, other = JobName(store, 0, "job"), JobName(store, 1, "job")
    assert other.learn(2) is None, "the last start's name is none"
    again.learn(2)
    other.learn(2)
    assert again.name == other.name == "job.1"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert JobName(store, 1, "job").likely() == "job.2"


def test_a_store_that_is_gone_is_no_error():
    class Gone(dist.Store):
        def check(self, keys):
            raise RuntimeError("connection reset")

    assert JobName(Gone(), 1, "job").learn(1) is None
