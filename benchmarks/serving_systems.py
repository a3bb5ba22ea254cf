"""Other ways to serve the weights that we serve, started for `benchmarks/serving.py`, and ours beside them.

(a) a repository in transformer-deploy's manner on the same Triton, (b) `transformers` behind FastAPI, (c) MLServer.
What runs inside them is in `serving_peers/`.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bertship.artifacts import publish
from bertship.errors import CheckFailed
from bertship.tasks import Task
from serving import environment
from serving.server import TritonServer

PEERS = Path(__file__).parent / "serving_peers"
ENVIRONMENTS = Path(__file__).parents[1] / "build" / "peers"  # made by benchmarks/peers.py
START_S = 180
ANY_PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}


@dataclasses.dataclass
class System:
    """A way to serve: where it is asked, what it is sent, and how its reply is read as (answer, score)."""

    name: str
    url: str
    path: str
    body: Callable[[dict[str, str]], str]
    read: Callable[[dict[str, Any]], tuple[str, float]]


def ours(name: str, url: str, task: Task) -> System:
    """Triton over its JSON, for our ensemble and for the peer's."""

    def body(columns: dict[str, str]) -> str:
        inputs = [{"name": n, "shape": [1], "datatype": "BYTES", "data": [text]} for n, text in columns.items()]
        outputs = [{"name": n} for n in (("LABEL" if task.labels else "ANSWER"), "SCORE")]
        return json.dumps({"inputs": inputs, **({"outputs": outputs} if name.startswith("bertship") else {})})

    def read(reply: dict[str, Any]) -> tuple[str, float]:
        found = {output["name"]: output["data"][0] for output in reply["outputs"]}
        return found.get("LABEL", found.get("ANSWER")), found["SCORE"]

    return System(name, url, f"/v2/models/{task.name}/infer", body, read)


def compare(systems: Sequence[System], columns: Sequence[dict[str, str]], kind: str) -> dict[str, Any]:
    """Share of answers that equal those of `transformers` in FP32; raises CheckFailed where FP32 ones differ."""
    answers = {s.name: [s.read(json.loads(post(s.url + s.path, s.body(c)))) for c in columns] for s in systems}
    reference = answers["(b) fastapi float32"]
    agreement = {}
    for name, found in answers.items():
        equal = [a[0] == b[0] for a, b in zip(found, reference, strict=True)]
        agreement[name] = sum(equal) / len(equal)
        if "32" in name and agreement[name] < 0.99:
            place = equal.index(False)
            raise CheckFailed(f"{name} answers {found[place]} where transformers does {reference[place]}, text {place}")
    return agreement


@contextlib.contextmanager
def triton_peer(repository: Path, export: Path, task: Task) -> Iterator[str]:
    """transformer-deploy's manner: an ensemble of three steps, `max_batch_size: 0`, no dynamic batching."""
    kind, names = task.behaviour, task.behaviour.inputs
    rows = [(n, "INT64", "-1, -1") for n in ("input_ids", "attention_mask", "token_type_ids")]
    places = [("OFFSETS", "INT32", "-1, -1, 2")] if kind.row_tensors else []
    texts = [(n, "STRING", "-1") for n in names]
    logits = [(s.name, "FP32", ", ".join(map(str, (-1, *s.dims)))) for s in kind.logits(task)]
    answers = [("ANSWER", "STRING", "-1"), ("SCORE", "FP32", "-1")]
    steps = {
        "tokenize": (texts, [*rows, *places]),
        "encode": (rows, logits),
        "decode": ([*(texts[1:] if places else []), *places, *logits], answers),
    }

    def tensors(field: str, of: Sequence[tuple[str, str, str]]) -> str:
        return "".join(f'{field} {{ name: "{n}" data_type: TYPE_{t} dims: [ {d} ] }}\n' for n, t, d in of)

    def maps(field: str, of: Sequence[tuple[str, str, str]]) -> str:
        return "".join(f'{field} {{ key: "{n}" value: "{n}" }} ' for n, _, _ in of)

    with publish(repository) as staging:
        wiring = ""
        for step, (inputs, outputs) in steps.items():
            folder = staging / f"peer_{step}"
            (folder / "1").mkdir(parents=True)
            (folder / "config.pbtxt").write_text(
                'backend: "python"\nmax_batch_size: 0\ninstance_group [ { count: 1 kind: KIND_CPU } ]\n'
                + tensors("input", inputs)
                + tensors("output", outputs)
            )
            shutil.copyfile(PEERS / f"triton_{step}.py", folder / "1" / "model.py")
            settings = {"names": names, "max_tokens": task.max_tokens, "labels": task.labels}
            (folder / "1" / "settings.json").write_text(json.dumps(settings))
            wiring += f'step {{ model_name: "peer_{step}" model_version: -1 {maps("input_map", inputs)}'
            wiring += f"{maps('output_map', outputs)} }}\n"
        shutil.copyfile(export / "tokenizer.json", staging / "peer_tokenize" / "1" / "tokenizer.json")
        shutil.copyfile(export / "model.onnx", staging / "peer_encode" / "1" / "model.onnx")
        (staging / "peer" / "1").mkdir(parents=True)
        (staging / "peer" / "config.pbtxt").write_text(
            'platform: "ensemble"\nmax_batch_size: 0\n'
            + tensors("input", texts)
            + tensors("output", answers)
            + f"ensemble_scheduling {{ {wiring} }}\n"
        )
    with served_folder(repository) as url:
        yield url


