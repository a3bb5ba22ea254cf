"""serving/deploy: what can be held against a linter, a schema or the real server here. No container engine ran it."""

import copy
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from conftest import Line
from test_server import bind_problem, wait_until

from bertship import health
from bertship.health import Endpoint
from serving import control, environment, supervisor
from serving.environment import PROJECT

DEPLOY = PROJECT / "serving" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VERSIONS = ("1.30", "1.33", "1.35")
sys.path.insert(0, str(DEPLOY))

import start  # noqa: E402


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def merged(base: Any, patch: Any) -> Any:
    """A strategic merge as kustomize does it, for what the overlays use: lists of named things merge by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: merged(base[key], value) if key in base else value for key, value in patch.items()}
    if isinstance(base, list) and isinstance(patch, list) and all(isinstance(i, dict) for i in (*base, *patch)):
        key = "name" if all("name" in item for item in (*base, *patch)) else "mountPath"
        if not all(key in item for item in (*base, *patch)):
            return patch
        new = {item[key]: item for item in patch}
        kept = [merged(item, new.pop(item[key])) if item[key] in new else item for item in base]
        return kept + list(new.values())
    return patch


def rendered(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What kustomize makes of a folder, labels and images included, for what the files here use of it."""
    (recipe,) = documents(folder / "kustomization.yaml")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name in recipe["resources"]:
        path = folder / name
        if path.is_dir():
            found |= rendered(path)
        else:
            found |= {(d["kind"], d["metadata"]["name"]): d for d in documents(path)}
    found = copy.deepcopy(found)
    for patch in recipe.get("patches", []):
        if "path" in patch:
            (change,) = documents(folder / patch["path"])
            key = (change["kind"], change["metadata"]["name"])
            assert key in found, f"{folder.name}: {patch['path']} changes nothing"
            found[key] = merged(found[key], change)
        else:
            target = found[(patch["target"]["kind"], patch["target"]["name"])]
            for step in yaml.safe_load(patch["patch"]):
                assert step["op"] == "remove"
                *way, last = [part.replace("~1", "/") for part in step["path"].split("/")[1:]]
                place: Any = target
                for part in way:
                    place = place[int(part)] if isinstance(place, list) else place[part]
                del place[last]
    for labels in recipe.get("labels", []):
        for document in found.values():
            document["metadata"].setdefault("labels", {}).update(labels["pairs"])
            spec = document.get("spec", {})
            if document["kind"] == "Deployment":
                spec["selector"]["matchLabels"].update(labels["pairs"])
                spec["template"]["metadata"]["labels"].update(labels["pairs"])
            elif document["kind"] == "Service":
                spec["selector"].update(labels["pairs"])
    for image in recipe.get("images", []):
        for document in found.values():
            for container in _containers(document):
                if container["image"] == image["name"]:
                    container["image"] = f"{image['newName']}:{image['newTag']}"
    return found


def _containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    return document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])


FOLDERS = [KUBERNETES / "base", *sorted((KUBERNETES / "overlays").iterdir())]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_kubernetes_manifests_are_what_kubernetes_takes(folder: Path) -> None:
    for key, document in rendered(folder).items():
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                pytest.fail(f"{key} for {version}: {error.message}")
    # and the check can fail
    broken = copy.deepcopy(rendered(folder)[("Deployment", "bertship")])
    broken["spec"]["replicaz"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=lambda folder: folder.name)
