"""Ask a served task, HTTP or gRPC by the address: tensors, plain records, or typed results."""

import http.client
import json
import time
from collections.abc import Mapping
from email.message import Message
from typing import Any, overload
from urllib.parse import quote

import numpy as np

from bertship import wire
from bertship.errors import ClientError, InputError, InvalidRequest, ServerFault
from bertship.http_pool import HttpPool, NotConnected, ReplyTooLarge
from bertship.pipeline import as_records
from bertship.results import Answer, Choice, Classification, Entities, R, Value, typed
from bertship.wire import Address, ManyTexts, Texts


class Client:
    """Connections to one server, HTTP (`http://127.0.0.1:8000`) or gRPC (`grpc://127.0.0.1:8001`), for many threads.

    >>> with Client("http://127.0.0.1:8000") as client:
    ...     client.classify("sst2", "a joy to watch").label
    'positive'

    One text gives one result; a list, or an array of shape [N] or [N, 1], gives a list of N. `ask` gives plain
    dictionaries by tensor name for a task of any kind, `infer` the tensors themselves.

    `timeout_s` bounds each call as a whole, with its retries; the server drops what it has not begun by then.
    `retries`: how often a call is tried again where that is safe, which is where nothing was sent or the server
    refused before it began; never after a timeout or a broken connection. `max_message_mib` bounds a request and a
    reply. `headers` go with every request, such as a gateway's key.

    Errors are those of `bertship.errors`: InvalidRequest, ServerUnavailable, RequestTimeout, ServerFault and their
    kinds, all ClientError; InputError for an address or a text that is none.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        timeout_s: float = 30.0,
        *,
        retries: int = 2,
        pool_size: int = wire.POOL_SIZE,
        max_message_mib: int = wire.MAX_MESSAGE_MIB,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._address = Address.parse(url)
        check_settings(timeout_s, retries, pool_size, max_message_mib)
        self.url, self.timeout_s, self.retries = url, timeout_s, retries
        self._max_bytes, self._headers = max_message_mib << 20, dict(headers or {})
        if self._address.grpc:
            import tritonclient.grpc as protocol

            options = wire.channel_options(self._max_bytes)
            self._client = protocol.InferenceServerClient(
                self._address.authority, ssl=self._address.secure, channel_args=options
            )
        else:
            import tritonclient.http as protocol

            self._pool = HttpPool(url, pool_size)
        self._protocol = protocol

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        if self._address.grpc:
            self._client.close()
        else:
            self._pool.close()

    @overload
    def classify(self, task: str, text: str, text_pair: str | None = None) -> Classification: ...
    @overload
    def classify(self, task: str, text: ManyTexts, text_pair: ManyTexts | None = None) -> list[Classification]: ...
    def classify(self, task: str, text: Texts, text_pair: Texts | None = None) -> Any:
        """The label of a text, or of a pair of texts."""
        return self._typed(Classification, task, {"TEXT": text, "TEXT_PAIR": text_pair})

    @overload
    def score(self, task: str, text: str, text_pair: str | None = None) -> Value: ...
    @overload
    def score(self, task: str, text: ManyTexts, text_pair: ManyTexts | None = None) -> list[Value]: ...
    def score(self, task: str, text: Texts, text_pair: Texts | None = None) -> Any:
        """A regression's value."""
        return self._typed(Value, task, {"TEXT": text, "TEXT_PAIR": text_pair})

    @overload
    def answer(self, task: str, question: str, context: str, **parameters: Any) -> Answer: ...
    @overload
    def answer(self, task: str, question: ManyTexts, context: ManyTexts, **parameters: Any) -> list[Answer]: ...
    def answer(self, task: str, question: Texts, context: Texts, **parameters: Any) -> Any:
        """Where a context of any length answers a question; `parameters` such as top_k=3."""
        return self._typed(Answer, task, {"QUESTION": question, "CONTEXT": context}, parameters)

    @overload
    def entities(self, task: str, text: str, **parameters: Any) -> Entities: ...
    @overload
    def entities(self, task: str, text: ManyTexts, **parameters: Any) -> list[Entities]: ...
    def entities(self, task: str, text: Texts, **parameters: Any) -> Any:
        """The entities of a text of any length."""
        return self._typed(Entities, task, {"TEXT": text}, parameters)

    @overload
    def choose(self, task: str, text: str, choices: list[str] | tuple[str, ...]) -> Choice: ...
    @overload
    def choose(self, task: str, text: ManyTexts, choices: ManyTexts) -> list[Choice]: ...
    def choose(self, task: str, text: Texts, choices: Any) -> Any:
        """Which of its choices continues each text: `text` [N], `choices` [N, C]; or one text and its list."""
        return self._typed(Choice, task, {"TEXT": text, "CHOICES": choices})

    def ask(self, task: str, parameters: Mapping[str, Any] | None = None, **columns: Texts) -> Any:
        """Answers as plain Python: a dict for plain texts, a list of dicts where any column is a list or an array."""
        answers = as_records(self.infer(task, columns, parameters))
        return answers[0] if wire.single(columns) else answers

    def infer(
        self, task: str, columns: Mapping[str, Texts], parameters: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """The reply's tensors by name for texts by tensor name; BYTES come as `str`.

        Raises ClientError and its kinds.
        """
        tensors = wire.request_tensors(self._protocol, columns, self._max_bytes)
        once = self._infer_grpc if self._address.grpc else self._infer_http
        deadline_s = time.monotonic() + self.timeout_s
        for attempt in range(1, self.retries + 2):
            try:
                return once(task, tensors, wire.sendable(parameters), deadline_s - time.monotonic())
            except ClientError as error:
                pause_s = wire.pause_s(attempt)
                late = time.monotonic() + pause_s >= deadline_s
                if attempt > self.retries or late or not wire.may_retry(error):
                    raise
                time.sleep(pause_s)
        raise AssertionError

    def ready(self, task: str | None = None) -> bool:
        """Whether the server, or one of its tasks, is ready; `bertship.health` asks for answers."""
        try:
            if self._address.grpc:
                client, headers = self._client, self._headers
                return bool(client.is_model_ready(task, headers=headers) if task else client.is_server_ready(headers))
            path = f"/v2/models/{quote(task, safe='')}/ready" if task else "/v2/health/ready"
            return self._call("GET", path, None, {}, self.timeout_s)[0] == 200
        except Exception:  # no connection is an answer here
            return False

    def tasks(self) -> list[str]:
        """Names of the tasks that are served: the ensembles, their steps left out."""
        what = "the list of tasks"
        if self._address.grpc:
            try:
                stats = self._client.get_inference_statistics(headers=self._headers, client_timeout=self.timeout_s)
            except Exception as error:
                raise wire.grpc_error(what, self.url, error, self.timeout_s, self._max_bytes) from None
            return wire.served_tasks(model.name for model in stats.model_stats)
        body = self._exchange(what, "GET", "/v2/models/stats", None, {}, self.timeout_s)[1]
        return wire.served_tasks(model["name"] for model in json.loads(body)["model_stats"])

    def labels(self, task: str) -> tuple[str, ...]:
        """The labels of a task in the order of its PROBABILITIES, as the server's configuration names them.

        Empty for a task without them. Raises ClientError and its kinds.
        """
        return wire.labels_of(self._config(task))

    def inputs(self, task: str) -> tuple[str, ...]:
        """The names of what a task is asked with, as TEXT and TEXT_PAIR. Raises ClientError and its kinds."""
        return wire.inputs_of(self._config(task))

    def _config(self, task: str) -> dict[str, Any]:
        """The configuration of a task's ensemble, as JSON."""
        if self._address.grpc:
            try:
                asked = {"headers": self._headers, "client_timeout": self.timeout_s}
                return dict(self._client.get_model_config(task, as_json=True, **asked)["config"])
            except Exception as error:
                raise wire.grpc_error(task, self.url, error, self.timeout_s, self._max_bytes) from None
        path = infer_path(task).removesuffix("infer") + "config"
        return dict(json.loads(self._exchange(task, "GET", path, None, {}, self.timeout_s)[1]))

    def _typed(
        self, kind: type[R], task: str, columns: Mapping[str, Texts | None], parameters: Mapping[str, Any] | None = None
    ) -> Any:
        given = {name: texts for name, texts in columns.items() if texts is not None}
        results = typed(kind, task, as_records(self.infer(task, given, parameters)))
        return results[0] if wire.single(given) else results

    def _infer_grpc(
        self, task: str, tensors: list[Any], parameters: dict[str, Any] | None, left_s: float
    ) -> dict[str, np.ndarray]:
        try:
            reply = self._client.infer(
                task,
                tensors,
                parameters=parameters,
                headers=self._headers,
                client_timeout=left_s,
                timeout=int(left_s * 1e6),
            )
        except Exception as error:
            raise wire.grpc_error(task, self.url, error, self.timeout_s, self._max_bytes) from None
        return wire.reply_tensors(reply)

    def _infer_http(
        self, task: str, tensors: list[Any], parameters: dict[str, Any] | None, left_s: float
    ) -> dict[str, np.ndarray]:
        module = self._protocol.InferenceServerClient
        try:
            body, json_size = module.generate_request_body(tensors, parameters=parameters, timeout=int(left_s * 1e6))
        except Exception as error:
            raise InvalidRequest(f"{task}: the request cannot be sent: {' '.join(str(error).split())}") from None
        path, headers = infer_path(task), infer_headers(json_size)
        reply_headers, reply = self._exchange(task, "POST", path, body, headers, left_s)
        return wire.parsed(self._protocol, task, self.url, reply_headers, reply)

    def _exchange(
        self, task: str, method: str, path: str, body: bytes | None, headers: Mapping[str, str], left_s: float
    ) -> tuple[Message, bytes]:
        """A call whose failures are ours to name."""
        try:
            status, reply_headers, reply = self._call(method, path, body, headers, left_s)
        except NotConnected as error:
            raise wire.unreachable(task, self.url, error) from None
        except ReplyTooLarge as error:
            raise wire.too_large(task, self.url, self._max_bytes, error.args[0]) from None
        except TimeoutError:
            raise wire.timed_out(task, self.url, self.timeout_s) from None
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise ServerFault(f"{task}: the connection to {self.url} broke before the answer: {reason}") from None
        if status != 200:
            raise wire.http_error(task, self.url, status, reply_headers, reply, self.timeout_s, self._max_bytes)
        return reply_headers, reply

    def _call(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], left_s: float
    ) -> tuple[int, Message, bytes]:
        return self._pool.call(method, path, body, {**self._headers, **headers}, left_s, self._max_bytes)


def check_settings(timeout_s: float, retries: int, pool_size: int, max_message_mib: int) -> None:
    """Refuse a client's settings that make no sense. Raises InputError."""
    if not timeout_s > 0:
        raise InputError(f"timeout_s={timeout_s!r}: more than 0 seconds are needed")
    for name, value, least in (("retries", retries, 0), ("pool_size", pool_size, 1)):
        if value < least:
            raise InputError(f"{name}={value!r}: at least {least} is needed")
    if not 1 <= max_message_mib <= 2047:  # gRPC counts in 32 bits
        raise InputError(f"max_message_mib={max_message_mib!r}: 1 to 2047 are possible")


def infer_path(task: str) -> str:
    return f"/v2/models/{quote(task, safe='')}/infer"


def infer_headers(json_size: int | None) -> dict[str, str]:
    kind = {"Content-Type": "application/octet-stream"}
    return kind if json_size is None else kind | {"Inference-Header-Content-Length": str(json_size)}
