"""Clients: typed results, retries where they are safe, limits, timeouts, and many threads on one pool."""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import Line
from google.protobuf import text_format
from test_server import ANY_PORTS, add_model
from tritonclient.grpc import model_config_pb2 as pb

from bertship import AsyncClient, Client, errors, wire
from bertship.errors import (
    ClientError,
    InputError,
    InvalidRequest,
    MessageTooLarge,
    RequestTimeout,
    ServerBusy,
    ServerFault,
    ServerUnavailable,
    TaskUnavailable,
)
from bertship.results import Answer, Classification, Entities, Span, Value
from serving.repository import _drop_what_nobody_waits_for
from serving.server import TritonServer

ANSWER = {
    "outputs": [
        {"name": "LABEL", "datatype": "BYTES", "shape": [1], "data": ["fine"]},
        {"name": "SCORE", "datatype": "FP32", "shape": [1], "data": [0.75]},
        {"name": "PROBABILITIES", "datatype": "FP32", "shape": [1, 2], "data": [0.75, 0.25]},
        {"name": "TRUNCATED", "datatype": "BOOL", "shape": [1], "data": [False]},
    ]
}
GONE = {"error": "Request for unknown model: 'sst2' has no available versions"}

SLOW = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy() for request in requests]
        if any(b"slow" in text for text in texts):
            time.sleep(1.5)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("ECHO", np.concatenate([t, t], 1))]) for t in texts]
"""
SLOW_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "ECHO" data_type: TYPE_STRING dims: [ 2 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
SLOW_ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "ECHO" data_type: TYPE_STRING dims: [ 2 ] } ]
ensemble_scheduling { step [ { model_name: "slow" model_version: 1
  input_map { key: "TEXT" value: "TEXT" } output_map { key: "ECHO" value: "ECHO" } } ] }
"""


@contextmanager
def fake(*replies: Any, count: list[int] | None = None) -> Iterator[str]:
    """An HTTP server that gives `replies` one after another, the last one for ever; yields its address.

    A reply is (status, object), "hang" (no answer), "break" (half an answer) or "close" (an answer, then the end).
    """
    asked = count if count is not None else [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            reply = replies[min(asked[0], len(replies) - 1)]
            asked[0] += 1
            if reply == "hang":
                time.sleep(2)
                self.close_connection = True
                return
            status, body = (200, ANSWER) if isinstance(reply, str) else reply
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text) + (100 if reply == "break" else 0)))
            self.end_headers()
            self.wfile.write(text)
            self.close_connection = reply in ("break", "close")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def ask_async(url: str, timeout_s: float, **settings: Any) -> Any:
    async def ask() -> Any:
        async with AsyncClient(url, timeout_s, **settings) as client:
            return await client.classify("sst2", "a")

    return asyncio.run(ask())


def ask_sync(url: str, timeout_s: float, **settings: Any) -> Any:
    with Client(url, timeout_s, **settings) as client:
        return client.classify("sst2", "a")


BOTH = pytest.mark.parametrize("ask", [ask_sync, ask_async])
Ask = Callable[..., Any]


@BOTH
@pytest.mark.parametrize("first", [(400, GONE), (503, {"error": "Exceeds maximum queue size"})])
def test_a_refusal_before_anything_began_is_tried_again(ask: Ask, first: Any) -> None:
    count = [0]
    with fake(first, (200, ANSWER), count=count) as url:
        assert ask(url, 5).label == "fine"
    assert count == [2]


@BOTH
@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("hang", RequestTimeout),
        ("break", ServerFault),
        ((500, {"error": "Stub process 'sst2_encode_0_0' is not healthy."}), ServerFault),
        ((400, {"error": "TEXT is an empty list"}), InvalidRequest),
        ((404, {"error": "Request for unknown model: 'sst2' is not found"}), TaskUnavailable),
        ((503, {"error": "Request timeout expired"}), RequestTimeout),
        ((502, b"<html>a gateway's words</html>"), ServerFault),
        ((404, b"<html>no such page</html>"), ServerUnavailable),
        ((501, b"<!doctype html><p>Unsupported method"), ServerUnavailable),
        ((404, {"detail": "Not Found"}), ServerUnavailable),
        ((200, b"<html>hello</html>"), ServerUnavailable),
        ((200, {"hello": "world"}), ServerUnavailable),
    ],
)
def test_nothing_else_is_tried_again(ask: Ask, reply: Any, error: type[ClientError]) -> None:
    count = [0]
    with fake(reply, (200, ANSWER), count=count) as url, pytest.raises(error) as caught:
        ask(url, 0.7)
    assert count == [1] and "\n" not in str(caught.value) and type(caught.value) is error
    assert "<html" not in str(caught.value), "a page is no message"
    assert ("is no Triton (" in str(caught.value)) == (error is ServerUnavailable)