def test_kubernetes_pods_are_closed_and_their_probes_ask_for_answers(folder: Path) -> None:
    found = rendered(folder)
    pod = found[("Deployment", "bertship")]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["image"].endswith(":0.1.0") and not container["image"].endswith(":latest")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        command = container[probe]["exec"]["command"]
        assert command[:3] == ["python3", "-m", "bertship.health"]
        assert float(command[command.index("--timeout-s") + 1]) < container[probe]["timeoutSeconds"]
    mounted, volumes = {m["name"] for m in container["volumeMounts"]}, {v["name"] for v in pod["volumes"]}
    assert mounted == volumes >= {"shm", "tmp", "control-key"}
    gpu = "nvidia.com/gpu" in container["resources"]["limits"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert gpu == (folder.name != "cpu") == ("BERTSHIP_CONFIG" not in variables)
    assert ("models" in volumes) != variables["BERTSHIP_REPOSITORY"].startswith("s3://")
    (metric,) = found[("HorizontalPodAutoscaler", "bertship")]["spec"]["metrics"]
    (rules,) = documents(KUBERNETES / "adapter-rules.yaml")
    assert metric["pods"]["metric"]["name"] == rules["rules"][0]["name"]["as"]
    selector = found[("Service", "bertship")]["spec"]["selector"]
    labels = found[("Deployment", "bertship")]["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= labels.items()


def test_the_dockerfile_passes_hadolint_and_keeps_the_promises() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    command = [hadolint, "--no-color", "--failure-threshold", "style", DEPLOY / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    text = (DEPLOY / "Dockerfile").read_text()
    worse = text + "\nRUN cd /x && sudo ls\n"
    done = subprocess.run([*command[:-1], "-"], input=worse, text=True, capture_output=True, check=False)
    assert done.returncode != 0  # the check can fail
    last = text[text.rindex("FROM ") :]
    assert re.search(r"^USER 1000:1000$", last, re.MULTILINE) and "bertship.health" in last
    # everything that is copied is there, and let through to the builder
    allowed = [line[1:] for line in (PROJECT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (PROJECT / source).exists(), source
            assert any(source == place or source.startswith(f"{place}/") for place in allowed), source


def test_the_container_has_the_embedded_server_s_versions() -> None:
    """And what the served steps import, nothing else."""

    def pins(name: str) -> set[str]:
        lines = (PROJECT / "requirements" / name).read_text().splitlines()
        return {line for line in lines if line and not line.startswith("#")}

    assert pins("container.txt") < pins("triton.txt")
    assert {pin.partition("==")[0] for pin in pins("container.txt")} == {"numpy", "onnxruntime", "tokenizers"}


def test_compose_runs_the_image_closed_with_a_gpu() -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    (service,) = compose["services"].values()
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert service["read_only"] and service["user"] == "1000:1000" and service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert (
        service["image"]
        == rendered(KUBERNETES / "base")[("Deployment", "bertship")]["spec"]["template"]["spec"]["containers"][0][
            "image"
        ].rpartition("/")[2]
    )


def test_the_container_s_start_serves_with_the_real_triton(line: Line, tmp_path: Path) -> None:
    """start.py with the embedded server's binary in place of NVIDIA's image, on a read-only repository."""
    triton = environment.prepare()
    repository = tmp_path / "models"
    for model in ("weather", "weather_tokenize", "weather_encode", "weather_decode"):
        shutil.copytree(line.repository / model, repository / model)
    (tmp_path / "key").write_text("0123456789abcdef-the-key\n")
    # NVIDIA's image has these two in place
    places = [f"--backend-directory={triton.runtime / 'backends'}", "--metrics-interval-ms=200"]
    variables = triton.variables() | {
        "PATH": f"{triton.runtime / 'bin'}:{triton.variables()['PATH']}",
        "BERTSHIP_REPOSITORY": str(repository),
        "BERTSHIP_CONFIG": "embedded",
        "BERTSHIP_KEY_FILE": str(tmp_path / "key"),
        "BERTSHIP_HTTP_PORT": "20900",
        "BERTSHIP_GRPC_PORT": "20901",
        "BERTSHIP_METRICS_PORT": "20902",
    }
    ports = iter(port for port in range(20_900, 21_900) if not bind_problem("0.0.0.0", port))
    for name in ("HTTP", "GRPC", "METRICS"):
        variables[f"BERTSHIP_{name}_PORT"] = str(next(ports))
    for path in (repository, *repository.rglob("*")):
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    url = f"http://127.0.0.1:{variables['BERTSHIP_HTTP_PORT']}"
    shm = [f"--backend-config=python,shm-region-prefix-name=bertship_test_{os.getpid()}_"]
    before = sorted(path.as_posix() for path in repository.rglob("*"))
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [triton.python, DEPLOY / "start.py", *places, *shm], env=variables, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: process.poll() is not None or all(r.ok for r in health.check(url)), 60)
        assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
        assert Endpoint(url).call("POST", "/v2/repository/models/weather/unload")[0] == 403
        key = {control.HEADER: "0123456789abcdef-the-key"}
        assert Endpoint(url, key).call("POST", "/v2/repository/index")[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
    finally:
        process.kill()
        process.wait()
        supervisor.remove_shared_memory(f"bertship_test_{os.getpid()}_")
    assert sorted(path.as_posix() for path in repository.rglob("*")) == before


def test_the_start_of_the_container_closes_control_and_limits_requests(tmp_path: Path) -> None:
    assert start.HEADER == control.HEADER and start.RESTRICTED.split(",") == list(control.RESTRICTED)
    flags = start.command({}, "  --http-max-input-size <integer>", ["--log-verbose=1"])
    assert "--http-max-input-size=67108864" in flags and flags[-1] == "--log-verbose=1"
    closed = [flag for flag in flags if "restricted" in flag]
    assert len(closed) == 2 and all(f"{control.HEADER}=" in flag for flag in closed)
    assert closed != [flag for flag in start.command({}, "") if "restricted" in flag]  # a key of its own each time
    assert "--model-config-name=onnxruntime" in start.command({"BERTSHIP_CONFIG": "onnxruntime"}, "")
    (tmp_path / "key").write_text("short\n")
    with pytest.raises(ValueError, match="has a key of 5 characters"):
        start.command({"BERTSHIP_KEY_FILE": str(tmp_path / "key")}, "")


def test_the_dashboard_asks_for_metrics_that_exist(line: Line) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "bertship.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = {name for text in expressions for name in re.findall(r"\b((?:nv|bertship)_[a-z_]+)", text)}
    with urllib.request.urlopen(line.server.metrics_url) as reply:
        offered = set(re.findall(r"^# TYPE (\S+)", reply.read().decode(), re.MULTILINE))
    gpu = {name for name in asked if name.startswith("nv_gpu_")}  # a server without a GPU has none
    ours = {name for name in asked if name.startswith("bertship_")}
    assert asked - gpu - ours <= offered, asked - gpu - ours - offered
    assert len(ours) >= 8 and len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    # counted where the server is asked to: tests/test_embedded.py reads them from one that is
    counted = set(
        re.findall(r"`(bertship_\w+_total)`", (PROJECT / "bertship" / "triton_metrics.py").read_text("utf-8"))
    )
    assert ours <= counted, ours - counted
