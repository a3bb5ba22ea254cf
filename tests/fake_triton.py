"""A server that speaks as much of Triton's HTTP protocol as the playground needs, with answers that a test makes up."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


@dataclass
class Model:
    inputs: Mapping[str, list[int]]
    outputs: Mapping[str, tuple[str, list[int]]]
    answer: Answer
    version: str = "1"
    platform: str = "ensemble"
    pinned: int = -1  # the version that its steps are named in
    labels: str = ""  # what its configuration says of them
    steps: str = ""  # whose steps they are, its own if none


@dataclass
class FakeTriton:
    models: dict[str, Model]
    stats_status: int = 200
    url: str = ""
    seen: list[str] = field(default_factory=list)

    @contextmanager
    def run(self) -> Iterator["FakeTriton"]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.seen.append(f"GET {self.path}")
                if self.path == "/v2/models/stats":
                    stats = {"model_stats": [{"name": n, "version": m.version} for n, m in fake.models.items()]}
                    self.say(fake.stats_status, stats if fake.stats_status == 200 else {"error": "closed"})
                    return
                name, _, what = self.path.removeprefix("/v2/models/").partition("/")
                name = unquote(name)
                self.say(*fake.config(name) if what else fake.metadata(name))

            def do_POST(self) -> None:
                fake.seen.append(f"POST {self.path}")
                sent = self.rfile.read(int(self.headers["Content-Length"]))
                # texts may follow as bytes
                body = json.loads(
                    sent[: int(self.headers.get("Inference-Header-Content-Length") or len(sent))] or b"{}"
                )
                name, _, version = self.path.removeprefix("/v2/models/").removesuffix("/infer").partition("/versions/")
                name = unquote(name)
                if name not in fake.models or (version and version != fake.models[name].version):
                    self.say(404, {"error": f"unknown model {name}"})
                    return
                status, outputs = fake.models[name].answer(body)
                reply = {"model_name": name, "model_version": fake.models[name].version, "outputs": outputs}
                self.say(status, reply if status == 200 else outputs)

            def say(self, status: int, value: Any) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def metadata(self, name: str) -> tuple[int, dict[str, Any]]:
        if name not in self.models:
            return 400, {"error": f"Request for unknown model: '{name}' is not found"}
        model = self.models[name]
        return 200, {
            "name": name,
            "versions": [model.version],
            "platform": model.platform,
            "inputs": [{"name": n, "datatype": "BYTES", "shape": s} for n, s in model.inputs.items()],
            "outputs": [{"name": n, "datatype": t, "shape": s} for n, (t, s) in model.outputs.items()],
        }

    def config(self, name: str) -> tuple[int, dict[str, Any]]:
        model = self.models[name]
        step = {
            "model_name": f"{model.steps or name}_tokenize",
            "model_version": model.pinned,
            "input_map": {n: n for n in model.inputs},
        }
        parameters = {"labels": {"string_value": model.labels}} if model.labels else {}
        return 200, {
            "ensemble_scheduling": {"step": [step]},
            "parameters": parameters,
            "input": [{"name": n} for n in model.inputs],
        }


def labelled(labels: list[str], choose: Callable[[str], int]) -> Model:
    """A sentence task that answers with `labels[choose(text)]`."""

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        best = choose(body["inputs"][0]["data"][0])
        shares = [0.9 if i == best else 0.1 / (len(labels) - 1) for i in range(len(labels))]
        return 200, [
            {"name": "LABEL", "datatype": "BYTES", "shape": [1], "data": [labels[best]]},
            {"name": "SCORE", "datatype": "FP32", "shape": [1], "data": [shares[best]]},
            {"name": "PROBABILITIES", "datatype": "FP32", "shape": [1, len(labels)], "data": shares},
            {"name": "TRUNCATED", "datatype": "BOOL", "shape": [1], "data": [False]},
        ]

    outputs = {
        "LABEL": ("BYTES", [-1]),
        "SCORE": ("FP32", [-1]),
        "PROBABILITIES": ("FP32", [-1, len(labels)]),
        "TRUNCATED": ("BOOL", [-1]),
    }
    return Model({"TEXT": [-1]}, outputs, answer)
