import pytest

from zerotune.agent.environment import objection
from zerotune.agent.machine.tunable_variables import why_refused
from zerotune.store.errors import UserError
from zerotune.tuner.environment.candidates import OFFERS, Candidate, candidates_for, effect_of, read_candidates

H100 = {"n_nvlinks": 18, "compute_capability": 90, "adapters": "8 x InfiniBand 400 Gb/sec (4X NDR)"}
NEW = 22809
REFUSED = """
    NCCL_ALGO NCCL_PROTO NCCL_TUNER_PLUGIN NCCL_PROFILER_PLUGIN NCCL_NET_PLUGIN NCCL_NET NCCL_DEBUG NCCL_DEBUG_SUBSYS
    NCCL_SOCKET_IFNAME NCCL_SOCKET_FAMILY NCCL_COMM_ID NCCL_HOSTID NCCL_TOPO_FILE NCCL_GRAPH_FILE NCCL_CONF_FILE
    NCCL_IB_HCA NCCL_IB_GID_INDEX NCCL_IB_PKEY NCCL_GDR_FLUSH_DISABLE NCCL_NET_FORCE_FLUSH NCCL_CHECKS_DISABLE
    OFI_NCCL_GDR_FLUSH_DISABLE FI_PROVIDER FI_MR_CACHE_MONITOR FI_LOG_LEVEL FI_CXI_DEFAULT_VNI UCX_NET_DEVICES
    NCCL_ZEROTUNE LD_PRELOAD CUDA_VISIBLE_DEVICES nccl_buffsize PATH
"""


def variables(found):
    return [one.variable for one in found]


def test_a_candidate_is_spelled_as_an_assignment():
    assert str(Candidate("NCCL_BUFFSIZE", "8388608")) == "NCCL_BUFFSIZE=8388608"


def test_every_curated_change_could_stand_in_a_users_list_and_says_what_it_does():
    assert [one.variable for one in OFFERS if why_refused(one.variable)] == []
    assert all(one.effect.endswith(".") and one.values for one in OFFERS)
    assert effect_of(Candidate("NCCL_PXN_DISABLE", "1")) == "Sends from each GPU, never through its neighbour."
    assert effect_of(Candidate("NCCL_PXN_DISABLE", "7")) == ""


