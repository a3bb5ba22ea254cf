"""Ask a served task: a thin, typed layer over tritonclient, HTTP or gRPC by the address."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertship.errors import ClientError, InputError, InvalidRequest, RequestTimeout, ServerUnavailable
from bertship.pipeline import as_records
from bertship.tasks import KINDS

Texts = str | Sequence[Any] | np.ndarray
_TABLES = {spec.name for kind in KINDS.values() for spec in kind.request() if len(spec.dims) > 1}


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

        A text, a list and an array of any rank are taken alike; CHOICES are one question's list, or a list of lists.
        Raises ClientError and its kinds.
        """
        tensors = []
        for name, texts in columns.items():
            values = _table(name, texts) if name in _TABLES else _flat(texts)
            tensor = self._protocol.InferInput(name, list(values.shape), "BYTES")
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
        single = all(_is_one(texts) if name in _TABLES else isinstance(texts, str) for name, texts in columns.items())
        return answers[0] if single else answers

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


def _flat(texts: Texts) -> np.ndarray:
    if isinstance(texts, str | bytes):
        return np.array([_bytes(texts)], object)
    return np.array([_bytes(text) for text in np.asarray(texts, dtype=object).ravel()], object)


def _is_one(lists: Any) -> bool:
    """Whether a column of lists of texts is one such list alone."""
    return len(lists) > 0 and isinstance(lists[0], str | bytes)


def _table(name: str, lists: Any) -> np.ndarray:
    if isinstance(lists, str | bytes) or not hasattr(lists, "__len__"):
        raise InputError(f"{name} is {lists!r:.60}; a list of texts, or a list of such lists, is needed")
    rows = [list(texts) for texts in ([lists] if _is_one(lists) else lists)]
    widths = {len(texts) for texts in rows}
    if len(widths) > 1:
        raise InputError(f"{name} has lists of {min(widths)} to {max(widths)} texts; one request needs the same number")
    values = np.empty((len(rows), widths.pop() if widths else 0), object)
    for i, texts in enumerate(rows):
        values[i] = [_bytes(text) for text in texts]
    return values


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
