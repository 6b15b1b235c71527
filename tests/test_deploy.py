"""What stands in deploy/ fits the code: metrics, alerts, their runbook, grace periods, commands; and a dump can be restored."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pulse_trio.doctor import JUDGED, ONLY_METRICS
from pulse_trio.doctor import RUNBOOK as ADDRESS
from pulse_trio.settings import WorkerSettings
from pulse_trio.worker.metrics.catalogue import METRICS

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
RUNBOOK = ROOT / "docs/how-to/runbook.md"
PAGES = ["runbook", "production", "docker", "kubernetes", "systemd", "monitoring", "upgrade", "backup", "failover"]
# With Python 3.13 the lock has the fork for free-threaded builds, under another name.
yaml: Any = importlib.import_module("yaml" if importlib.util.find_spec("yaml") else "yaml_ft")

SERIES: dict[str, tuple[str, ...]] = {}
for metric in METRICS:
    SERIES[metric.name] = metric.labels
    if metric.type == "histogram":
        for ending, more in (("_bucket", ("le",)), ("_sum", ()), ("_count", ())):
            SERIES[metric.name + ending] = (*metric.labels, *more)
OF_THE_SCRAPE = {"job", "instance"}


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"]
    return group["rules"]


def panels() -> list[dict[str, Any]]:
    return json.loads((DEPLOY / "grafana/pulse-trio.json").read_text())["panels"]


def expressions() -> list[tuple[str, str]]:
    """Every expression, with where it stands."""
    found = [(f"alert {rule['alert']}", rule["expr"]) for rule in alerts()]
    for panel in panels():
        found += [(f"panel {panel['title']}", target["expr"]) for target in panel.get("targets", ())]
    found += [
        (f"KEDA {trigger['metadata']['query'][:30]}", trigger["metadata"]["query"])
        for document in manifests("keda.yaml")
        for trigger in document["spec"]["triggers"]
    ]
    return found


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


@pytest.mark.parametrize(("where", "expression"), expressions(), ids=lambda value: str(value)[:40])
def test_every_metric_and_label_that_an_expression_names_exists(where: str, expression: str) -> None:
    used = re.findall(r"\b(pulse_\w+)(?:\{([^}]*)\})?", expression)
    assert used, where
    known: set[str] = set(OF_THE_SCRAPE)
    for name, selector in used:
        assert name in SERIES, f"{where}: no metric {name}"
        labels = set(re.findall(r"(\w+)\s*=", selector))
        assert labels <= {*SERIES[name]}, f"{where}: {name} has no label {labels - {*SERIES[name]}}"
        known |= {*SERIES[name]}
    for grouping in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {label.strip() for label in grouping.split(",")} <= known, where


def test_every_metric_is_on_the_dashboard() -> None:
    shown = " ".join(target["expr"] for panel in panels() for target in panel.get("targets", ()))
    missing = [m.name for m in METRICS if not re.search(rf"\b{m.name}(_bucket)?\b", shown)]
    # How many begin is how many end, a moment later.
    assert missing == ["pulse_jobs_started_total"]


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels():
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_every_alert_has_its_entry_in_the_runbook_and_every_entry_its_alert() -> None:
    entries = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert entries == [rule["alert"] for rule in alerts()]
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/how-to/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")
    for entry in RUNBOOK.read_text().split("\n## ")[1:]:
        assert [word for word in ("**Means**", "**Look**", "**Do**") if word not in entry] == [], entry.splitlines()[0]


def test_the_doctor_knows_each_alert_by_its_name_and_with_its_threshold_or_says_why_not() -> None:
    rules = {rule["alert"]: rule["expr"] for rule in alerts()}
    assert {*JUDGED} | {*ONLY_METRICS} == {*rules}
    assert not {*JUDGED} & {*ONLY_METRICS}
    for name, thresholds in JUDGED.items():
        assert tuple(float(number) for number in re.findall(r"> ([\d.]+)", rules[name])) == thresholds, name
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert f"{urls['Documentation']}/{RUNBOOK.relative_to(ROOT / 'docs')}" == ADDRESS


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize(
    "command", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")], ids=" ".join
)
def test_promtool_accepts_the_rules_and_sees_each_fire_for_what_it_is_for(command: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_tests_have_every_alert() -> None:
    tests = yaml.safe_load((DEPLOY / "prometheus/alerts_test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in alerts()}


def least_patience(grace: float, cleanup: float) -> float:
    return grace + cleanup + 5


def test_no_platform_kills_a_worker_before_its_jobs_have_had_their_grace() -> None:
    usual = WorkerSettings()
    least = least_patience(usual.grace, usual.cleanup)
    unit = (DEPLOY / "systemd/pulse-trio.service").read_text()
    assert float(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]) > least
    compose = yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text())
    assert float(compose["services"]["worker"]["stop_grace_period"].removesuffix("s")) > least
    deployment, _ = manifests("worker.yaml")
    pod = deployment["spec"]["template"]["spec"]
    args = pod["containers"][0]["args"]
    given = {name: float(args[args.index(name) + 1]) for name in ("--grace", "--cleanup")}
    assert pod["terminationGracePeriodSeconds"] > least_patience(given["--grace"], given["--cleanup"])


def test_the_manifests_fit_each_other_and_run_nothing_as_root() -> None:
    deployment, budget = manifests("worker.yaml")
    (migration,) = manifests("migrate.yaml")
    (scaled,) = manifests("keda.yaml")
    kinds = [(d["apiVersion"], d["kind"]) for d in (deployment, budget, migration, scaled)]
    assert kinds == [
        ("apps/v1", "Deployment"),
        ("policy/v1", "PodDisruptionBudget"),
        ("batch/v1", "Job"),
        ("keda.sh/v1alpha1", "ScaledObject"),
    ]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]
    for template in (deployment["spec"]["template"], migration["spec"]["template"]):
        assert template["spec"]["securityContext"]["runAsNonRoot"]
        (container,) = template["spec"]["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    (worker,) = deployment["spec"]["template"]["spec"]["containers"]
    (port,) = worker["ports"]
    assert worker["args"][worker["args"].index("--http") + 1].endswith(f":{port['containerPort']}")
    for probe, path in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert worker[probe]["httpGet"] == {"path": path, "port": port["name"]}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_knows_every_line_of_the_units(tmp_path: Path) -> None:
    for unit in (DEPLOY / "systemd").glob("*.service"):
        # The program is not installed here; everything else of the unit is checked.
        text = re.sub(r"^Exec(Start|Reload)=\S+", "Exec\\1=/bin/true", unit.read_text(), flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, tmp_path.glob("*.service"))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    mine = [line for line in done.stderr.splitlines() if "pulse-trio" in line]
    assert mine == []


def commands_of(page: str) -> list[str]:
    """The commands of pulse-trio that a page or a file of deploy/ tells its reader to run."""
    text = (ROOT / f"docs/how-to/{page}.md").read_text()
    return re.findall(r"(?:^\$ |^|`)pulse-trio ((?:[a-z]+ ?){1,2}[^`\n]*)", text, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_a_page_for_operators_names_exists_with_its_options(page: str) -> None:
    reference = (ROOT / "docs/reference/cli.md").read_text()
    sections = dict(re.findall(r"^## pulse-trio ([a-z ]+)$\n(.*?)(?=^## |\Z)", reference, re.MULTILINE | re.DOTALL))
    for command in commands_of(page):
        words = command.split()
        name = " ".join(words[:2]) if " ".join(words[:2]) in sections else words[0]
        assert name in sections, f"{page}: no command {command!r}"
        for option in re.findall(r"--[a-z][a-z-]+", command):
            assert option in sections[name], f"{page}: {name} has no {option}"
