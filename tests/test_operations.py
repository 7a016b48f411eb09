"""What operators copy and read: dashboard, Dockerfiles, Kubernetes example, notes. They are held against the package.

The engines' tests hold them against running servers: every metric of the dashboard is exported there, and vLLM's parser
takes the flags of the Kubernetes example.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import typer
from operations_files import ROOT, container, dashboard, kubernetes, metrics_asked_for
from packaging.requirements import Requirement

from kvfold.artifact import SCHEMA
from kvfold.artifact.metadata import valid
from kvfold.cli import app
from kvfold.recipes import parse

IMAGES = {"vllm": "vllm/vllm-openai", "sglang": "lmsysorg/sglang"}


def gauges() -> set[str]:
    """The names in the source of the gauges. Its module needs prometheus_client, which only engines bring."""
    tree = ast.parse((ROOT / "src" / "kvfold" / "engines" / "gauges.py").read_text())
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    words = {node.value for each in assignments for node in ast.walk(each) if isinstance(node, ast.Constant)}
    return {f"kvfold:{word}" for word in words if isinstance(word, str) and re.fullmatch(r"[a-z]+(_[a-z]+)*", word)}


def test_the_dashboard_asks_for_all_gauges():
    assert metrics_asked_for("kvfold") == gauges() - {"kvfold:mostrecent", "kvfold:max"}


def test_the_dashboard_is_one_that_grafana_can_read():
    board = dashboard()
    assert board["title"] == "kvfold"
    assert isinstance(board["schemaVersion"], int)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables
            assert target["expr"].count("(") == target["expr"].count(")")
            assert target["expr"].count('{instance=~"$instance"}') == len(re.findall(r"\w+:\w+", target["expr"]))


def dockerfile(engine: str) -> dict[str, list[str]]:
    """The instructions of a Dockerfile, by name."""
    instructions: dict[str, list[str]] = {}
    for line in (ROOT / "docker" / f"{engine}.Dockerfile").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            instructions.setdefault(name, []).append(rest)
    return instructions


def served_by(arguments: list[str]) -> typer.Context:
    """What `kvfold serve` makes of its arguments."""
    command = typer.main.get_command(app).commands["serve"]
    return command.make_context("serve", list(arguments))


@pytest.mark.parametrize("engine", IMAGES)
def test_dockerfiles_start_from_the_engine_that_the_extra_asks_for(engine):
    (base,) = dockerfile(engine)["FROM"]
    image, tag = base.split(":v")
    assert image == IMAGES[engine]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (asked,) = [each for each in map(Requirement, extras[engine]) if each.name == engine]
    assert asked.specifier.contains(tag)
    (install,) = dockerfile(engine)["RUN"]
    assert f'"/opt/kvfold[{engine}]"' in install


@pytest.mark.parametrize("engine", IMAGES)
def test_dockerfiles_run_the_command_that_serves_with_the_engine(engine):
    kvfold, serve, *given = json.loads(dockerfile(engine)["ENTRYPOINT"][0])
    assert (kvfold, serve) == ("kvfold", "serve")
    context = served_by([*given, "some/model", "--recipe", "saw-int4", "--port", "8000"])
    assert context.params["engine"] == engine
    assert context.args == ["--port", "8000"]


@pytest.mark.parametrize("engine", IMAGES)
def test_what_dockerfiles_copy_is_enough_to_build_the_package(engine, tmp_path):
    for line in dockerfile(engine)["COPY"]:
        *sources, target = line.split()
        folder = tmp_path / Path(target).relative_to("/opt/kvfold")
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                folder.mkdir(exist_ok=True)
                shutil.copy(ROOT / source, folder)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", "dist"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    packed = set(ZipFile(wheel).namelist())
    assert {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "kvfold").rglob("*.py")} <= packed
    assert any(name.endswith("entry_points.txt") for name in packed), "engines find the plugin by it"


def test_kubernetes_objects_name_each_other():
    objects = kubernetes()
    pod = objects["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert objects["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert objects["Service"]["spec"]["selector"] == labels
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert {port["targetPort"] for port in objects["Service"]["spec"]["ports"]} <= ports.keys()
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    claim = objects["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == claim
    caches = dict(each.split("=") for each in dockerfile("vllm")["ENV"][0].split())
    assert {"HF_HOME", "KVFOLD_CACHE"} <= caches.keys()
    assert all(path.startswith(f"{mounts['data']}/") for path in caches.values()), "models and artifacts stay"


def test_kubernetes_probes_ask_the_port_and_path_that_the_server_has():
    flags = dict(flag.split("=") for flag in container()["args"][1:])
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    scraped = kubernetes()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert flags["--host"] == "0.0.0.0", "the kubelet asks from outside"
    assert scraped["prometheus.io/path"] == "/metrics"
    assert int(scraped["prometheus.io/port"]) == int(flags["--port"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container()[probe]["httpGet"]
        assert asked["path"] == "/health"  # tests of the engines wait for it, too
        assert ports[asked["port"]] == int(flags["--port"])
    assert container()["image"].rpartition("/")[2].startswith("kvfold-vllm:")


def test_kubernetes_arguments_are_those_of_the_command():
    entry = json.loads(dockerfile("vllm")["ENTRYPOINT"][0])[2:]
    context = served_by([*entry, *container()["args"]])
    assert context.params["engine"] == "vllm"
    parse(context.params["recipe"])
    given = [flag.partition("=")[0] for flag in context.args]
    assert given == ["--host", "--port", "--max-model-len", "--max-num-seqs"]


def test_the_upgrade_note_quotes_the_message_of_an_older_artifact():
    older = {"schema_version": 4, "recipes": ["oscar-int2"]}
    with pytest.raises(ValueError, match="another kvfold") as caught:
        valid(json.dumps(older).encode(), Path("fits/kvfold.json"))
    note = (ROOT / "docs" / "upgrade.md").read_text()
    assert str(caught.value) in note
    assert f"writes and reads {SCHEMA}." in note
