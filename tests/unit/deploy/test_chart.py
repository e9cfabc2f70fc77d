"""The chart against Kubernetes' schemas, against the server, and its objects against each other."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway import __version__
from headway.cli import serve
from headway.config import EngineConfig
from headway.console.flags import CommandParser, chosen, engine_flags
from headway.server.api.openapi import OPERATIONS
from headway.server.http.access_control import OPEN_PATHS
from headway.server.http.http_server import GRACE_S
from headway.server.server_config import ServerConfig
from headway.server.serving import STOP_MARGIN_S
from tests.unit.deploy.chart import DEPLOY, RELEASES, refusal, release, render
from tests.unit.deploy.chart import needs_helm as pytestmark  # noqa: F401
from tests.unit.server.fake_engine import FakeServer

OLDEST, OPERATOR = "1.27", "monitoring.coreos.com/v1"
each_release = pytest.mark.parametrize("name", RELEASES)


@pytest.mark.parametrize("example", render.EXAMPLES, ids=lambda example: str(example.stem))
def test_manifests_are_what_the_chart_makes(example: Path) -> None:
    written = DEPLOY / "kubernetes" / example.name
    assert written.read_text(encoding="utf-8") == render.manifest(example), "run 'python deploy/kubernetes/render.py'"


def test_the_chart_has_headways_version() -> None:
    chart = (DEPLOY / "helm" / "headway" / "Chart.yaml").read_text(encoding="utf-8")
    assert chart == render.described(chart, __version__), "run 'python deploy/kubernetes/render.py'"


def test_the_page_and_the_kustomization_name_the_images_of_the_manifests() -> None:
    kustomization = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text(encoding="utf-8"))
    [resource], [image] = kustomization["resources"], kustomization["images"]
    used = release(Path(resource).stem).container["image"]
    assert used.partition(":")[0] == image["name"]
    page = (DEPLOY.parent / "docs" / "deploying.md").read_text(encoding="utf-8")
    assert set(re.findall(r"headway:\d[^`]*", page)) == {used}


@pytest.mark.parametrize(
    ("name", "version"), [*((name, "newest") for name in RELEASES), ("everything", OLDEST), ("replicas", OLDEST)]
)
def test_objects_are_kubernetes(name: str, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    version = kubernetes_validate.latest_version() if version == "newest" else version
    objects = [one for one in release(name).objects if one["apiVersion"] != OPERATOR]
    assert len(objects) >= 4
    for one in objects:
        kubernetes_validate.validate(one, version, strict=True)


def test_the_oldest_kubernetes_that_is_checked_is_the_oldest_that_the_chart_accepts() -> None:
    chart = yaml.safe_load((DEPLOY / "helm" / "headway" / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"


def test_helm_finds_nothing_to_complain_about() -> None:
    command = [render.helm(), "lint", "--strict", str(DEPLOY / "helm" / "headway")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- the server --------------------------------------------------------------------------------------------------


def options_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the server and of the engine that the pod's arguments give."""
    parser = CommandParser(prog="headway serve")
    serve.add_arguments(parser)
    arguments = parser.parse(release(name).container.get("args", []))
    engine = chosen(arguments, engine_flags())
    if arguments.served_model is not None:
        engine["model"] = arguments.served_model
    return chosen(arguments, serve.server_flags()), engine


@each_release
def test_arguments_are_options_that_the_server_has(name: str) -> None:
    server, engine = options_of(name)
    EngineConfig.from_options(**engine)
    files = {"api_key_file", "service_classes"}
    ServerConfig(**{option: value for option, value in server.items() if option not in files})


def test_options_become_flags_whatever_their_kind() -> None:
    server, engine = options_of("everything")
    assert server["served_model_name"] == ["a", "b"] and server["max_body_bytes"] == 16777216
    assert server["refuse_late"] is True and server["resume"] is False
    assert engine["max_num_seqs"] == 64 and engine["gpu_memory_utilization"] == 0.85 and "seed" not in engine
    assert {"api_key_file", "ssl_certfile", "ssl_keyfile", "service_classes"} <= server.keys()
    assert engine["model"] == "org/name"
    assert engine["disk_cache"] == "/kv" and engine["disk_cache_size"] == 45 * 2**30


