"""The Grafana dashboard and the alert rules: every series they name is one that the daemon really has, and is used as its kind asks."""
import json
import os
import re
import shutil
import subprocess

import httpx
import pytest

from daemon import ROOT, SLOW, Daemon

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (tests/deploy/requirements.txt)")
promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed (tests/deploy/requirements.txt)")
DEPLOY = os.path.join(ROOT, "deploy")
RULES = os.path.join(DEPLOY, "prometheus", "alerts.yaml")
TARGET_LABELS = {"instance", "job"}  # what Prometheus adds to each series
promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (Debian: prometheus)")


def dashboard():
    with open(os.path.join(DEPLOY, "grafana", "kvasir.json")) as f:
        return json.load(f)


def expressions():
    """(where, expression), with Grafana's variables replaced by what they may stand for."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*").replace("$instance", ".*")
    with open(RULES) as f:
        for group in yaml.safe_load(f)["groups"]:
            for rule in group["rules"]:
                yield rule["alert"], rule["expr"]


def walk(node, inside=()):
    """Every selector of an expression with the functions and groupings that it stands in, the innermost first."""
    if isinstance(node, promql.VectorSelector):
        yield node, inside
    elif isinstance(node, promql.MatrixSelector):
        yield node.vector_selector, inside
    elif isinstance(node, promql.Call):
        for arg in node.args:
            yield from walk(arg, (node.func.name, *inside))
    elif isinstance(node, promql.AggregateExpr):
        labels = tuple(node.modifier.labels) if node.modifier else ()
        yield from walk(node.expr, (("by", labels), *inside))
    elif isinstance(node, promql.BinaryExpr):
        yield from walk(node.lhs, inside)
        yield from walk(node.rhs, inside)
    elif isinstance(node, (promql.ParenExpr, promql.UnaryExpr, promql.SubqueryExpr)):
        yield from walk(node.expr, inside)
    else:
        assert isinstance(node, (promql.NumberLiteral, promql.StringLiteral)), node


def parse_metrics(text):
    """{series name: (type, labels)}; a histogram's three names are three series."""
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M))
    series = {}
    for name, labels in re.findall(r"^([a-zA-Z0-9_:]+)\{([^}]*)\} \S+$", text, re.M):
        family = name if name in types else re.sub(r"_(bucket|sum|count)$", "", name)
        known = series.setdefault(name, (types[family], set()))
        known[1].update(re.findall(r'(\w+)="', labels))
    return series


@pytest.fixture(scope="module")
def metrics_text():
    """Of a daemon that has all of them: keys and a tier as well."""
    keys = json.dumps({"keys": [{"name": "ann", "key": "sk-ann"}, {"name": "ops", "key": "sk-ops", "admin": True}]})
    with Daemon("--kv-memory", "64M", "--kv-ram", "64M", "--api-keys", keys, key="sk-ops") as d:
        body = {"prompt": "x", "max_tokens": 4}
        httpx.post(d.url + "/v1/completions", json=body, headers=d.headers, timeout=60 * SLOW).raise_for_status()
        text = httpx.get(d.url + "/metrics", headers=d.headers).text
    assert "kvasir:key_requests_total{" in text and "kvasir:tier_pages{" in text
    return text


@pytest.mark.needs_model
@pytest.mark.parametrize("where,expression", list(expressions()))
def test_an_expression_names_what_the_daemon_has(metrics_text, where, expression):
    series = parse_metrics(metrics_text)
    found = list(walk(promql.parse(expression)))
    assert found
    for selector, inside in found:
        assert selector.name in series, f"/metrics has no {selector.name}"
        kind, labels = series[selector.name]
        known = labels | TARGET_LABELS
        assert {m.name for m in selector.matchers.matchers} <= known, selector.name
        groupings = [set(g[1]) for g in inside if isinstance(g, tuple)]
        functions = [f for f in inside if isinstance(f, str)]
        assert all(g <= known for g in groupings), (selector.name, groupings)
        if kind == "gauge":
            assert not {"rate", "increase", "irate"} & set(functions), f"{selector.name} is a gauge"
        else:
            assert functions and functions[0] in ("rate", "increase"), f"{selector.name} only ever grows"
        if selector.name.endswith("_bucket"):
            assert "histogram_quantile" in functions and any("le" in g for g in groupings)


def test_the_dashboard_is_one_that_grafana_takes():
    d = dashboard()
    assert d["uid"] and d["title"] and d["schemaVersion"] >= 36 and d.get("id") is None
    ids = [p["id"] for p in d["panels"]]
    assert len(ids) == len(set(ids))
    variables = {v["name"] for v in d["templating"]["list"]}
    assert {"datasource", "model", "instance"} <= variables
    cells = set()
    for p in d["panels"]:
        g = p["gridPos"]
        assert g["x"] + g["w"] <= 24
        mine = {(x, y) for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])}
        assert not mine & cells, f"{p['title']} overlaps another panel"
        cells |= mine
        if p["type"] == "row":
            continue
        assert p["targets"] and p["description"]
        assert len({t["refId"] for t in p["targets"]}) == len(p["targets"])
        for t in [p, *p["targets"]]:
            assert t["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        used = set(re.findall(r"\$(\w+)", " ".join(t["expr"] for t in p["targets"])))
        assert used <= variables | {"__rate_interval"}


def test_what_an_operator_must_see_is_there():
    names = {s.name for _, e in expressions() for s, _ in walk(promql.parse(e))}
    for name in ("vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
                 "vllm:e2e_request_latency_seconds_bucket", "vllm:request_queue_time_seconds_bucket", "vllm:num_requests_waiting",
                 "kvasir:kv_fragmentation_ratio", "kvasir:kv_fragmentation_alarm", "kvasir:prefix_evictions_total"):
        assert name in names
    assert any("0.99" in e for _, e in expressions())


def test_every_alert_says_what_to_do():
    with open(RULES) as f:
        rules = [r for g in yaml.safe_load(f)["groups"] for r in g["rules"]]
    assert len({r["alert"] for r in rules}) == len(rules)
    for r in rules:
        assert set(r) == {"alert", "expr", "for", "labels", "annotations"}
        assert set(r["annotations"]) == {"summary", "description"} and r["labels"]["severity"] in ("page", "warn")


@promtool
def test_promtool_takes_the_rules_and_they_fire_when_they_should():
    for command in (["check", "rules", RULES], ["test", "rules", os.path.join(DEPLOY, "prometheus", "alerts_test.yaml")]):
        r = subprocess.run(["promtool", *command], capture_output=True, text=True)
        assert r.returncode == 0, r.stdout + r.stderr


@promtool
@pytest.mark.needs_model
def test_promtool_reads_the_metrics(metrics_text):
    """Its remarks on style are not errors: vLLM's names have colons, and the size of the pool is called a total."""
    r = subprocess.run(["promtool", "check", "metrics"], input=metrics_text, capture_output=True, text=True)
    remarks = [line for line in r.stderr.splitlines() if line and "should not contain ':'" not in line
               and not line.startswith("kvasir:kv_pages_total ")]
    assert r.returncode in (0, 3) and not remarks, remarks
