import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.store.errors import PlanError
from zerotune.store.plan_file import PlanFile, names_chunk_sizes, read_plan, write_plan
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Phase, Plan, PlanRow, Protocol

candidates = st.builds(
    Candidate,
    st.sampled_from(Algorithm),
    st.sampled_from(Protocol),
    st.integers(0, 64),
    st.just(0) | st.integers(4, 2**15).map(lambda kib: kib << 10),
) | st.builds(Candidate, n_channels=st.integers(0, 64))
rows = st.builds(
    PlanRow,
    st.builds(CommunicatorClass, st.integers(1, 9999), st.integers(1, 999)),
    st.sampled_from(Collective),
    st.sampled_from(Phase),
    st.integers(1, 2**40),
    st.integers(2**40, 2**41),
    candidates,
    st.text(max_size=20),
)


@given(st.builds(Plan, epoch=st.just(1), rows=st.lists(rows, max_size=5).map(tuple), gathers_after_step=st.booleans()))
def test_round_trip(tmp_path_factory, plan):
    path, file = tmp_path_factory.mktemp("p") / "plan.json", PlanFile(plan, "fabric", "job", "emulated")
    write_plan(path, file)
    assert read_plan(path) == file


def test_a_row_without_a_chunk_size_is_written_as_ever(tmp_path):
    setting = Candidate(Algorithm.ring, Protocol.simple, 8)
    for chunk_bytes in (0, 65536):
        path = tmp_path / f"{chunk_bytes}.json"
        candidate = msgspec.structs.replace(setting, chunk_bytes=chunk_bytes)
        row = PlanRow(CommunicatorClass(2, 1), Collective.all_gather, Phase.other, 1, 9, candidate)
        write_plan(path, PlanFile(Plan(1, (row,))))
        (written,) = json.loads(path.read_text())["rows"]
        assert written.get("chunk_bytes", 0) == chunk_bytes
        assert ("chunk_bytes" in written) == names_chunk_sizes(path) == (chunk_bytes > 0)
    assert not names_chunk_sizes(tmp_path / "absent.json")


GOOD = {
    "n_ranks": 2, "n_nodes": 2, "collective": "all_gather", "phase": "other",
    "min_bytes": 1, "max_bytes": 9, "algorithm": "ring", "protocol": "ll",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"algorithm": "rings"}, "'rings'"),
        ({"protocol": None}, "protocol"),
        ({"n_channels": 65}, "65"),
        ({"chunk_bytes": 4095}, "chunk_bytes 4095"),
        ({"chunk_bytes": -4096}, "chunk_bytes -4096"),
        ({"chunk_bytes": 2**25 + 1024}, "chunk_bytes 33555456"),
        ({"collective": "gather_all"}, "'gather_all'"),
        ({"colour": 1}, "colour"),
        ({"min_bytes": "1"}, "min_bytes"),
        ({"min_bytes": 10}, "row 1: 10..9 "),
    ],
)
def test_refusals_name_the_value(tmp_path, change, named):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"zerotune_plan": 1, "rows": [{**GOOD, **change}]}))
    with pytest.raises(PlanError, match=r"plan\.json") as refusal:
        read_plan(path)
    assert named in str(refusal.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"zerotune_plan": 2, "rows": []}', "[" * 100_000])
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError):
        read_plan(path)
    with pytest.raises(PlanError):
        read_plan(tmp_path / "absent.json")