@BOTH
def test_retries_end_and_can_be_refused(ask: Ask) -> None:
    count = [0]
    with fake((503, {"error": "Exceeds maximum queue size"}), count=count) as url:
        with pytest.raises(ServerBusy, match=r"the queue of .* is full"):
            ask(url, 5)
        assert count == [3]
        with pytest.raises(ServerBusy):
            ask(url, 5, retries=0)
        assert count == [4]


@BOTH
@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_no_server_is_said_and_one_that_comes_is_found(ask: Ask, scheme: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused
        with pytest.raises(ServerUnavailable, match=r"sst2: no server at .*make serve"):
            ask(f"{scheme}://127.0.0.1:{taken.getsockname()[1]}", 3)
    if scheme == "http":
        with socket.socket() as later:
            later.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            later.bind(("127.0.0.1", 0))
            port = later.getsockname()[1]

            def answer() -> None:
                time.sleep(0.15)
                later.listen()
                connection, _ = later.accept()
                with connection:
                    connection.recv(1 << 16)
                    body = json.dumps(ANSWER).encode()
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                    connection.recv(1)

            thread = threading.Thread(target=answer)
            thread.start()
            assert ask(f"http://127.0.0.1:{port}", 5, retries=4).label == "fine"
            thread.join()


def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    count = [0]
    with fake("close", count=count) as url, Client(url) as client:
        for _ in range(5):
            assert client.classify("sst2", "a").label == "fine"
            time.sleep(0.05)
    assert count == [5]


@BOTH
def test_a_reply_larger_than_the_limit_is_not_read(ask: Ask) -> None:
    with fake((200, b"x" * (2 << 20))) as url, pytest.raises(MessageTooLarge, match=r"2\.0 MiB, 1 MiB are allowed"):
        ask(url, 5, max_message_mib=1)


def test_settings_that_make_no_sense() -> None:
    for url in ("127.0.0.1:8000", "ftp://x", "http://", ""):
        with pytest.raises(InputError, match="http://HOST:PORT or grpc://HOST:PORT"):
            Client(url)
    for settings in ({"timeout_s": 0}, {"retries": -1}, {"pool_size": 0}, {"max_message_mib": 0}):
        with pytest.raises(InputError, match=next(iter(settings))):
            Client(**settings)
        with pytest.raises(InputError, match=next(iter(settings))):
            AsyncClient(**settings)


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ("a", (1,)),
        (b"a", (1,)),
        (["a", "b"], (2,)),
        (("a", "b"), (2,)),
        (np.array(["a", "b"]), (2,)),
        (np.array([["a"], ["b"]], object), (2,)),
        (np.array([b"a", "b"], object), (2,)),
        ([["a"], ["b"]], (2,)),
        ([], (0,)),
        ([["a", "b"], ["c", "d"]], (2, 2)),
        (np.array([["a", "b"]]), (1, 2)),
    ],
)
def test_texts_in_every_form(given: Any, shape: tuple[int, ...]) -> None:
    """srv.1"""
    values = wire.arrays({"TEXT": given})["TEXT"]
    assert values.shape == shape and all(isinstance(text, bytes) for text in values.ravel())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([1], "is 1, a string is needed"),
        (None, "a text or a list of texts"),
        (["\ud800"], "lone surrogate at character 0"),
        ([["a"], ["b", "c"]], "lists of 1, 2 texts"),
        ([None], "is None"),
    ],
)
def test_what_is_no_text_is_said_before_anything_is_sent(given: Any, says: str) -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(InputError, match=says):
        client.infer("sst2", {"TEXT": given})