@contextlib.contextmanager
def served_folder(repository: Path) -> Iterator[str]:
    server = TritonServer(environment.prepare())
    with server.start(repository, log_path=repository.with_suffix(".log"), model_config_name="", **ANY_PORTS):
        yield server.http_url


@contextlib.contextmanager
def fastapi_peer(model: Path, task: Task, dtype: str) -> Iterator[str]:
    python = ENVIRONMENTS / "transformers" / "bin" / "python"
    if not python.is_file():
        raise CheckFailed(f"no {python}: `python -m benchmarks.peers --install` makes it")
    kind = "span" if task.behaviour.row_tensors else "sentence"
    variables = {
        "PYTHONPATH": str(PEERS),
        "MODEL": str(model),
        "KIND": kind,
        "DTYPE": dtype,
        "MAX_TOKENS": str(task.max_tokens),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    port = free_port()
    command = [str(python), "-m", "uvicorn", "fastapi_app:app", "--port", str(port), "--log-level", "warning"]
    with started(command, variables, f"http://127.0.0.1:{port}", "/ready", "FastAPI") as url:
        yield url


@contextlib.contextmanager
def mlserver_peer(folder: Path, model: Path, task: Task, optimum: bool) -> Iterator[str]:
    """MLServer with its own Hugging Face runtime, in one process; `optimum` lets it convert to ONNX as it loads."""
    python = ENVIRONMENTS / "mlserver" / "bin" / "python"
    if not python.is_file():
        raise CheckFailed(f"no {python}: `python -m benchmarks.peers --install` makes it")
    if task.kind != "sentence":
        raise CheckFailed(f"its text-classification pipeline takes one text a request, {task.name} is of {task.kind}")
    extra = {
        "task": "text-classification",
        "pretrained_model": str(model),
        "pretrained_tokenizer": str(model),
        "optimum_model": optimum,
    }
    settings = {
        "name": "peer",
        "implementation": "mlserver_huggingface.HuggingFaceRuntime",
        "parameters": {"extra": extra},
    }
    port, grpc_port, metrics_port = free_port(), free_port(), free_port()
    ports = {"http_port": port, "grpc_port": grpc_port, "metrics_port": metrics_port}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model-settings.json").write_text(json.dumps(settings))
    (folder / "settings.json").write_text(json.dumps({**ports, "host": "127.0.0.1", "parallel_workers": 0}))
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    variables |= {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [str(python.with_name("mlserver")), "start", str(folder)]
    with started(command, variables, f"http://127.0.0.1:{port}", "/v2/models/peer/ready", "MLServer") as url:
        yield url


def mlserver_body(columns: dict[str, str]) -> str:
    (text,) = columns.values()
    parameters = {"content_type": "str"}
    tensor = {"name": "args", "shape": [1], "datatype": "BYTES", "parameters": parameters, "data": [text]}
    return json.dumps({"inputs": [tensor]})


def mlserver_answer(reply: dict[str, Any]) -> tuple[str, float]:
    found = json.loads(reply["outputs"][0]["data"][0])
    found = found[0] if isinstance(found, list) else found
    return found["label"], found["score"]


@contextlib.contextmanager
def started(command: Sequence[str], variables: dict[str, str], url: str, ready: str, name: str) -> Iterator[str]:
    """A server of a peer's for the block's time. Raises CheckFailed with its last line where it does not start."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_S
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(url + ready, timeout=2).read()
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    said = [line.strip() for line in log if line.strip()] or ["it said nothing"]
                    errors = [line for line in said if re.match(r"[\w.]*(?:Error|Exception)\b", line)]
                    raise CheckFailed(f"{name} did not start: {(errors or said)[-1]}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def post(url: str, body: str) -> bytes:
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return bytes(reply.read())
