"""The Kubernetes manifests and compose.yaml: their schemas, and what they promise about the daemon."""
import json
import os
import re
import subprocess
import sys

import pytest

from daemon import BIN, ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (tests/deploy/requirements.txt)")
DEPLOY = os.path.join(ROOT, "deploy")
KUBERNETES_VERSIONS = ("1.28", "1.37")


@pytest.fixture(scope="module")
def manifests():
    with open(os.path.join(DEPLOY, "kubernetes", "kvasir.yaml")) as f:
        return {doc["kind"]: doc for doc in yaml.safe_load_all(f)}


@pytest.fixture(scope="module")
def compose():
    with open(os.path.join(DEPLOY, "compose.yaml")) as f:
        return yaml.safe_load(f)["services"]["kvasir"]


@pytest.fixture(scope="module")
def options():
    return json.loads(subprocess.run([BIN, "serve", "--print-config"], capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_manifest_fits_its_schema(manifests, version):
    validator = pytest.importorskip("kubernetes_validate")
    assert set(manifests) == {"Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler"}
    for doc in manifests.values():
        validator.validate(doc, version, strict=True)
    # It does find things.
    broken = json.loads(json.dumps(manifests["Deployment"]))
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, version, strict=True)


def test_the_manifests_fit_each_other(manifests):
    pod = manifests["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    for selector in (manifests["Deployment"]["spec"]["selector"]["matchLabels"], manifests["Service"]["spec"]["selector"],
                     manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels
    target = manifests["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["kind"] == "Deployment" and target["name"] == manifests["Deployment"]["metadata"]["name"]
    assert "replicas" not in manifests["Deployment"]["spec"], "it would fight with the autoscaler at each apply"
    container = pod["spec"]["containers"][0]
    ports = {p["name"] for p in container["ports"]}
    assert all(p["targetPort"] in ports for p in manifests["Service"]["spec"]["ports"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    volumes = {v["name"] for v in pod["spec"]["volumes"]}
    assert all(m["name"] in volumes for m in container["volumeMounts"])


def test_the_autoscaler_reads_the_queue(manifests):
    with open(os.path.join(DEPLOY, "kubernetes", "prometheus-adapter.yaml")) as f:
        rules = yaml.safe_load(f)["rules"]["custom"]
    offered = {r["name"]["as"]: r["seriesQuery"] for r in rules}
    for metric in manifests["HorizontalPodAutoscaler"]["spec"]["metrics"]:
        assert '"vllm:num_requests_waiting"' in offered[metric["pods"]["metric"]["name"]]


def test_each_probe_asks_for_the_right_state(manifests):
    container = manifests["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    path = {probe: container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    # A daemon that cannot load its model must not be restarted in a circle: only readiness knows the model.
    assert path == {"startupProbe": "/health/live", "readinessProbe": "/health/ready", "livenessProbe": "/health/live"}


def test_a_pod_has_the_time_that_a_drain_takes(manifests, options):
    spec = manifests["Deployment"]["spec"]["template"]["spec"]
    before = int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > before + options["drain_timeout"] + 4


def test_a_container_takes_the_options_it_is_given(manifests):
    container = manifests["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    r = subprocess.run([BIN, "serve", *container["args"], "--print-config"], capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    shown = json.loads(r.stdout)
    assert shown["host"] == "0.0.0.0" and shown["port"] == container["ports"][0]["containerPort"]
    assert all(e["name"].removeprefix("KVASIR_").lower() in shown for e in container["env"])


def test_service_links_do_not_set_an_option(manifests):
    """A service named kvasir would set KVASIR_PORT=tcp://10.0.0.1:80, which the daemon refuses."""
    assert manifests["Deployment"]["spec"]["template"]["spec"]["enableServiceLinks"] is False
    r = subprocess.run([BIN, "serve", "--print-config"], capture_output=True, text=True,
                       env={**os.environ, "KVASIR_PORT": "tcp://10.0.0.1:80"})
    assert r.returncode == 1 and "KVASIR_PORT" in r.stderr


def test_a_pod_has_no_rights(manifests):
    spec = manifests["Deployment"]["spec"]["template"]["spec"]
    own = spec["containers"][0]["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["automountServiceAccountToken"] is False
    assert own == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def test_compose_fits_its_schema(tmp_path):
    """The schema of the Compose Specification, as check-jsonschema carries it."""
    pytest.importorskip("check_jsonschema")

    def check(path):
        return subprocess.run([sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", path],
                              capture_output=True, text=True)
    path = os.path.join(DEPLOY, "compose.yaml")
    r = check(path)
    assert r.returncode == 0, r.stdout
    with open(path) as f:
        (tmp_path / "compose.yaml").write_text(f.read().replace("read_only: true", "readonly: true"))
    assert check(str(tmp_path / "compose.yaml")).returncode != 0


def test_a_compose_container_drains_and_has_no_rights(compose, options):
    assert int(re.fullmatch(r"(\d+)s", compose["stop_grace_period"])[1]) > options["drain_timeout"] + 4
    assert compose["read_only"] and compose["cap_drop"] == ["ALL"] and "no-new-privileges:true" in compose["security_opt"]
    assert "healthcheck" not in compose, "the image has its own"