@pytest.mark.parametrize(
    ("adapters", "net", "offered", "not_offered"),
    [
        ("8 x InfiniBand 400 Gb/sec (4X NDR)", "", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_SOCKET_NTHREADS"),
        ("2 x Ethernet 100 Gb/sec (4X EDR)", "", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_SOCKET_NTHREADS"),
        ("2 x Ethernet 25000 Mb/s", "", "NCCL_SOCKET_NTHREADS", "NCCL_IB_QPS_PER_CONNECTION"),
        ("4 x Ethernet 200000 Mb/s", "AWS Libfabric", "FI_CXI_RDZV_THRESHOLD", "NCCL_SOCKET_NTHREADS"),
        ("4 x Unknown 100 Gb/sec", "", "OFI_NCCL_EAGER_MAX_SIZE", "NCCL_IB_QPS_PER_CONNECTION"),
        ("", "", "NCCL_BUFFSIZE", "NCCL_SOCKET_NTHREADS"),
    ],
)
def test_variables_of_other_networks_are_left_out(adapters, net, offered, not_offered):
    found = variables(candidates_for({"adapters": adapters, "NCCL_NET": net}, NEW, True, ()))
    assert offered in found
    assert not_offered not in found


def test_one_node_is_offered_nothing_of_networks():
    found = variables(candidates_for(H100, NEW, False, ()))
    assert "NCCL_NVLS_ENABLE" in found
    assert not {"NCCL_CROSS_NIC", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_SHM_DISABLE"} & set(found)


def test_a_node_with_one_gpu_is_offered_nothing_between_gpus():
    box = {"type_intra": 8, "ranks_per_node": 1}
    assert "NCCL_SHM_DISABLE" in variables(candidates_for(box | {"ranks_per_node": 8}, NEW, True, ()))
    assert not {"NCCL_SHM_DISABLE", "NCCL_P2P_LEVEL"} & set(variables(candidates_for(box, NEW, True, ())))


def test_adaptive_routing_is_turned_over():
    roce = {"adapters": "2 x Ethernet 100 Gb/sec (4X EDR)"}
    assert Candidate("NCCL_IB_ADAPTIVE_ROUTING", "0") in candidates_for(H100, NEW, True, ())
    assert Candidate("NCCL_IB_ADAPTIVE_ROUTING", "1") in candidates_for(roce, NEW, True, ())


def test_variables_unknown_to_this_nccl_are_left_out():
    assert "NCCL_NETDEVS_POLICY" in variables(candidates_for(H100, 22803, True, ()))
    assert "NCCL_NETDEVS_POLICY" not in variables(candidates_for(H100, 22707, True, ()))
    assert candidates_for(H100, 0, True, ()) == []


def test_the_users_variables_are_left_alone():
    every = variables(candidates_for(H100, NEW, True, ()))
    for variable in every:
        assert variable not in variables(candidates_for(H100, NEW, True, {variable}))


def test_second_values_come_after_all_first_ones():
    found = variables(candidates_for(H100, NEW, True, ()))
    firsts = len(set(found))
    assert len(set(found[:firsts])) == firsts < len(found)


def test_a_users_list_is_read(tmp_path):
    path = tmp_path / "list"
    path.write_text("# ours\nNCCL_BUFFSIZE=8388608\n\n  UCX_RNDV_THRESH=8192  # bytes\nNCCL_BUFFSIZE=2097152\n")
    assert [str(one) for one in read_candidates(path)] == [
        "NCCL_BUFFSIZE=8388608",
        "UCX_RNDV_THRESH=8192",
        "NCCL_BUFFSIZE=2097152",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("NCCL_NTHREADS=256\nNCCL_BUFFSIZE 8388608\n", "line 2: NCCL_BUFFSIZE 8388608 is no NAME=VALUE"),
        ("NCCL_BUFFSIZE=\n", "line 1: NCCL_BUFFSIZE= is no NAME=VALUE"),
        ("NCCL_BUFFSIZE=1 2\n", "line 1"),
        ("\x1b[2J\n", "line 1: \\u001b[2J is no"),
        ("NCCL_ALGO=Ring\n", "line 1: NCCL_ALGO is not tried: zerotune chooses"),
        ("NCCL_NTHREADS=256\nNCCL_NTHREADS=256\n", "line 2: NCCL_NTHREADS=256 is there already, in line 1"),
        ("NCCL_BUFFSIZE=banana\n", "line 1: NCCL_BUFFSIZE=banana is no whole number"),
        ("LD_PRELOAD=x.so\n", "line 1: LD_PRELOAD is not tried: its name does not begin"),
        ("# nothing\n", "lists no candidate"),
        ("#" * (1 << 20) + "\n", "is larger than"),
    ],
)
def test_a_bad_list_is_refused_with_its_line(tmp_path, text, said):
    path = tmp_path / "list"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_candidates(path)
    assert said in str(error.value)
    assert error.value.remedy


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "bytes", tmp_path / "missing", tmp_path):
        with pytest.raises(UserError, match="cannot read the candidates"):
            read_candidates(path)


def test_results_security_and_addresses_are_not_tried():
    assert [one for one in REFUSED.split() if not why_refused(one)] == []


def test_variables_that_change_speed_alone_are_tried():
    may = ("NCCL_NET_GDR_READ", "NCCL_NETDEVS_POLICY", "UCX_RNDV_THRESH", "FI_EFA_TX_SIZE")
    assert [one for one in may if why_refused(one)] == []


def test_a_rank_takes_nothing_of_the_kind_whoever_wrote_it_into_the_jobs_store() -> None:
    assert objection("NCCL_BUFFSIZE=8388608") == ""
    hostile = ["LD_PRELOAD=/tmp/x.so", "PYTHONPATH=/tmp", "NCCL_BUFFSIZE=8388608 NCCL_NET_PLUGIN=x"]
    for written in [*hostile, *(f"{name}=1" for name in REFUSED.split())]:
        assert "refused" in objection(written), written
