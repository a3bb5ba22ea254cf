"""Ask a served task: a thin, typed layer over tritonclient, HTTP or gRPC by the address."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertship.errors import ClientError, InputError, InvalidRequest, RequestTimeout, ServerUnavailable
from bertship.pipeline import as_records

Texts = str | Sequence[str] | np.ndarray


class Client:
    """A connection to one server, HTTP (`http://127.0.0.1:8000`) or gRPC (`grpc://127.0.0.1:8001`).

    >>> with Client("http://127.0.0.1:8000") as client:
    ...     client.ask("sst2", TEXT="a joy to watch")
    {'LABEL': 'positive', 'SCORE': 0.99, ...}

    `timeout_s` bounds each request. Errors are those of `bertship.errors`: InvalidRequest, ServerUnavailable,
    RequestTimeout, all ClientError; InputError for an address that is none.
    """

    def __init__(self, url: str = "http://127.0.0.1:8000", timeout_s: float = 30.0) -> None:
        scheme, separator, address = url.rstrip("/").partition("://")
        if not separator or scheme not in ("http", "grpc") or not address:
            raise InputError(f"address {url!r}: http://HOST:PORT or grpc://HOST:PORT is needed")
        self.url, self.timeout_s, self._http = url, timeout_s, scheme == "http"
        if self._http:
            import tritonclient.http as protocol

            self._client = protocol.InferenceServerClient(
                address, concurrency=8, connection_timeout=timeout_s, network_timeout=timeout_s
            )
        else:
            import tritonclient.grpc as protocol

            self._client = protocol.InferenceServerClient(address)
        self._protocol = protocol

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()

    def infer(
        self, task: str, columns: Mapping[str, Texts], parameters: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """The reply's tensors by name for lists of texts by tensor name; BYTES come as `str`.

        A text, a list and an array of any rank are taken alike. Raises ClientError and its kinds.
        """
        tensors = []
        for name, texts in columns.items():
            values = np.array([_bytes(text) for text in _listed(texts)], object)
            tensor = self._protocol.InferInput(name, [len(values)], "BYTES")
            tensor.set_data_from_numpy(values)
            tensors.append(tensor)
        more: dict[str, Any] = {} if self._http else {"client_timeout": self.timeout_s}
        try:
            reply = self._client.infer(task, tensors, parameters=_sendable(parameters), **more)
        except Exception as error:
            raise self._error(task, error) from None
        names = [output["name"] if self._http else output.name for output in _outputs(reply)]
        return {name: _text(reply.as_numpy(name)) for name in names}

    def ask(self, task: str, parameters: Mapping[str, Any] | None = None, **columns: Texts) -> Any:
        """Answers as plain Python: a dict for plain texts, a list of dicts where any column is a list or an array."""
        tensors = self.infer(task, columns, parameters)
        answers = as_records(tensors)
        return answers[0] if all(isinstance(texts, str) for texts in columns.values()) else answers

    def ready(self, task: str | None = None) -> bool:
        """Whether the server, or one of its tasks, answers."""
        try:
            return bool(self._client.is_model_ready(task) if task else self._client.is_server_ready())
        except Exception:  # no connection is an answer here
            return False

    def tasks(self) -> list[str]:
        """Names of the tasks that are served: the ensembles, their steps left out."""
        try:
            index = self._client.get_model_repository_index()
        except Exception as error:
            raise self._error("the model list", error) from None
        names = [m["name"] for m in index] if self._http else [m.name for m in index.models]
        return sorted(name for name in names if f"{name}_encode" in names)

    def _error(self, task: str, error: Exception) -> ClientError:
        from tritonclient.utils import InferenceServerException

        message = " ".join(str(error).split())
        if isinstance(error, InferenceServerException):
            message = re.sub(r"^in ensemble '[^']*', ", "", error.message() or message)
            status = str(error.status())
            if "DEADLINE_EXCEEDED" in status:
                return RequestTimeout(f"{task}: no answer from {self.url} within {self.timeout_s:g} s")
            if "UNAVAILABLE" in status:
                return ServerUnavailable(f"{task}: no server at {self.url}, or the model is not ready: {message}")
            if "unknown model" in message or "is not found" in message or "NOT_FOUND" in status:
                return ServerUnavailable(f"{task} is not served at {self.url}: {message}")
            if status in ("400", "StatusCode.INVALID_ARGUMENT"):
                return InvalidRequest(message)
            return ClientError(f"{task}: {message}")
        if isinstance(error, ValueError | TypeError | OverflowError):
            return InvalidRequest(f"{task}: the request cannot be sent: {message}")
        if isinstance(error, TimeoutError) or "timed out" in message:
            return RequestTimeout(f"{task}: no answer from {self.url} within {self.timeout_s:g} s")
        return ServerUnavailable(f"{task}: no server at {self.url}: {message}; start one with `make serve`")


def _outputs(reply: Any) -> Sequence[Any]:
    response = reply.get_response()
    return response["outputs"] if isinstance(response, dict) else response.outputs


def _sendable(parameters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Parameters as both protocols carry them: no null, no fractions."""
    sent = {
        name: "none" if v is None else str(v) if isinstance(v, float) else v for name, v in (parameters or {}).items()
    }
    return sent or None


def _listed(texts: Texts) -> list[Any]:
    if isinstance(texts, str | bytes):
        return [texts]
    return list(np.asarray(texts, dtype=object).ravel())


def _bytes(text: Any) -> bytes:
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str):
        raise InputError(f"a text is {text!r:.60}, a string is needed")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"a text has a lone surrogate at character {error.start}; decode it rightly first") from None


def _text(values: np.ndarray) -> np.ndarray:
    if values.dtype != object:
        return values
    return np.array([v.decode("utf-8") if isinstance(v, bytes) else v for v in values.ravel()], object).reshape(
        values.shape
    )