@each_release
def test_files_and_folders_of_the_arguments_are_mounted(name: str) -> None:
    container, volumes = release(name).container, release(name).pod["spec"]["volumes"]
    folders = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert sorted(folders) == sorted(volume["name"] for volume in volumes)
    server, engine = options_of(name)
    paths = [value for value in {**server, **engine}.values() if isinstance(value, str) and value.startswith("/")]
    for path in paths:
        assert any(path == folder or path.startswith(f"{folder}/") for folder in folders.values()), path
    for volume in volumes:
        for item in volume.get("secret", {}).get("items", []):
            assert f"{folders[volume['name']]}/{item['path']}" in paths


@each_release
def test_probes_ask_what_the_server_answers_without_a_key(name: str) -> None:
    container = release(name).container
    [port] = container["ports"]
    has_tls = "ssl_certfile" in options_of(name)[0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] in OPEN_PATHS and ("get", asked["path"]) in {(one.method, one.path) for one in OPERATIONS}
        assert asked["port"] == port["name"] and asked["scheme"] == ("HTTPS" if has_tls else "HTTP")
    assert int(port["containerPort"]) == options_of(name)[0]["port"]


@each_release
def test_the_environment_has_no_variables_of_services(name: str) -> None:
    """One of a service named headway would be HEADWAY_PORT."""
    assert release(name).pod["spec"]["enableServiceLinks"] is False


@each_release
def test_a_pod_has_the_time_that_its_server_takes_to_drain(name: str) -> None:
    server, pod, ready = options_of(name)[0], release(name).pod["spec"], release(name).container["readinessProbe"]
    assert pod["terminationGracePeriodSeconds"] >= server["drain_timeout_s"] + GRACE_S + STOP_MARGIN_S
    assert ready["periodSeconds"] * ready["failureThreshold"] + ready["timeoutSeconds"] <= server["lame_duck_s"]


def test_a_slow_start_is_not_taken_for_a_fault() -> None:
    for probe, value in (("startupProbe", 3600), ("livenessProbe", 400)):
        key = "startupSeconds" if probe == "startupProbe" else "livenessSeconds"
        text = render.template("--set", f"probes.{key}={value}", "--show-only", "templates/deployment.yaml")
        [container] = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
        assert container[probe]["periodSeconds"] * container[probe]["failureThreshold"] == value