@pytest.mark.parametrize("which", [0, 1])
def test_results_are_typed(line: Line, which: int) -> None:
    with Client(line.urls[which]) as client:
        one = client.classify("sst2", "a lovely film")
        assert isinstance(one, Classification) and one.label == "positive" and one.score == max(one.probabilities)
        many = client.classify("mnli", ["Anna is here", "x"], ["it is cold", "y"])
        assert [type(result) for result in many] == [Classification] * 2 and len(many[0].probabilities) == 3
        assert client.classify("sst2", np.array([["a lovely film"]])) == [one]
        assert isinstance(client.score("stsb", "a day", "a day"), Value)
        context = "Anna went to the market today."
        best = client.answer("squad", "Where did Anna go?", context, top_k=3)
        assert isinstance(best, Answer) and context[best.start : best.end] == best.text == "market"
        assert len(best.candidates) == 3 and best.candidates[0] == Span(best.text, *_rest(best))
        found = client.entities("ner", "Bruno went to Old castle .")
        assert isinstance(found, Entities) and [(e.label, e.text) for e in found] == [
            ("person", "Bruno"),
            ("place", "Old castle"),
        ]
        with pytest.raises(InvalidRequest, match=r"sst2 gives no Entities .*: it answers LABEL, SCORE"):
            client.entities("sst2", "a")
        with pytest.raises(InvalidRequest, match="sst2 gives no Value"):
            client.score("sst2", "a")


def _rest(answer: Answer) -> tuple[float, int, int]:
    # JSON carries six digits
    return (answer.candidates[0].score, answer.start, answer.end)


@pytest.mark.parametrize("which", [0, 1])
def test_the_asynchronous_client_answers_the_same(line: Line, which: int) -> None:
    texts = ["a lovely film " * n for n in range(1, 33)]
    with Client(line.urls[which]) as client:
        expected = [client.classify("sst2", text) for text in texts]
        assert client.labels("sst2") == ("negative", "positive"), "in the order of PROBABILITIES"
        assert client.labels("squad") == ()
        assert (client.inputs("sst2"), client.inputs("squad")) == (("TEXT",), ("QUESTION", "CONTEXT"))
        tasks, answer = client.tasks(), client.ask("squad", QUESTION="Where?", CONTEXT="In the garden.")

    async def ask() -> None:
        async with AsyncClient(line.urls[which], pool_size=8) as client:
            assert await asyncio.gather(*(client.classify("sst2", text) for text in texts)) == expected
            assert await client.tasks() == tasks
            assert await client.labels("sst2") == ("negative", "positive") and await client.labels("ner") == ()
            assert await client.inputs("squad") == ("QUESTION", "CONTEXT")
            assert await client.ready() and await client.ready("sst2") and not await client.ready("nope")
            assert await client.ask("squad", QUESTION="Where?", CONTEXT="In the garden.") == answer
            assert isinstance(await client.score("stsb", ["a"], ["b"]), list)
            assert (await client.entities("ner", "Bruno left .")).entities[0].label == "person"
            with pytest.raises(InvalidRequest, match="top_k=0"):
                await client.answer("squad", "Where?", "Here.", top_k=0)
            with pytest.raises(TaskUnavailable, match="nope is not served"):
                await client.ask("nope", TEXT="x")

    asyncio.run(ask())


@pytest.mark.parametrize("which", [0, 1])
def test_one_client_serves_thirty_two_threads(line: Line, which: int) -> None:
    texts = [f"{'lovely ' * (n % 7)}film {n}" for n in range(32)]
    with Client(line.urls[which]) as client, ThreadPoolExecutor(32) as pool:
        expected = client.classify("sst2", texts)
        for _ in range(10):
            assert list(pool.map(lambda text: client.classify("sst2", text), texts)) == expected
        port = line.server.http_port if which == 0 else line.server.grpc_port
        mine = [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port]
        assert 1 <= len([c for c in mine if c.status == psutil.CONN_ESTABLISHED]) <= 32


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    root = tmp_path_factory.mktemp("slow")
    queue = pb.ModelConfig()
    _drop_what_nobody_waits_for(queue)  # as every task's encoder has it
    add_model(root / "repository", "slow", SLOW_CONFIG + text_format.MessageToString(queue), SLOW)
    add_model(root / "repository", "task", SLOW_ENSEMBLE)
    with TritonServer() as server:
        server.start(root / "repository", log_path=root / "log", **ANY_PORTS)
        yield server


