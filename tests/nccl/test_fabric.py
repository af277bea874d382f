from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.agent.nccl import catalog, fabric
from zerotune.agent.nccl.fabric_model import Fabric
from zerotune.store.errors import FabricError
from zerotune.store.records import Algorithm, Collective, CommunicatorClass, Protocol

KIB, MIB = 1 << 10, 1 << 20


def small_communicators(described: Fabric) -> list[CommunicatorClass]:
    """Those of world sizes 2, 4 and 8, and a pair across nodes where there are several."""
    classes = {described.communicator(range(n)) for n in (2, 4, 8)}
    if described.max_nodes > 1:
        classes.add(described.communicator([0, described.ranks_per_node]))
    return sorted(classes)


def every_cell() -> Iterator[tuple[Fabric, CommunicatorClass, Collective, Algorithm, Protocol]]:
    for name in fabric.names():
        described = fabric.load(name)
        for communicator in small_communicators(described):
            for collective in (*catalog.TUNABLE, Collective.broadcast):
                for algorithm, protocol in described.cells(communicator, collective):
                    yield described, communicator, collective, algorithm, protocol


def test_every_offered_cell_is_legal_and_has_a_time() -> None:
    for described, communicator, collective, algorithm, protocol in every_cell():
        legal = catalog.legal_cells(collective, n_nodes=communicator.n_nodes, n_ranks=communicator.n_ranks)
        assert (algorithm, protocol) in legal, described.name


def test_recorded_fabric_returns_what_was_recorded() -> None:
    loopback = fabric.load("rtx5090_loopback")
    pair = loopback.communicator([0, 1])
    us = loopback.truth_us(pair, Collective.all_gather, Algorithm.ring, Protocol.ll, 4, 4 * MIB)
    assert us == pytest.approx(34951)
    simple = loopback.truth_us(pair, Collective.all_gather, Algorithm.ring, Protocol.simple, 4, 4 * MIB)
    assert simple == pytest.approx((2210 + 2210.17) / 2)
    assert (
        40
        < loopback.truth_us(pair, Collective.all_gather, Algorithm.ring, Protocol.ll, 4, 128 * MIB)
        / (loopback.truth_us(pair, Collective.all_gather, Algorithm.ring, Protocol.simple, 4, 128 * MIB))
        < 46
    )
    # Recorded with three ranks: all_reduce Ring/Simple 8,749 us at 512 KiB.
    three = loopback.communicator([0, 1, 2])
    us = loopback.truth_us(three, Collective.all_reduce, Algorithm.ring, Protocol.simple, 4, 512 * KIB)
    assert us == pytest.approx(8749, rel=0.01)
    # Recorded with one channel: 0.96 GB/s from 4 MiB on.
    for size in (4 * MIB, 16 * MIB, 64 * MIB):
        us = loopback.truth_us(pair, Collective.all_reduce, Algorithm.ring, Protocol.simple, 1, size)
        assert size / us / 1e3 == pytest.approx(0.96, rel=0.09)


def test_nodes_are_counted_by_global_ranks() -> None:
    two = fabric.load("h100_ib_2")
    assert two.n_nodes(range(8)) == 1
    assert two.n_nodes([0, 8]) == two.n_nodes(range(16)) == 2
    # A pair across nodes reaches one adapter of eight.
    full = two.topology(CommunicatorClass(16, 2))
    pair = two.topology(CommunicatorClass(2, 2))
    assert pair.ring_bw_inter_gbs == pytest.approx(full.ring_bw_inter_gbs / 8)
    with pytest.raises(FabricError, match="not 32 ranks on 4 nodes"):
        two.topology(CommunicatorClass(32, 4))


GOOD = (fabric.FABRICS_DIR / "ethernet_boxes.toml").read_text()


