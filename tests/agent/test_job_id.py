import pytest
import torch.distributed as dist

from zerotune.agent.daemon_link.job_id import AgreedJobId
from zerotune.agent.settings import AgentSettings


@pytest.fixture(autouse=True)
def first_start(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)


def test_all_ranks_take_the_id_that_rank_0_was_given():
    store = dist.HashStore()
    first, other = AgreedJobId(store, 0, "ours"), AgreedJobId(store, 1, "theirs")
    assert first.learn(None) is None
    assert other.learn(1) is None, "rank 0 has not said it"
    assert first.learn(1) is not None
    assert other.learn(1) is not None
    assert first.job_id == other.job_id == other.likely() == "ours"


def test_a_restarted_job_has_an_id_of_its_own(monkeypatch):
    store = dist.HashStore()
    AgreedJobId(store, 0, "job").learn(1)
    again, other = AgreedJobId(store, 0, "job"), AgreedJobId(store, 1, "job")
    assert other.learn(2) is None, "the last start's id is none"
    again.learn(2)
    other.learn(2)
    assert again.job_id == other.job_id == "job.1"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert AgreedJobId(store, 1, "job").likely() == "job.2"


def test_a_store_that_is_gone_is_no_error():
    class Gone(dist.Store):
        def check(self, keys):
            raise RuntimeError("connection reset")

    assert AgreedJobId(Gone(), 1, "job").learn(1) is None


def test_scripts_that_turn_the_agent_on_themselves_get_ids_of_their_own():
    nothing_said: dict[str, str] = {}
    ids = [AgentSettings.from_environment(nothing_said).job_id for _ in range(2)]
    assert ids[0] != ids[1]