def test_the_autoscalers_metric_comes_from_one_of_the_servers() -> None:
    rules = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text(encoding="utf-8"))
    [rule] = rules["rules"]["custom"]
    [series] = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
    assert f"\n{series}{{" in FakeServer().call("GET", "/metrics").text
    [metric] = release("replicas").one("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]


# ---- the objects among themselves ---------------------------------------------------------------------------------


@each_release
def test_selectors_find_the_pods_and_references_their_objects(name: str) -> None:
    labels, deployment, service = release(name).pod["metadata"]["labels"], *map(release(name).one, KINDS[:2])
    selectors = [deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in release(name).of("PodDisruptionBudget")]
    selectors += [one["spec"]["podSelector"]["matchLabels"] for one in release(name).of("NetworkPolicy")]
    assert all(selector.items() <= labels.items() for selector in selectors)
    for monitor in release(name).of("ServiceMonitor"):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    for scaler in release(name).of("HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
        assert "replicas" not in deployment["spec"], "an upgrade would undo the autoscaler's number"
    ports = {port["name"] for port in release(name).container["ports"]}
    for named in [service["spec"]["ports"][0]["targetPort"], *allowed_ports(name)]:
        assert named in ports


KINDS = ("Deployment", "Service", "PersistentVolumeClaim")


def allowed_ports(name: str) -> list[str]:
    policies = release(name).of("NetworkPolicy")
    return [port["port"] for one in policies for rule in one["spec"]["ingress"] for port in rule["ports"]]


def test_keys_of_the_charts_own_secret_are_those_that_are_read() -> None:
    secret, monitor = release("everything").one("Secret"), release("everything").one("ServiceMonitor")
    assert secret["stringData"]["api-keys"].split() == ["first-key", "second-key"]
    wanted = monitor["spec"]["endpoints"][0]["authorization"]["credentials"]
    assert wanted["name"] == secret["metadata"]["name"]
    assert secret["stringData"][wanted["key"]] in secret["stringData"]["api-keys"].split()
    [keys] = [one for one in release("everything").pod["spec"]["volumes"] if one["name"] == "keys"]
    assert keys["secret"]["secretName"] == secret["metadata"]["name"]
    assert {item["key"] for item in keys["secret"]["items"]} <= secret["stringData"].keys()


def test_the_claim_of_the_chart_is_the_one_that_is_mounted_and_one_node_at_a_time_has_it() -> None:
    claim = release("everything").one("PersistentVolumeClaim")["metadata"]["name"]
    [cache] = [one for one in release("everything").pod["spec"]["volumes"] if one["name"] == "cache"]
    assert cache["persistentVolumeClaim"]["claimName"] == claim
    assert release("everything").one("Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert release("replicas").one("Deployment")["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


@each_release
def test_pods_have_no_more_rights_than_they_need(name: str) -> None:
    for pod in [release(name).pod, release(name).one("Pod")]:
        [container] = pod["spec"]["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] and pod["spec"]["securityContext"]["seccompProfile"]
    assert release(name).pod["spec"]["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_gpus_are_asked_for_beside_what_the_values_ask_for() -> None:
    limits = release("gpu").container["resources"]["limits"]
    assert limits == {"cpu": "8", "memory": "48Gi", "nvidia.com/gpu": 1}
    assert "nvidia.com/gpu" not in release("cpu").container["resources"]["limits"]


def test_the_monitor_is_one_of_the_operators() -> None:
    """The package takes seconds to import, so it is not in the extra 'dev'."""
    models = pytest.importorskip("cloudcoil.models.prometheus_operator.v1")
    for name in ("everything", "replicas"):
        monitor = release(name).one("ServiceMonitor")
        known = models.ServiceMonitor.model_validate(monitor)
        assert known.model_dump(mode="json", by_alias=True, exclude_unset=True)["spec"] == monitor["spec"]


# ---- wrong values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("replica=2", "replica"),
        ("device=tpu", "device"),
        ("drain.timeoutSeconds=-1", "timeoutSeconds"),
        ("drain.lameDuckSeconds=61", "must not be longer"),
        ("cache.size=many", "cache.size"),
        ("kvDisk.sizeGiB=1", "sizeGiB"),
        ("options.MaxNumSeqs=1", "MaxNumSeqs"),
        ("options.port=9000", "options.port is set by the chart"),
        ("kvDisk.enabled=true,options.host-cache-memory=1GiB", "options.host-cache-memory is set by the chart"),
        ("auth.existingSecret=a,auth.keys={b}", "two sources of API keys"),
        ("replicas=2,cache.persistent=true", "ReadWriteMany"),
        ("autoscaling.enabled=true,cache.existingClaim=mine", "ReadWriteMany"),
    ],
)
def test_values_that_would_not_work_are_refused_by_name(value: str, said: str) -> None:
    assert said in refusal("--set", value)


def test_every_value_is_in_the_schema() -> None:
    """Helm refuses values that the schema does not have; the defaults must all be there, at every depth."""
    values = yaml.safe_load((DEPLOY / "helm" / "headway" / "values.yaml").read_text(encoding="utf-8"))
    schema = yaml.safe_load((DEPLOY / "helm" / "headway" / "values.schema.json").read_text(encoding="utf-8"))
    assert set(schema["properties"]) - {"global"} == set(values)
    for name, part in schema["properties"].items():
        if "properties" in part and name != "resources":
            assert set(part["properties"]) == set(values[name]), name
