"""What docs/ has for operators: the dashboard's queries, and the container of the Kubernetes example."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


def dashboard() -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "grafana.json").read_text())


def metrics_asked_for(prefix: str) -> set[str]:
    """The metrics with a prefix in all queries of the dashboard."""
    board = dashboard()
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"] for variable in board["templating"]["list"]]
    return {name for query in queries for name in re.findall(r"\w+:\w+", query) if name.startswith(f"{prefix}:")}


def kubernetes() -> dict[str, Any]:
    """The objects of the Kubernetes example, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((ROOT / "docs" / "kubernetes.yaml").read_text())}


def container() -> dict[str, Any]:
    """The only container of the Deployment."""
    (found,) = kubernetes()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found
