"""Kubernetes manifests: overlays, schemas, selectors and flags."""

from __future__ import annotations

import copy
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Literal

import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from ray.serve.schema import ServeDeploySchema

from deploy.ray_app import Options
from server.settings.settings import Serve

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
VERSION = "1.32"
# Resources of operators, whose schemas come with them.
OF_OPERATORS = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}
# Where others than the daemon write.
FOLDERS = {"hf_home", "numba_cache_dir", "triton_cache_dir"}
LABELS = {"app.kubernetes.io/name": "polydraft"}


@cache
def rendered(overlay: str) -> dict[str, Any]:
    """The resources of an overlay by kind; skips where there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl on the path, which renders overlays")
    command = [kubectl, "kustomize", str(FOLDER / "overlays" / overlay)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert not run.stderr, run.stderr
    resources = list(yaml.safe_load_all(run.stdout))
    assert len({one["kind"] for one in resources}) == len(resources)
    return {one["kind"]: one for one in resources}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_resource_fits_its_schema(overlay: str) -> None:
    for kind, resource in rendered(overlay).items():
        if kind not in OF_OPERATORS:
            kubernetes_validate.validate(resource, VERSION, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_find_the_pods(overlay: str) -> None:
    """Selectors match no other pods of the namespace; clients need not be among them."""
    objects = rendered(overlay)
    deployment = objects["Deployment"]["spec"]
    assert deployment["template"]["metadata"]["labels"] == LABELS
    assert deployment["selector"]["matchLabels"] == LABELS
    assert objects["Service"]["spec"]["selector"] == LABELS
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == LABELS
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == LABELS
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == {"polydraft-client": "true"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_daemon_takes_its_arguments(overlay: str) -> None:
    """Every flag is known, pods outlive the drain, and nothing is written where it cannot be."""
    pod = rendered(overlay)["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = " ".join(container["args"]).replace("=", " ").split()
    flags = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    assert flags <= set(Serve.model_fields)
    _, waits_s = container["lifecycle"]["preStop"]["exec"]["command"]
    drains_s = float(words[words.index("--shutdown-timeout") + 1])
    assert float(waits_s) + drains_s < pod["terminationGracePeriodSeconds"]
    values = {one["name"]: one.get("value", "") for one in container["env"]}
    own = {name.removeprefix("POLYDRAFT_").lower() for name in values} - FOLDERS - {"hf_token"}
    assert own <= set(Serve.model_fields)
    assert all(values[name.upper()].startswith("/cache/") for name in FOLDERS)
    assert pod["enableServiceLinks"] is False, "a Service's variable POLYDRAFT_PORT would be read as --port"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {"/cache", "/tmp"} <= set(mounts.values())
    probes = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")]
    assert probes == ["/health", "/health", "/ready"]


def test_the_autoscaler_counts_waiting_requests_and_alone_says_how_many() -> None:
    objects = rendered("autoscaled")
    assert "replicas" not in objects["Deployment"]["spec"]
    (metric,) = objects["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "polydraft_num_requests_waiting"
    assert (
        objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
        == objects["Deployment"]["metadata"]["name"]
    )
    assert objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"] == LABELS
    ports = {port["name"] for port in objects["Service"]["spec"]["ports"]}
    assert objects["ServiceMonitor"]["spec"]["endpoints"][0]["port"] in ports


def test_keda_counts_waiting_requests_and_pods_share_the_weights() -> None:
    objects = rendered("keda")
    deployment = objects["Deployment"]
    assert "replicas" not in deployment["spec"]
    scaled = objects["ScaledObject"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert scaled["minReplicaCount"] == 1
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"]["query"] == "sum(polydraft_num_requests_waiting)"
    claim = objects["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    pod = deployment["spec"]["template"]["spec"]
    claims = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pod["volumes"]}
    assert claims["weights"] == {"claimName": claim["metadata"]["name"]}
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert mounts["weights"] == values["HF_HOME"]


def test_the_operators_alerts_are_those_of_prometheus() -> None:
    alerts = yaml.safe_load((FOLDER.parent / "prometheus/alerts.yml").read_text())
    assert rendered("autoscaled")["PrometheusRule"]["spec"] == alerts


class Strict(BaseModel):
    """Model with KubeRay's fields and types (ray-operator/apis/ray/v1) and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: dict[str, Any]
    serviceType: str = ""
    enableIngress: bool = False


class WorkerGroup(Strict):
    groupName: str
    minReplicas: int
    maxReplicas: int
    rayStartParams: dict[str, str]
    template: dict[str, Any]
    replicas: int = 0
    numOfHosts: int = 1


class RayCluster(Strict):
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup] = []
    rayVersion: str = ""
    enableInTreeAutoscaling: bool = False
    suspend: bool = False


class RayServiceSpec(Strict):
    serveConfigV2: str
    rayClusterConfig: RayCluster


class RayService(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: dict[str, Any]
    spec: RayServiceSpec


def test_a_ray_service_with_a_wrong_field_or_type_is_refused() -> None:
    service = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())
    RayService.model_validate(service)
    for group, name, value in (
        ("headGroupSpec", "rayStartParams", {"num-cpus": 0}),
        ("headGroupSpec", "rayStartParam", {}),
        ("headGroupSpec", "template", None),
    ):
        wrong = copy.deepcopy(service)
        wrong["spec"]["rayClusterConfig"][group][name] = value
        with pytest.raises(ValidationError):
            RayService.model_validate(wrong)


def test_ray_takes_its_service() -> None:
    """KubeRay's types, Ray's own schema, our options, and Kubernetes' for its pods."""
    service = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())
    RayService.model_validate(service)
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"])).applications
    assert application.import_path == "deploy.ray_app:build"
    options = Options.model_validate(application.args)
    flags = {word[2:].replace("-", "_") for word in options.arguments if word.startswith("--")}
    assert flags <= set(Serve.model_fields)
    cluster = service["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], workers):
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": group["template"]}
        kubernetes_validate.validate(template, VERSION, strict=True)
        assert group["template"]["spec"]["enableServiceLinks"] is False
    cores = int(workers["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"])
    assert options.num_cpus <= cores
    assert workers["maxReplicas"] >= options.max_replicas
