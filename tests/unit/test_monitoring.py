"""Dashboards, alerts and the page about them read what /metrics has, and are as they are written."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard

from headway.config import option_names
from headway.server.metrics.name_forms import FORMS
from headway.server.metrics.prometheus import process_families
from headway.server.server_config import ServerConfig
from tests.monitoring.alert_drill import NOT_DRILLED, SCENARIOS
from tests.monitoring.dashboards import FILES, Target, panels, targets, vllm_targets
from tests.monitoring.prometheus_process import shortened
from tests.monitoring.promql import reads
from tests.unit.test_docs import load_script

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
SCRAPED = frozenset({"job", "instance"})
"""Labels that Prometheus adds."""
OF_LINUX = ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_start_time_seconds")
"""Without /proc, prometheus_client knows nothing of its process."""

load_script(ROOT / "docs" / "written_part.py")  # which the next one imports
metrics_table = load_script(ROOT / "docs" / "metrics_table.py")
load_script(ROOT / "deploy" / "grafana" / "service_and_engine.py")
dashboards = load_script(ROOT / "deploy" / "grafana" / "dashboards.py")


@cache
def page(form: str) -> dict[str, frozenset[str]]:
    """All series that a server can have, with their labels."""
    families = [*FORMS[form](metrics_table.families()), *process_families()]
    found = {sample.name: frozenset(sample.labels) for family in families for sample in family.samples}
    return dict.fromkeys(OF_LINUX, frozenset()) | found | {"up": frozenset()}


@cache
def rules() -> tuple[dict[str, Any], ...]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return tuple(rule for group in groups for rule in group["rules"])


def alerts() -> Iterator[dict[str, Any]]:
    return (rule for rule in rules() if "alert" in rule)


@pytest.mark.parametrize(
    "target",
    [target for path in FILES for target in targets(path)],
    ids=lambda target: f"{target.dashboard}: {target.panel}",
)
def test_a_panel_reads_series_and_labels_that_exist(target: Target) -> None:
    check(target.expression, page("headway"))


def test_what_vllms_panels_read_exists() -> None:
    for target in vllm_targets():
        check(target.expression, page("vllm"))


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert", rule.get("record")))
def test_a_rule_reads_series_and_labels_that_exist(rule: dict[str, Any]) -> None:
    records = {one["record"]: frozenset({"model_name"}) for one in rules() if "record" in one}
    check(rule["expr"], page("headway") | records)


def check(expression: str, known: dict[str, frozenset[str]]) -> None:
    found = list(reads(expression))
    assert found
    for name, labels in found:
        assert name in known, f"no series {name}: {expression}"
        assert labels - SCRAPED <= known[name], f"{name} has only {sorted(known[name])}: {expression}"


def test_a_name_or_label_that_does_not_exist_is_found() -> None:
    for expression in (
        "rate(headway:engine_step_total[5m])",
        'headway:num_requests_running{engine="0"}',
        "sum by (kind) (headway:num_requests_running)",
        "1 - (-max_over_time((headway:wrong)[5m:1m]))",
    ):
        with pytest.raises(AssertionError):
            check(expression, page("headway"))


def test_the_dashboards_are_those_of_their_declarations() -> None:
    for path, text in dashboards.files().items():
        assert path.read_text(encoding="utf-8") == text, "run 'make docs'"


def test_the_table_of_metrics_is_that_of_the_declarations() -> None:
    assert metrics_table.PART.is_current(metrics_table.table()), "run 'make docs'"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_can_be_read(path: Path) -> None:
    """Grafana's own types take it; each panel says what it shows and in which unit; none covers another."""
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    assert Dashboard.from_json(dashboard).uid == path.stem
    shown = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert len({panel["title"] for panel in shown}) == len(shown) >= 20
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    for panel in panels(dashboard):
        assert panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


def test_grafana_finds_the_data_source_and_the_dashboards() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    [source] = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text(encoding="utf-8"))["datasources"]
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    assert [job["job_name"] for job in config["scrape_configs"]] == ["headway"], "the alerts' job"
    assert all((PROMETHEUS / name).exists() for name in config["rule_files"])


def test_every_alert_says_what_to_do_where_the_docs_explain_it() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    headings = {heading.lower() for heading in re.findall(r"^### (\w+)$", text, re.MULTILINE)}
    linked = set()
    for alert in alerts():
        path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert path == "docs/monitoring.md" and anchor in headings, alert["alert"]
        assert alert["alert"] in text
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["annotations"]["summary"].endswith(".") and alert["annotations"]["description"].endswith(".")
        linked.add(anchor)
    assert headings == linked, "a section without an alert"


def test_every_alert_has_a_drill_or_a_reason_and_a_test_of_its_times() -> None:
    names = {alert["alert"] for alert in alerts()}
    drilled = [name for scenario in SCENARIOS.values() for name in scenario.alerts]
    assert {*drilled} | NOT_DRILLED == names and len({*drilled}) == len(drilled)
    tests = (PROMETHEUS / "alerts_test.yml").read_text(encoding="utf-8")
    assert names == {*re.findall(r'alertname="(Headway\w+)"', tests)}


def test_options_that_the_alerts_name_exist() -> None:
    known = option_names() | {field.name for field in dataclasses.fields(ServerConfig)}
    for alert in alerts():
        for option in re.findall(r"--(?:no-)?([a-z-]+)", alert["annotations"]["description"]):
            assert option.replace("-", "_") in known, f"{alert['alert']}: --{option}"


def test_times_of_a_drill_are_shortened_and_nothing_else() -> None:
    rules = "expr: rate(a_5m[5m]) > 5 and b[1h]\nfor: 2m\nrecord: x:rate5m\n[30s]"
    assert shortened(rules, 30) == "expr: rate(a_5m[10s]) > 5 and b[120s]\nfor: 4s\nrecord: x:rate5m\n[5s]"


promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@promtool
@pytest.mark.parametrize(
    "arguments", [("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")], ids=" ".join
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
