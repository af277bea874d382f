from types import SimpleNamespace

import pytest
from job_stub import SessionStub

from zerotune.agent import activate
from zerotune.agent.callbacks import figures as module


@pytest.fixture
def session(monkeypatch):
    made = SessionStub()
    monkeypatch.setattr(activate, "installed", SimpleNamespace(session=made))
    monkeypatch.setattr(module, "status_cache", module.StatusCache())
    monkeypatch.setattr(module, "own_watch", module.Watch())
    monkeypatch.setattr(module, "fetch_status", lambda *_: None)
    return made