def broken(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(FabricError) as caught:
        fabric.load(path)
    assert caught.value.remedy
    assert "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("ring_channels = 8", "ring_channels = -8", "belief.many_nodes.ring_channels = -8"),
        ("ring_channels = 8", "ring_channels = 8\nrings = 2", "unknown field `rings`"),
        ("ring_channels = 8", "", "`ring_channels`"),
        ("sigma = 0.03", "sigma = -1.0", "noise.sigma = -1.0"),
        ("sigma = 0.03", 'sigma = "much"', "noise.sigma = 'much'"),
        ("sigma = 0.03", "sigma = nan", "noise.sigma = nan"),
        ("tflops = 60.0", "tflops = inf", "compute.tflops = inf"),
        ("limit_gbs = 5.2", "limit_gbs = 520.0", "truth.cells[0].limit_gbs = 520.0 moves"),
        ("limit_gbs = 5.2", "limit_gbs = 0", "truth.cells[0].limit_gbs = 0"),
        ('algorithm = "ring"', 'algorithm = "rings"', "truth.cells[0].algorithm = 'rings'"),
        ('algorithm = "ring"', 'algorithm = "nvls"', "has no ring/simple"),
        ("channel_us = 14.0", "channel_us = 14.0\nchannel_factors = [[8, 1.0], [4, 1.0]]", "channel_factors"),
        ("channel_us = 14.0", "channel_us = 14.0\nchannel_factors = [[0, 1.0]]", "channel_factors[0][0] = 0"),
        ("ranks_per_node = 1", "ranks_per_node = 2", "needs belief.one_node"),
        ("inter_gbs = 6.25", "", "truth.inter_gbs = 0.0 "),
        ("inter_gbs = 6.25", 'inter_gbs = 6.25\nrecorded = "absent.csv"', "absent.csv"),
        ("[noise]", "[noise", "is not TOML"),
        (GOOD, "", "required"),
        (GOOD, "\x00", "is not TOML"),
    ],
)
def test_nonsense_is_named(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    assert expected in broken(tmp_path, GOOD.replace(old, new, 1))


def test_hostile_recordings_are_refused(tmp_path: Path) -> None:
    text = GOOD.replace("inter_gbs = 6.25", 'inter_gbs = 6.25\nrecorded = "points.csv"')
    header = "collective,algorithm,protocol,n_ranks,message_bytes,duration_us\n"
    rows = (
        "", "all_gather,ring,ll,2,1024", "all_gather,ring,ll,2,0,1.0", "all_gather,ring,ll,2,8,nan",
        f"all_gather,ring,ll,2,{10**400},1.0", f"all_gather,ring,ll,2,8,1.0,{'x' * 200_000}",
    )  # fmt: skip
    for row in rows:
        (tmp_path / "points.csv").write_text(header + row + "\n" if row else "nonsense\n1\n")
        broken(tmp_path, text)
    broken(tmp_path, text.replace("points.csv", "/dev/zero"))


def test_files_that_would_take_the_parser_for_ever_are_refused(tmp_path: Path) -> None:
    for text in (GOOD + "a." * 100_000 + "b = 1\n", GOOD + "# " + "x" * fabric.MAX_FILE_BYTES):
        assert str(fabric.MAX_LINE_DOTS) in broken(tmp_path, text)
    broken(tmp_path, GOOD.replace("inter_gbs = 6.25", f"inter_gbs = {'9' * 5000}"))


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(FabricError, match=r"ethernet_boxes.*or a \.toml file"):
        fabric.load("infinitely_fast")
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(FabricError):
            fabric.load(str(path) if path.suffix else f"{path}/")
    for text in ("x\0.toml", "x\ud800.toml"):  # no file's name can be so
        with pytest.raises(FabricError):
            fabric.load(text)
        broken(tmp_path, f"machine = {json.dumps(text.replace('toml', 'xml'))}\n{GOOD}")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FabricError, match="not TOML"):
        fabric.load(binary)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(GOOD)), st.integers(0, 40), st.text(max_size=6))
def test_damaged_files_are_errors_or_fabrics(
    tmp_path_factory: pytest.TempPathFactory, start: int, n_cut: int, inserted: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.toml"
    path.write_text(GOOD[:start] + inserted + GOOD[start + n_cut :], encoding="utf-8", errors="surrogatepass")
    try:
        described = fabric.load(path)
    except FabricError:
        return
    assert described.truth_us(CommunicatorClass(2, 2), Collective.all_gather, Algorithm.ring, Protocol.ll, 1, MIB) > 0


def test_a_changed_file_is_another_fabric(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    first = fabric.load(path).fabric_id
    path.write_text(GOOD.replace("sigma = 0.03", "sigma = 0.02"))
    assert fabric.load(path).fabric_id != first


@pytest.mark.parametrize(
    ("name", "limits"),
    [("h100_ib_2", "^NVLSTree"), ("ethernet_boxes", "^NVLS,NVLSTree"), ("as_believed", "^NVLS,NVLSTree")],
)
def test_nccl_may_not_choose_what_a_fabric_has_no_price_for(name, limits):
    assert fabric.load(name).nccl_algo() == limits
