"""Deployment files agree with the daemon: every metric they ask for exists, every flag is known."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from msgspec.structs import replace

from engine.api import StepResults
from server.serving.metrics import ServerMetrics
from server.settings.flags import parse_flags
from server.settings.settings import Serve
from tests.deploy.debian import unpacked
from tests.server.step_results import counted_pass, facts, outcome, stats

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def exported() -> str:
    """The text exposition after one speculative step and one answer."""
    metrics = ServerMetrics("m", compat=True)
    metrics.ready(facts(drafter="model", rules={}))
    speculated = replace(outcome(2, 1), gap=0.01)
    metrics.take(speculated)
    metrics.step(StepResults([speculated], replace(stats(), num_preemptions=1)))
    metrics.watch_engine(os.getpid)
    metrics.start([3])
    metrics.tokens(2, 0.1, 0.1)
    metrics.finish(
        "stop", 2, {"e2e": 0.1, "queue": 0.1, "prefill": 0.1, "decode": 0.1, "tpot": 0.1}, counted_pass(2, 1.5)
    )
    metrics.end_call([2])
    metrics.error(503, "queue_full")
    return metrics.render().decode()


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:polydraft|process)_\w+", expression))


def test_every_metric_on_the_dashboard_is_exported(exported: str) -> None:
    dashboard = json.loads((DEPLOY / "grafana/dashboards/polydraft.json").read_text())
    titles = " ".join(panel["title"] for panel in dashboard["panels"])
    assert "Acceptance" in titles
    assert "Speedup" in titles
    for panel in dashboard["panels"]:
        assert panel["type"] == "row" or len(panel["description"]) > 40, panel["title"]
        assert panel["type"] == "row" or panel["fieldConfig"]["defaults"]["noValue"], "an empty panel says why"
        for target in panel.get("targets", []):
            may_divide_by_zero = re.search(r"/|histogram_quantile", target["expr"])
            assert not may_divide_by_zero or re.search(r"\) >= (0|-1)$", target["expr"]), "NaN would look like nothing"
            wanted = names_in(target["expr"])
            assert wanted
            for name in wanted:
                assert re.search(rf"^{name}[{{ ]", exported, re.MULTILINE), f"{panel['title']}: {name} is not exported"


def test_every_metric_of_an_alert_is_exported(exported: str) -> None:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    for rule in groups[0]["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        for name in names_in(rule["expr"]):
            assert re.search(rf"^{name}{{", exported, re.MULTILINE), f"{rule['alert']}: {name} is not exported"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_the_systemd_unit_is_valid(tmp_path: Path) -> None:
    unit = (DEPLOY / "polydraft.service").read_text()
    (command,) = re.findall(r"^ExecStart=(\S+) serve (.*)$", unit, re.MULTILINE)
    parse_flags(command[1].split())
    copy = tmp_path / "polydraft.service"
    copy.write_text(unit.replace(command[0], sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


@pytest.mark.slow  # the schema may have to be fetched
@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_files_fit_the_specification(name: str) -> None:
    """Debian's docker-compose is older than the project's `name`."""
    schema = next(unpacked("docker-compose").rglob("compose_spec.json"))
    written = yaml.safe_load((DEPLOY / name).read_text())
    written.pop("name", None)
    jsonschema.validate(written, json.loads(schema.read_text()))


def test_compose_mounts_files_that_exist() -> None:
    whole = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = whole["services"]
    assert {"polydraft", "prometheus", "grafana"} == set(services)
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in whole["volumes"] or (DEPLOY / source).exists(), volume
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == ["polydraft:8000"]


def test_compiled_kernels_survive_a_container() -> None:
    """Triton would write them to the home folder, Numba to `.cache` there."""
    (volume,) = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["polydraft"]["volumes"]
    folder = volume.split(":")[1]
    (triton,) = re.findall(r"TRITON_CACHE_DIR=(\S+)", (ROOT / "Dockerfile").read_text())
    assert triton.startswith(f"{folder}/")


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_sets_known_settings_and_arguments(name: str) -> None:
    daemon = yaml.safe_load((DEPLOY / name).read_text())["services"]["polydraft"]
    settings = {one.removeprefix("POLYDRAFT_").lower() for one in daemon["environment"]} - {"hf_token"}
    assert settings <= set(Serve.model_fields)
    assert set(daemon["build"]["args"]) <= set(
        re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    )


@pytest.mark.slow
def test_the_dockerfile_has_no_faults_that_a_linter_knows() -> None:
    run = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def test_dockerfile_copies_what_exists_and_sets_known_settings() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copied: list[str] = []
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in line.split():
            paths = [str(path.relative_to(ROOT)) for path in ROOT.glob(source)]
            assert paths, source
            copied += paths
    assert {"engine", "server", "deploy/ray_app.py", "deploy/ray_router.py"} <= set(copied)
    for setting in re.findall(r"POLYDRAFT_(\w+)=", text):
        assert setting.lower() in Serve.model_fields
    assert "USER 10001" in text
    assert 'ENTRYPOINT ["polydraft", "serve"]' in text


def test_edits_of_the_source_keep_the_dependencies_of_the_image() -> None:
    """They are installed before any source is there."""
    steps = (ROOT / "Dockerfile").read_text().replace("\\\n", "").split("\nRUN ")
    installs = [step for step in steps if "pip install" in step]
    assert len(installs) == 2
    dependencies, source = (step.splitlines()[0].split("pip install")[1:] for step in installs)
    assert '--index-url "$TORCH_INDEX_URL" --no-deps -c constraints.txt torch' in dependencies[0]
    assert dependencies[1].strip() == '-c constraints.txt ".${EXTRAS:+[$EXTRAS]}"'
    assert [part.split() for part in source] == [["--no-deps", "--force-reinstall", "."]]
    assert "COPY engine" in installs[0]
    built = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["polydraft"]["build"]
    assert built["args"] == {"TORCH_INDEX_URL": "${TORCH_INDEX_URL:-}"}