def urls(server: TritonServer) -> tuple[str, str]:
    return server.http_url, f"grpc://{server.grpc_url}"


def executed(server: TritonServer) -> int:
    return next(int(model["inference_count"]) for model in server.control.statistics() if model["name"] == "slow")


@pytest.mark.parametrize("which", [0, 1])
def test_a_timeout_is_typed_and_the_queue_drops_what_nobody_waits_for(slow: TritonServer, which: int) -> None:
    """srv.15"""
    before = executed(slow)
    with Client(urls(slow)[which], timeout_s=10) as patient, Client(urls(slow)[which], timeout_s=0.4) as hasty:
        with ThreadPoolExecutor(6) as pool:
            first = pool.submit(_raw, patient, "slow")
            time.sleep(0.3)
            others = [pool.submit(_raw, hasty, "quick") for _ in range(5)]
            for other in others:
                assert isinstance(other.exception(), RequestTimeout), other.exception()
                assert "within 0.4 s" in str(other.exception())
            first.result()
        _raw(patient, "quick")  # the queue has been gone through
    assert executed(slow) - before == 2


def _raw(client: Client, text: str) -> Any:
    """One text as the row of a batch, as rows of tokens are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "arrays", lambda columns: {"TEXT": np.array([[columns["TEXT"].encode()]], object)})
        return client.infer("task", {"TEXT": text})


@pytest.mark.parametrize("which", [0, 1])
def test_message_limits_are_explicit_and_named(slow: TritonServer, which: int) -> None:
    """srv.12: well above 4 MB passes, and what does not pass says which limit it met."""
    url = urls(slow)[which]
    with Client(url) as client:
        assert len(_raw(client, "x" * (6 << 20))["ECHO"][0][0]) == 6 << 20
    with Client(url, max_message_mib=1) as client:
        with pytest.raises(MessageTooLarge, match=r"the request has 2\.0 MiB, 1 MiB are allowed \(max_message_mib\)"):
            _raw(client, "x" * (2 << 20))
        with pytest.raises(MessageTooLarge, match=r"the reply of .* 1 MiB are allowed \(max_message_mib\)"):
            _raw(client, "x" * (700 << 10))


def test_the_tree_of_errors_is_the_documented_one() -> None:
    tree = re.findall(r"[└├]── (\w+)", errors.__doc__ or "")
    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert {"BertshipError", *tree} == classes
    for name in classes - {"BertshipError"}:
        parent = getattr(errors, name).__mro__[1].__name__
        line = next(row for row in (errors.__doc__ or "").splitlines() if f"── {name} " in row)
        depth = {"BertshipError": 0, "ClientError": 4, "InvalidRequest": 8, "ServerUnavailable": 8}[parent]
        assert re.search("[└├]", line).start() == depth, line


def test_the_wheel_s_client_needs_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from bertship import Client, AsyncClient; Client(); AsyncClient(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout == "False\n"


@pytest.mark.parametrize(("status", "kind"), [(404, ServerUnavailable), (501, ServerFault)])
def test_a_page_is_called_so_and_not_shown(status, kind):
    error = wire.refused("sst2", "http://here", status, "<!DOCTYPE HTML>\n<html><title>Error</title>", 1.0, 1 << 20)
    assert type(error) is kind and str(error) == (
        f"sst2: what answers at http://here is no Triton server: a page, HTTP status {status}"
    )


def test_wrong_inputs_are_told_where_to_find_the_right_ones():
    said = "[request id: <id_unknown>] expected 1 inputs but got 2 inputs for model 'sst2'. Got input(s) ['TEXT','X']"
    for text in (said, "unexpected inference input 'text' for model 'sst2'"):
        error = wire.refused("sst2", "http://here", 400, text, 1.0, 1 << 20)
        assert isinstance(error, InvalidRequest) and "Client.inputs('sst2') names its inputs" in str(error)
        assert "id_unknown" not in str(error)
