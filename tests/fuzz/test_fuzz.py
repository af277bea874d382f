"""Each target over its corpus and a few hundred changes of it; `make fuzz` does the same for as long as it is given."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from engines import HERE, PLUGIN_TARGET, build_plugin_engine, run_plugin
from fuzz_targets import TARGETS
from mutations import mutations

CORPUS = HERE / "corpus"
N_CHANGED = 40
LONGEST_S = 5.0


def corpus(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_is_a_crash(name: str):
    target, inputs = TARGETS[name], corpus(name)
    for data in [b"", *inputs, *mutations(inputs, target.dictionary, N_CHANGED, target.max_bytes)]:
        started_s = time.process_time()
        target.run(data)
        assert time.process_time() - started_s < LONGEST_S


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_plugin_engine(tmp_path_factory.mktemp("engine"))
    if built is None:
        pytest.skip("no compiler here has sanitizers and coverage")
    return built


@pytest.mark.slow  # `make fuzz` looks for longer
def test_the_plugin_under_sanitizers(engine: Path, tmp_path: Path):
    outcome = run_plugin(engine, 1.0, 1, tmp_path / "work", CORPUS / PLUGIN_TARGET, tmp_path)
    assert outcome.crashes == ()
    assert outcome.n_runs > 50
    assert outcome.n_reached > 100
    assert list((tmp_path / "work" / "found").iterdir()), "its coverage guides it"
