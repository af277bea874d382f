"""deploy/kubernetes: chart and examples against Helm and the published schemas, and their pods' containers run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from pods import Pod
from typer.main import get_command

from zerotune.store.sqlite.database import Store
from zerotune.tuner.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "deploy" / "kubernetes"
CHART = PLACE / "zerotune"
TRAIN = str(ROOT / "zero_runtime" / "examples" / "train.py")
RELEASES = ("1.29", "1.37")
"""Of Kubernetes: the oldest that the chart asks for, and the newest with a schema here."""
EVERYTHING: dict[str, Any] = {
    "severalNodes": {"keysSecret": "zerotune-keys"},
    "metrics": {"enabled": True},
    "fleet": {"url": "s3://bucket/fleet", "book": "s3://bucket/fleet.book", "bookKey": "0a" * 32,
              "environmentSecret": "s3"},
    "options": ["--budget-percent=0.5", "--no-explore"],
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"nvidia.com/gpu.present": "true"},
    "priorityClassName": "system-node-critical",
}  # fmt: skip
USER = 60_123
"""Nobody's number."""
FIELDS = {"status.podIP": "127.0.0.1", "spec.nodeName": "node7"}
"""What the downward API tells a pod."""

as_root = pytest.mark.skipif(os.getuid() != 0, reason="mounts and users of containers are root's to give")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((PLACE / name).read_text()))


def rendered(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The chart's objects by kind, as Helm would send them."""
    helm = pytest.importorskip("helm_python", reason="pip install 'zerotune[cluster]'")
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values=values, name="demo")
    made = [yaml.safe_load(text) for name, text in texts.items() if name.endswith(".yaml")]
    return {one["kind"]: one for one in made if one is not None}


def containers(found: object) -> Iterator[dict[str, Any]]:
    """All in a manifest, wherever they are."""
    if isinstance(found, dict):
        for name in ("initContainers", "containers"):
            yield from found.get(name, [])
        found = list(found.values())
    if isinstance(found, list):
        for one in found:
            yield from containers(one)


def test_the_sidecar_is_for_namespaces_that_are_restricted():
    (job,) = documents("pytorchjob-sidecar.yaml")
    (spec,) = (one["template"]["spec"] for one in job["spec"]["pytorchReplicaSpecs"].values())
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert {kind for volume in spec["volumes"] for kind in volume} <= {
        "name", "emptyDir", "secret", "persistentVolumeClaim",
    }  # fmt: skip
    for one in containers(spec):
        assert not one["securityContext"]["allowPrivilegeEscalation"]
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def check_call(words: Sequence[str]) -> None:
    """The words behind `zerotune` are a command of ours with options that it has."""
    command = get_command(app).commands[words[0]]
    command.make_parser(command.context_class(command)).parse_args(list(words[1:]))


def test_the_examples_call_commands_that_there_are():
    calls = [
        [*one["command"][1:], *one.get("args", [])]
        for name in ("trainjob.yaml", "pytorchjob-sidecar.yaml")
        for one in containers(documents(name))
        if one.get("command", [""])[0] == "zerotune"
    ]
    trainer = documents("trainjob.yaml")[1]["spec"]["trainer"]
    calls.append([*trainer["command"][1:], *trainer["args"]])
    assert sorted(words[0] for words in calls) == ["daemon", "launch", "launch"]
    for words in calls:
        check_call(words)


@pytest.mark.slow
@pytest.mark.parametrize("values", [{}, {"makeFolders": False}, EVERYTHING], ids=["default", "no root", "all"])
def test_the_chart_is_sound(values: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install 'zerotune[cluster]'")
    made = rendered(values)
    helm = pytest.importorskip("helm_python")
    report = helm.lint(str(CHART), values, strict=True)
    assert [one for one in report["messages"] if one["severity"] >= 2] == []
    assert set(made) == {"DaemonSet", "NetworkPolicy"}
    for one in made.values():
        for release in RELEASES:
            validator.validate(one, release, strict=True)
    for one in containers(made["DaemonSet"]):
        security = one["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"]["drop"] == ["ALL"]
        assert one["resources"]["limits"]["memory"]
        assert (security.get("runAsUser") == 0) == (one["name"] == "folders")
        if one["command"][0] == "zerotune":
            check_call([*one["command"][1:], *(one["args"] or [])])
    selected = made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items()
    assert selected <= made["DaemonSet"]["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [{"user": 0}, {"users": 5}, {"resources": {"limits": {"memory": None}}}, {"metrics": {"from": []}},
     {"fleet": {"book": "s3://bucket/fleet.book"}}, {"fleet": {"bookKey": "book.key.pub"}}],
    ids=["root", "misspelt", "no limit", "open to all", "a book unsigned", "a key that is a file"],
)  # fmt: skip
def test_values_that_would_be_unsafe_or_wrong_are_refused(values: dict[str, Any]) -> None:
    helm = pytest.importorskip("helm_python", reason="pip install 'zerotune[cluster]'")
    with pytest.raises(helm.HelmError):
        rendered(values)


@pytest.mark.slow
def test_without_needs_nobody_reaches_the_daemon_by_network() -> None:
    policy = rendered({})["NetworkPolicy"]["spec"]
    assert (policy["policyTypes"], policy["ingress"], policy["egress"]) == (["Ingress", "Egress"], None, None)


