"""Small exports, repositories and servers of them: what the tests of serving share."""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
from small_bert import CONFIG, TASKS_BY_HEAD, TOKENIZER, make_examples, make_model

from bertship.artifacts import write_manifest
from bertship.client import Client
from bertship.config import EncoderConfig
from bertship.tasks import Task
from export.onnx_graph import export_onnx
from export.tensorrt_engine import profiles_of
from serving.environment import TritonEnvironment
from serving.repository import ready_models
from serving.server import TritonServer

ANY_PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
SPAN, TOKEN, SENTENCE = (TASKS_BY_HEAD[head] for head in ("span", "token", "sentence"))


def make_export(folder: Path, head: str, config: EncoderConfig = CONFIG, **changes: Any) -> Path:
    """An export directory of a small model with random weights, FP32; `changes` edit its task."""
    task = dataclasses.replace(TASKS_BY_HEAD[head], **changes)
    folder.mkdir(parents=True)
    export_onnx(make_model(head, config), folder / "model.onnx")
    (folder / "task.json").write_text(task.to_json(), encoding="utf-8")
    TOKENIZER.backend.save(str(folder / "tokenizer.json"))
    write_manifest(folder, "export", task=task.name, graphs={"fp32": "model.onnx"}, serve="fp32")
    return folder


def engine_facts(task: Task, **changes: Any) -> dict[str, Any]:
    """What the engine's builder writes of a plan of the task."""
    return {
        "file": "model.plan",
        "module": "tensorrt",
        "inputs": ["input_ids", "attention_mask", "token_type_ids"],
        "outputs": [spec.name for spec in task.behaviour.logits(task)],
        "profiles": [shapes._asdict() for shapes in profiles_of(task)],
        **changes,
    }


def add_plan(export: Path, **changes: Any) -> dict[str, Any]:
    """Give an export a plan that the stand-in of `native_backend` runs; returns its facts."""
    task = Task.from_file(export / "task.json")
    facts = engine_facts(task, **changes)
    graph = onnx.load(export / "model.onnx")
    graph.metadata_props.add(key="profiles", value=json.dumps(facts["profiles"]))
    onnx.save(graph, export / "model.plan")
    manifest = json.loads((export / "manifest.json").read_text(encoding="utf-8"))
    graphs = {name: manifest[name] for name in ("task", "graphs", "serve")}
    write_manifest(export, "export", plans={"fp16": facts}, **graphs)
    return facts


def with_native_backends(triton: TritonEnvironment, folder: Path) -> TritonEnvironment:
    """The environment with the stand-in under the names `tensorrt` and `onnxruntime`."""
    runtime = folder / "runtime"
    shutil.copytree(triton.runtime, runtime, symlinks=True)
    for name in ("tensorrt", "onnxruntime"):
        # real copies: Triton refuses a library whose path leads out of the backend's folder
        shutil.copytree(runtime / "backends" / "python", runtime / "backends" / name)
        shutil.copy2(Path(__file__).parent / "native_backend" / "model.py", runtime / "backends" / name)
    return dataclasses.replace(triton, runtime=runtime)


@contextmanager
def serving(triton: TritonEnvironment, repository: Path, **more: Any) -> Iterator[TritonServer]:
    """A server on what is ready in `repository`, on free ports."""
    server = TritonServer(triton)
    log = repository.parent / "triton.log"
    with server.start(repository, models=ready_models(repository), log_path=log, **(ANY_PORTS | more)):
        yield server


def columns_of(task: Task, count: int = 20) -> dict[str, list[str]]:
    """Texts of the task's kind, of mixed lengths."""
    head = next(head for head, other in TASKS_BY_HEAD.items() if other.kind == task.kind)
    return {name: [e.columns[name] for e in make_examples(head, count)] for name in task.behaviour.inputs}


def ask_at_once(url: str, task: str, requests: Sequence[dict[str, Any]], clients: int) -> list[dict[str, Any]]:
    """The replies to `requests`, from so many clients at once, in the order of the requests."""

    def ask(first: int) -> list[dict[str, Any]]:
        with Client(url, timeout_s=120) as client:
            return [client.infer(task, columns) for columns in requests[first::clients]]

    with ThreadPoolExecutor(clients) as pool:
        shares = list(pool.map(ask, range(clients)))
    return [shares[i % clients][i // clients] for i in range(len(requests))]
