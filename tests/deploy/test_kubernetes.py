"""The manifests: valid by Kubernetes' own schemas, and in step with our image, paths, flags and times."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile import parse as parse_dockerfile
from fake_server import FakeServer

from slipstream.cli import build_parser, server_config
from slipstream.commands.configuration import parse
from slipstream.server.http.lifecycle import CLOSE_SECONDS
from slipstream.server.service.settings import ServerConfig

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
IMAGE = parse_dockerfile((ROOT / "Dockerfile").read_text())
VARIANTS = ("cpu", "gpu")
KUBECTL = shutil.which("kubectl")
NAMES_OF_ITS_SERVICE = [f"slipstream-api{rest}" for rest in ("", ".prod", ".prod.svc", ".prod.svc.cluster.local")]


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """What `kubectl kustomize` prints, for what ours use of it."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(kustomization) <= {"apiVersion", "kind", "resources", "patches"}
    found: list[dict[str, Any]] = []
    for name in kustomization["resources"]:
        path = folder / name
        found += kustomized(path.resolve()) if path.is_dir() else yaml.safe_load_all(path.read_text())
    found = copy.deepcopy(found)  # anchors of the file are one object
    for patch in kustomization.get("patches", []):
        target = patch["target"]
        [one] = [each for each in found if (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])]
        for operation in yaml.safe_load(patch["patch"]):
            apply(one, **operation)
    return found


def apply(document: Any, op: str, path: str, value: Any) -> None:
    """One operation of a JSON patch (RFC 6902)."""
    *above, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
    for part in above:
        document = document[int(part) if isinstance(document, list) else part]
    assert op == "add" or (op == "replace" and last in document), f"nothing to replace at {path}"
    document[last] = value


@pytest.fixture(params=VARIANTS)
def resources(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in kustomized(FOLDER / request.param)}


def pod_of(resources: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return dict(resources["Deployment"]["spec"]["template"]["spec"])


def container_of(resources: dict[str, dict[str, Any]]) -> dict[str, Any]:
    [container] = pod_of(resources)["containers"]
    return dict(container)


def variables(container: dict[str, Any]) -> dict[str, str]:
    """As the container gets them: references to others filled in."""
    found: dict[str, str] = {}
    from_elsewhere = {"SLIPSTREAM_API_KEY": "the-key", "NAMESPACE": "prod"}
    for each in container["env"]:
        value = each.get("value", from_elsewhere.get(each["name"], ""))
        found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], value)
    return found


@pytest.fixture
def config(resources: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> ServerConfig:
    """What our command line makes of the image's and the pod's settings."""
    container = container_of(resources)
    target = container["image"].rpartition(":")[2]
    image = IMAGE.settings(target)
    given = image.environment | variables(container)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    args = parse(build_parser(), [*image.entrypoint[1:], *container["args"]])
    unknown = {name for name in given if name.startswith("SLIPSTREAM_")} - known_variables()
    assert not unknown, f"no flag has {unknown}"
    return server_config(args)


def known_variables() -> set[str]:
    return set(re.findall(r"\bSLIPSTREAM_\w+", (ROOT / "docs" / "configuration.md").read_text()))


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
@pytest.mark.parametrize("variant", VARIANTS)
def test_kubectl_makes_the_same_of_it(variant: str) -> None:
    assert KUBECTL is not None
    made = subprocess.run([KUBECTL, "kustomize", str(FOLDER / variant)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    theirs = {each["kind"]: each for each in yaml.safe_load_all(made.stdout)}
    assert theirs == {each["kind"]: each for each in kustomized(FOLDER / variant)}


def test_the_schemas_of_kubernetes(resources: dict[str, dict[str, Any]]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    assert set(resources) == {"PersistentVolumeClaim", "Deployment", "Service"}
    for each in resources.values():
        validator.validate(each, validator.latest_version(), strict=True)


def test_the_schemas_find_mistakes(resources: dict[str, dict[str, Any]]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    container_of(resources)["livenessProbe"]["periodSecond"] = 1
    with pytest.raises(validator.ValidationError):
        validator.validate(resources["Deployment"], validator.latest_version(), strict=True)


def test_settings_are_ours_and_the_port_is_one(resources: dict[str, dict[str, Any]], config: ServerConfig) -> None:
    container = container_of(resources)
    assert config.api_keys == ("the-key",)
    assert config.host == "0.0.0.0"
    [port] = container["ports"]
    assert port["containerPort"] == config.port
    [service_port] = resources["Service"]["spec"]["ports"]
    assert (service_port["port"], service_port["targetPort"]) == (config.port, port["name"])
    notes = resources["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(config.port)
    assert pod_of(resources)["enableServiceLinks"] is False, "a service named slipstream would set SLIPSTREAM_PORT"


def test_probes_and_clients_get_in(resources: dict[str, dict[str, Any]], config: ServerConfig) -> None:
    """A prober has an address and no key; clients use the names of the service."""
    container = container_of(resources)
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/ready",
        "readiness": "/ready",
        "liveness": "/health",
    }
    assert {probe["port"] for probe in probes.values()} == {"http"}
    notes = resources["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    own = ServerConfig(port=0, api_keys=config.api_keys, allowed_hosts=config.allowed_hosts)
    with FakeServer(config=own) as server:
        for probe in probes.values():
            assert server.get(probe["path"], host="10.1.2.3:8000").status_code == 200
        for name in NAMES_OF_ITS_SERVICE:
            headers = {"host": f"{name}:8000", "authorization": "Bearer the-key"}
            assert server.get("/v1/models", **headers).status_code == 200
            assert server.get(notes["prometheus.io/path"], **headers).status_code == 200
        assert server.get("/v1/models", host="slipstream-api.other", authorization="Bearer the-key").status_code == 403


def test_the_service_finds_the_pods(resources: dict[str, dict[str, Any]]) -> None:
    spec = resources["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"].items()
    assert spec["selector"]["matchLabels"].items() <= labels
    assert resources["Service"]["spec"]["selector"].items() <= labels
    assert NAMES_OF_ITS_SERVICE[0] == resources["Service"]["metadata"]["name"]


def test_there_is_time_to_drain(resources: dict[str, dict[str, Any]], config: ServerConfig) -> None:
    program, seconds = container_of(resources)["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    needed = float(seconds) + config.drain_seconds + CLOSE_SECONDS + 5
    assert pod_of(resources)["terminationGracePeriodSeconds"] >= needed


def test_it_runs_as_the_user_of_the_image_and_writes_to_volumes_only(resources: dict[str, dict[str, Any]]) -> None:
    pod, container = pod_of(resources), container_of(resources)
    image = IMAGE.settings(container["image"].rpartition(":")[2])
    who = pod["securityContext"]
    assert f"{who['runAsUser']}:{who['runAsGroup']}" == image.user
    assert who["fsGroup"] == who["runAsGroup"]
    assert who["runAsNonRoot"] is container["securityContext"]["readOnlyRootFilesystem"] is True
    places = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(places) == {*image.volumes, "/tmp"}
    assert set(places.values()) == {volume["name"] for volume in pod["volumes"]}
    [claim] = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert claim == resources["PersistentVolumeClaim"]["metadata"]["name"]


def test_a_gpu_is_asked_for_where_the_image_needs_one(resources: dict[str, dict[str, Any]]) -> None:
    container = container_of(resources)
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == container["image"].endswith(":cuda")
