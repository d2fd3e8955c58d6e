"""The expressions in the files of deploy/prometheus and deploy/grafana, and the metrics and labels that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
CONFIG = DEPLOY / "prometheus" / "prometheus.yml"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "slipstream.json").read_text())
METRIC = re.compile(r"\b(?:vllm:|slipstream_|process_)\w+")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def alerts() -> dict[str, dict[str, Any]]:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def selected_labels(query: str) -> list[tuple[str, str]]:
    """(metric, label) of every selector."""
    selectors = re.findall(rf"({METRIC.pattern})\{{([^}}]*)\}}", query)
    return [(metric, label) for metric, inside in selectors for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)]


def grouped_labels(query: str) -> set[str]:
    return {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(",")}
