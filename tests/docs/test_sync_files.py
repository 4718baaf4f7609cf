"""The files of examples/sync: the configuration, the unit, the alert rules and the dashboard are valid."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import TOP
from upper.apps.lake.follow import LakeFollower
from upper.apps.lake.lake import Lake
from upper.apps.lake.schema import LakeLayout
from upper.apps.lake.service import Service
from upper.cli.sync_config import read_config
from upper.cli.verbs import load, parser_of
from upper.server import stats
from upper.server.metrics import NUMERIC

FILES = TOP / "examples" / "sync"
ALERTS = (FILES / "alerts.yml").read_text()
DASHBOARD: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt install prometheus)"
)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The metrics that a sync and a node export."""
    config = read_config(
        FILES / "sync.toml", {"USERS_LAKE_KEY": "k", "USERS_LAKE_SECRET": "s"}, read=lambda _: "password"
    )
    service = Service(config.workers)
    lake = Lake.create(tmp_path_factory.mktemp("lake"), LakeLayout("default", 4, 2))

    follower = service.add(lambda metrics: LakeFollower("upr://h/b", lake.root, config.lakes[0].settings))
    follower.lake = lake
    ours = set(re.findall(r"^(\w+)(?:\{.*?\})? ", service.page(), re.MULTILINE)) - {"#"}
    general = {f"upper_{row.name}" for row in (*stats.GENERAL, *stats.MEMORY, *stats.DISK)}
    return ours | general | {f"upper_consumer_{name}" for name in NUMERIC}


def used(expression: str) -> set[str]:
    return set(re.findall(r"\bupper_\w+", expression))


def test_the_configuration_is_accepted() -> None:
    environment = {"USERS_LAKE_KEY": "k", "USERS_LAKE_SECRET": "s"}
    config = read_config(FILES / "sync.toml", environment, read=lambda _: "password")
    assert [lake.name for lake in config.lakes] == ["orders", "users"]
    assert config.lakes[1].store.options["AWS_SECRET_ACCESS_KEY"] == "s"
    assert config.metrics_port == 9464


def test_the_unit_starts_a_sync_with_a_file() -> None:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(FILES / "upper-sync.service")
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    program, verb, *words = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, verb) == ("upper", "sync")
    args = parser_of("sync", load("sync")).parse_args(words)
    assert args.config == Path("/etc/upper/sync.toml")
    assert f'lake = "/var/lib/{unit["Service"]["StateDirectory"]}/' in (FILES / "sync.toml").read_text()


def test_alerts_and_dashboard_use_metrics_that_exist(names: set[str]) -> None:
    expressions = [*EXPRESSIONS, *re.findall(r"^ +expr: (.*)$", ALERTS, re.MULTILINE)]
    assert len(expressions) >= 20
    for expression in expressions:
        assert used(expression), expression
        assert used(expression) <= names, expression


def test_the_dashboard_has_what_grafana_requires() -> None:
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= set(DASHBOARD)
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert {variable["type"] for variable in variables.values()} <= {"datasource", "query"}
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        place = panel["gridPos"]
        own = {(x, y) for x in range(place["x"], place["x"] + place["w"])
               for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not own & cells, "two panels overlap"
        assert max(x for x, _ in own) < 24
        cells |= own
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {*variables, "__rate_interval"}


def _promtool(verb: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = ["promtool", verb, "rules", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@promtool
def test_promtool_accepts_the_rules_and_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = "groups:\n- name: panels\n  rules:\n"
    for number, expression in enumerate(EXPRESSIONS):
        text = expression.replace("$__rate_interval", "5m").replace("$lake", ".*")
        rules += f"  - record: panel_{number}\n    expr: {json.dumps(text)}\n"
    (panels := tmp_path / "panels.yml").write_text(rules)
    for path in (FILES / "alerts.yml", panels):
        done = _promtool("check", path)
        assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_alerts_fire_when_a_lake_is_not_followed_and_when_changes_are_lost(tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text(ALERTS)
    (test := tmp_path / "test.yml").write_text("""
rule_files: [alerts.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'upper_sync_up{lake="a"}', values: '1 0x20'}
      - {series: 'upper_sync_up{lake="b"}', values: '1x20'}
      - {series: 'upper_sync_lag_seconds{lake="a"}', values: '1+60x20'}
      - {series: 'upper_sync_lost_rows_total{lake="b"}', values: '0x5 7x15'}
    alert_rule_test:
      - eval_time: 3m
        alertname: LakeNotFollowed
      - eval_time: 10m
        alertname: LakeNotFollowed
        exp_alerts:
          - exp_labels: {severity: page, lake: a}
            exp_annotations:
              summary: "The lake a has not been followed for 5 minutes"
              description: "The log of the service and its /health page have the reason."
      - eval_time: 15m
        alertname: LakeBehind
        exp_alerts:
          - exp_labels: {severity: warn, lake: a}
            exp_annotations:
              summary: "The lake a is 15m 1s behind its bucket"
              description: "Rounds fail, or take long: compare with the duration of commits."
      - eval_time: 10m
        alertname: LakeRolledBack
        exp_alerts:
          - exp_labels: {severity: warn, lake: b}
            exp_annotations:
              summary: "A failover took changes back from the lake b"
              description: "`upper lake LAKE --rollbacks` lists them; the table `lost` has the rows."
""")
    done = _promtool("test", test)
    assert done.returncode == 0, done.stdout + done.stderr
