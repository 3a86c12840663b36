"""The Grafana dashboard names metrics and labels that exist."""

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, files
from itertools import combinations
from pathlib import Path

import pytest

DASHBOARD = json.loads((Path(__file__).parents[2] / "grafana" / "irminsul.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
OF_SGLANG = {
    "sglang:time_to_first_token_seconds_bucket",
    "sglang:cache_hit_rate",
    "sglang:cached_tokens_total",
    "sglang:prompt_tokens_total",
}
# Of a process of its own: metrics register themselves once and for all.
LIST_METRICS = """
import json
from prometheus_client import REGISTRY
before = set(REGISTRY._collector_to_names)
from irminsul.sglang.accounting import Accounting
Accounting.make(None, enabled=True)
made = set(REGISTRY._collector_to_names) - before
print(json.dumps([(one._name, one._type, one._labelnames) for one in made]))
"""


@pytest.fixture(scope="module")
def metrics():
    """Labels of each metric that the plugin exports, by its name in Prometheus."""
    done = subprocess.run([sys.executable, "-c", LIST_METRICS], capture_output=True, text=True, check=True)
    return {name + suffix: set(labels) for name, kind, labels in json.loads(done.stdout) for suffix in SUFFIXES[kind]}


def metrics_in(expression):
    return set(re.findall(r"\b(?:irminsul_|sglang:)\w+", expression))


def test_every_expression_names_metrics_that_exist(metrics):
    for expression in EXPRESSIONS:
        named = metrics_in(expression)
        assert named
        assert named <= set(metrics) | OF_SGLANG, expression


def test_every_metric_of_the_plugin_has_a_panel(metrics):
    shown = set().union(*map(metrics_in, EXPRESSIONS))
    for name in metrics:
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        assert any(one.startswith(family) for one in shown), name


def test_labels_are_those_of_the_metric(metrics):
    for expression in EXPRESSIONS:
        (named, *_) = metrics_in(expression)
        if named in OF_SGLANG:
            continue
        selected = re.findall(r'(\w+)=~?"', expression)
        grouped = re.findall(r"by \((\w+)\)", expression)
        assert set(selected + grouped) <= metrics[named] | {"instance", "le"}, expression


def test_token_classes_are_those_that_are_counted():
    from irminsul.sglang.requests import TOKEN_CLASSES

    named = set(re.findall(r'token_class="(\w+)"', " ".join(EXPRESSIONS)))
    assert named == set(TOKEN_CLASSES)


def test_the_data_source_is_a_variable():
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    for panel in PANELS:
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for name in set(re.findall(r"\$(\w+)", " ".join(EXPRESSIONS))) - {"__rate_interval"}:
        assert name in variables


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for one, other in combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y


def test_expressions_are_balanced():
    for expression in EXPRESSIONS:
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression


def test_sglang_exports_its_metrics():
    try:
        installed = files("sglang")
    except PackageNotFoundError:
        pytest.skip("SGLang is not installed here")
    sources = "".join(path.read_text() for path in installed if path.match("sglang/srt/observability/*.py"))
    for name in OF_SGLANG:
        assert f'"{name.removesuffix("_bucket")}"' in sources
