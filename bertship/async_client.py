"""`Client` for asyncio: the same calls, awaited."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, overload

import numpy as np

from bertship import wire
from bertship.client import check_settings, infer_headers, infer_path
from bertship.errors import ClientError, InvalidRequest, ServerFault
from bertship.pipeline import as_records
from bertship.results import Answer, Choice, Classification, Entities, R, Value, typed
from bertship.wire import Address, ManyTexts, Texts


class AsyncClient:
    """Connections to one server, HTTP or gRPC by the address, for many coroutines of one event loop.

    >>> async with AsyncClient("grpc://127.0.0.1:8001") as client:
    ...     (await client.classify("sst2", "a joy to watch")).label
    'positive'

    Settings, results and errors are those of `Client`. Over HTTP at most `pool_size` requests are under way at once;
    what waits for its turn counts towards its `timeout_s`.
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
        self._max_bytes, self._headers, self._pool_size = max_message_mib << 20, dict(headers or {}), pool_size
        self._connection: Any = None  # made when first used: it belongs to the loop that runs then
        if self._address.grpc:
            import tritonclient.grpc.aio as protocol
        else:
            import tritonclient.http as protocol
        self._protocol = protocol

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give the connections back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    @overload
    async def classify(self, task: str, text: str, text_pair: str | None = None) -> Classification: ...
    @overload
    async def classify(
        self, task: str, text: ManyTexts, text_pair: ManyTexts | None = None
    ) -> list[Classification]: ...
    async def classify(self, task: str, text: Texts, text_pair: Texts | None = None) -> Any:
        """The label of a text, or of a pair of texts."""
        return await self._typed(Classification, task, {"TEXT": text, "TEXT_PAIR": text_pair})

    @overload
    async def score(self, task: str, text: str, text_pair: str | None = None) -> Value: ...
    @overload
    async def score(self, task: str, text: ManyTexts, text_pair: ManyTexts | None = None) -> list[Value]: ...
    async def score(self, task: str, text: Texts, text_pair: Texts | None = None) -> Any:
        """A regression's value."""
        return await self._typed(Value, task, {"TEXT": text, "TEXT_PAIR": text_pair})

    @overload
    async def answer(self, task: str, question: str, context: str, **parameters: Any) -> Answer: ...
    @overload
    async def answer(self, task: str, question: ManyTexts, context: ManyTexts, **parameters: Any) -> list[Answer]: ...
    async def answer(self, task: str, question: Texts, context: Texts, **parameters: Any) -> Any:
        """Where a context of any length answers a question; `parameters` such as top_k=3."""
        return await self._typed(Answer, task, {"QUESTION": question, "CONTEXT": context}, parameters)

    @overload
    async def entities(self, task: str, text: str, **parameters: Any) -> Entities: ...
    @overload
    async def entities(self, task: str, text: ManyTexts, **parameters: Any) -> list[Entities]: ...
    async def entities(self, task: str, text: Texts, **parameters: Any) -> Any:
        """The entities of a text of any length."""
        return await self._typed(Entities, task, {"TEXT": text}, parameters)

    @overload
    async def choose(self, task: str, text: str, choices: list[str] | tuple[str, ...]) -> Choice: ...
    @overload
    async def choose(self, task: str, text: ManyTexts, choices: ManyTexts) -> list[Choice]: ...
    async def choose(self, task: str, text: Texts, choices: Any) -> Any:
        """Which of its choices continues each text: `text` [N], `choices` [N, C]; or one text and its list."""
        return await self._typed(Choice, task, {"TEXT": text, "CHOICES": choices})

    async def ask(self, task: str, parameters: Mapping[str, Any] | None = None, **columns: Texts) -> Any:
        """Answers as plain Python: a dict for plain texts, a list of dicts where any column is a list or an array."""
        answers = as_records(await self.infer(task, columns, parameters))
        return answers[0] if wire.single(columns) else answers

    async def infer(
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
                return await once(task, tensors, wire.sendable(parameters), deadline_s - time.monotonic())
            except ClientError as error:
                pause_s = wire.pause_s(attempt)
                late = time.monotonic() + pause_s >= deadline_s
                if attempt > self.retries or late or not wire.may_retry(error):
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError

    async def ready(self, task: str | None = None) -> bool:
        """Whether the server, or one of its tasks, is ready; `bertship.health` asks for answers."""
        try:
            if self._address.grpc:
                client, asked = self._grpc(), {"headers": self._headers, "client_timeout": self.timeout_s}
                return bool(await (client.is_model_ready(task, **asked) if task else client.is_server_ready(**asked)))
            path = infer_path(task).removesuffix("infer") + "ready" if task else "/v2/health/ready"
            await self._exchange(task or "the server", "GET", path, None, {}, self.timeout_s)
            return True
        except Exception:  # no connection is an answer here
            return False

    async def tasks(self) -> list[str]:
        """Names of the tasks that are served: the ensembles, their steps left out."""
        what = "the list of tasks"
        if self._address.grpc:
            try:
                asked = {"headers": self._headers, "client_timeout": self.timeout_s}
                stats = await self._grpc().get_inference_statistics(**asked)
            except Exception as error:
                raise wire.grpc_error(what, self.url, error, self.timeout_s, self._max_bytes) from None
            return wire.served_tasks(model.name for model in stats.model_stats)
        body = (await self._exchange(what, "GET", "/v2/models/stats", None, {}, self.timeout_s))[1]
        return wire.served_tasks(model["name"] for model in json.loads(body)["model_stats"])

    async def labels(self, task: str) -> tuple[str, ...]:
        """The labels of a task in the order of its PROBABILITIES, as `Client.labels` gives them."""
        return wire.labels_of(await self._config(task))

    async def inputs(self, task: str) -> tuple[str, ...]:
        """The names of what a task is asked with, as `Client.inputs` gives them."""
        return wire.inputs_of(await self._config(task))

    async def _config(self, task: str) -> dict[str, Any]:
        """The configuration of a task's ensemble, as JSON."""
        if self._address.grpc:
            try:
                asked = {"headers": self._headers, "client_timeout": self.timeout_s}
                return dict((await self._grpc().get_model_config(task, as_json=True, **asked))["config"])
            except Exception as error:
                raise wire.grpc_error(task, self.url, error, self.timeout_s, self._max_bytes) from None
        path = infer_path(task).removesuffix("infer") + "config"
        return dict(json.loads((await self._exchange(task, "GET", path, None, {}, self.timeout_s))[1]))

    async def _typed(
        self, kind: type[R], task: str, columns: Mapping[str, Texts | None], parameters: Mapping[str, Any] | None = None
    ) -> Any:
        given = {name: texts for name, texts in columns.items() if texts is not None}
        results = typed(kind, task, as_records(await self.infer(task, given, parameters)))
        return results[0] if wire.single(given) else results

    def _grpc(self) -> Any:
        if self._connection is None:
            self._connection = self._protocol.InferenceServerClient(
                self._address.authority,
                ssl=self._address.secure,
                channel_args=wire.channel_options(self._max_bytes),
            )
        return self._connection

    def _session(self) -> Any:
        import aiohttp

        if self._connection is None:
            self._connection = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._pool_size), headers=self._headers
            )
        return self._connection

    async def _infer_grpc(
        self, task: str, tensors: list[Any], parameters: dict[str, Any] | None, left_s: float
    ) -> dict[str, np.ndarray]:
        try:
            reply = await self._grpc().infer(
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

    async def _infer_http(
        self, task: str, tensors: list[Any], parameters: dict[str, Any] | None, left_s: float
    ) -> dict[str, np.ndarray]:
        module = self._protocol.InferenceServerClient
        try:
            body, json_size = module.generate_request_body(tensors, parameters=parameters, timeout=int(left_s * 1e6))
        except Exception as error:
            raise InvalidRequest(f"{task}: the request cannot be sent: {' '.join(str(error).split())}") from None
        path, headers = infer_path(task), infer_headers(json_size)
        reply_headers, reply = await self._exchange(task, "POST", path, body, headers, left_s)
        return wire.parsed(self._protocol, task, self.url, reply_headers, reply)

    async def _exchange(
        self, task: str, method: str, path: str, body: bytes | None, headers: Mapping[str, str], left_s: float
    ) -> tuple[Mapping[str, str], bytes]:
        """A call whose failures are ours to name."""
        import aiohttp

        try:
            async with self._session().request(
                method,
                self.url.rstrip("/") + path,
                data=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=left_s),
            ) as reply:
                if (reply.content_length or 0) > self._max_bytes:
                    raise wire.too_large(task, self.url, self._max_bytes, reply.content_length or 0)
                parts, size = [], 0
                async for part in reply.content.iter_any():
                    parts.append(part)
                    size += len(part)
                    if size > self._max_bytes:
                        raise wire.too_large(task, self.url, self._max_bytes, size)
                status, reply_headers, content = reply.status, reply.headers, b"".join(parts)
        except aiohttp.ClientConnectorError as error:
            raise wire.unreachable(task, self.url, error.os_error.strerror or error.os_error) from None
        except TimeoutError:
            raise wire.timed_out(task, self.url, self.timeout_s) from None
        except (OSError, aiohttp.ClientError) as error:
            reason = str(error) or type(error).__name__
            raise ServerFault(f"{task}: the connection to {self.url} broke before the answer: {reason}") from None
        if status != 200:
            raise wire.http_error(task, self.url, status, reply_headers, content, self.timeout_s, self._max_bytes)
        return reply_headers, content