@pytest.mark.slow
def test_examples_are_as_kubeflow_publishes_them() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install 'zerotune[cluster]'")
    validator = pytest.importorskip("kubernetes_validate")
    for one in documents("trainjob.yaml"):
        known = getattr(models, f"TrainerV1alpha1{one['kind']}").from_dict(one)
        assert json.loads(known.to_json()) == one, "what the schema does not know is dropped"
    (job,) = documents("pytorchjob-sidecar.yaml")
    client = pytest.importorskip("kubeflow.training.api_client").ApiClient()
    text = type("Response", (), {"data": json.dumps(job)})
    known = client.deserialize(text, "KubeflowOrgV1PyTorchJob")
    assert client.sanitize_for_serialization(known) == job
    (runtime, _) = documents("trainjob.yaml")
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods = [node["template"]["spec"]["template"]["spec"]]
    pods += [replica["template"]["spec"] for replica in job["spec"]["pytorchReplicaSpecs"].values()]
    for spec in pods:
        for release in RELEASES:
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}, "spec": spec}
            validator.validate(pod, release, strict=True)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the volumes that Kubernetes would make, by their kind."""
    for name in ("runtime", "store"):
        (tmp_path / name).mkdir()
    for name in ("tmp", "keys", "socket", "fleet", "shared-memory"):
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, 0, USER)
        (tmp_path / name).chmod(0o2777)
    made = tmp_path / "made"
    words = [sys.executable, "-m", "zerotune.tuner.cli", "daemon", "keys", str(made)]
    subprocess.run(words, check=True, capture_output=True)
    (tmp_path / "secret").mkdir()
    for name in made.iterdir():
        if name.is_file():  # as `kubectl create secret --from-file` takes a folder
            copy = Path(shutil.copy(name, tmp_path / "secret"))
            os.chown(copy, 0, USER)
            copy.chmod(0o440)
    return tmp_path


@contextlib.contextmanager
def daemon_of(pod: Pod, name: str, ends_with: int = 0) -> Iterator[subprocess.Popen[str]]:
    """The daemon's container, from the pod's start until the end of the block."""
    for one in pod.start_ups():
        done = pod.run(one)
        assert done.returncode == 0, done.stdout
    container = pod.container(name)
    process = pod.popen(container)
    try:
        ends_at_s = time.monotonic() + 60
        while (asked := pod.run(container, container["startupProbe"]["exec"]["command"])).returncode != 0:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < ends_at_s, asked.stdout
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == ends_with


def train(pod: Pod, container: dict[str, Any], command: Sequence[str], **environment: str) -> None:
    """A container's command with a script that there is, on the emulated NCCL."""
    words = list(command)
    words[words.index("--") : words.index("--")] = ["--fabric", "ethernet_boxes"]
    words[words.index("train.py") :] = [TRAIN, "--steps", "60", "--layers", "2", "--width", "32"]
    as_kubeflow = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1"}
    done = pod.run(container, words, **as_kubeflow, **environment)
    assert done.returncode == 0, done.stdout


@as_root
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_chart_serves_pods_of_its_user_and_nobody_else(place: Path) -> None:
    values = {"user": USER, "group": USER, "severalNodes": {"keysSecret": "zerotune-keys"}}
    made = rendered(values)["DaemonSet"]["spec"]["template"]["spec"]
    volumes = {one["name"]: place / one["name"] for one in made["volumes"]}
    pod = Pod(made, volumes, FIELDS)
    runtime, job = documents("trainjob.yaml")
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    spec = node["template"]["spec"]["template"]["spec"]
    spec["securityContext"]["runAsUser"] = USER
    training = Pod(spec, {"zerotune": place / "runtime", "shared-memory": place / "shared-memory"}, {})
    trainer = job["spec"]["trainer"]
    with daemon_of(pod, "daemon"):
        train(training, training.container("node"), [*trainer["command"], *trainer["args"]])
        spec["securityContext"]["runAsUser"] = USER + 1
        path = f"/run/zerotune/{USER}/daemon.sock"
        asked = training.run(training.container("node"), ["zerotune", "status", "--endpoint", f"ipc://{path}"])
        assert asked.returncode == 2
    with Store.open(place / "store" / str(USER) / "store.db", read_only=True) as store:
        (trained,) = store.jobs()
        assert (trained.n_ranks, trained.name) == (2, "train")
        assert len(store.steps(trained.job_id)) >= 50


@as_root
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_sidecar_that_is_killed_comes_back_to_its_socket(place: Path) -> None:
    (job,) = documents("pytorchjob-sidecar.yaml")
    spec = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    spec["securityContext"] |= {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    pod = Pod(spec, {one["name"]: place / one["name"] for one in spec["volumes"]}, FIELDS)
    container = pod.container("pytorch")
    command = [*container["command"], *container["args"]]
    read_table = pytest.importorskip("pyarrow.parquet").read_table
    from zerotune.tuner.fleet.signing import Verifier

    with daemon_of(pod, "zerotune", ends_with=-signal.SIGKILL) as first:
        train(pod, container, command)
        first.send_signal(signal.SIGKILL)
        first.wait()
    with daemon_of(pod, "zerotune"):
        train(pod, container, command)
    with Store.open(place / "tmp" / "own" / "store.db", read_only=True) as store:
        assert [one.n_ranks for one in store.jobs()] == [2, 2]
    shared = list((place / "fleet" / "v1").rglob("*.parquet"))
    assert shared, "what was measured is on the shared volume"
    (key,) = {key.as_py() for path in shared for key in read_table(path)["contributor"]}
    assert Verifier.of(str(place / "tmp" / "own" / "store.db.key.pub")).public_hex == key, "it survived the kill"
    assert {read_table(path).schema.metadata[b"zerotune.contributor"] for path in shared} == {b"node7"}
