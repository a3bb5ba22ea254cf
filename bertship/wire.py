"""What the clients share: addresses, texts as tensors, limits, and errors as `bertship.errors` names them."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Any

import numpy as np

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
    seen,
)
from bertship.health import STEPS, error_text
from bertship.tasks import KINDS

ManyTexts = list[Any] | tuple[Any, ...] | np.ndarray
Headers = Message | Mapping[str, str]
Texts = str | bytes | ManyTexts | Sequence[Any]

TABLES = {spec.name for kind in KINDS.values() for spec in kind.request() if len(spec.dims) > 1}  # lists of texts
LABELS = "labels"  # the parameter of a task's ensemble that has its labels, as a JSON list
POOL_SIZE = 32  # idle connections that are kept
MAX_MESSAGE_MIB = 64  # far above the 4 MB that a request's 1,000,000 characters can come to
_MIB = 1 << 20
# gRPC statuses that say what HTTP says by its number
_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "DEADLINE_EXCEEDED": 504,
    "UNAVAILABLE": 503,
    "RESOURCE_EXHAUSTED": 413,
    "CANCELLED": 499,
}


@dataclass(frozen=True)
class Address:
    """Where a server is: `authority` is HOST:PORT, and what may follow it over HTTP."""

    url: str
    grpc: bool
    secure: bool
    authority: str

    @staticmethod
    def parse(url: str) -> "Address":
        """http://, https://, grpc:// or grpcs:// HOST:PORT. Raises InputError."""
        scheme, separator, authority = url.rstrip("/").partition("://")
        if not separator or scheme not in ("http", "https", "grpc", "grpcs") or not authority.strip("/"):
            raise InputError(f"address {url!r}: http://HOST:PORT or grpc://HOST:PORT is needed")
        return Address(url, scheme.startswith("grpc"), scheme.endswith("s"), authority)


def arrays(columns: Mapping[str, Texts]) -> dict[str, np.ndarray]:
    """Texts by tensor name as BYTES arrays: a text or a list [N]; an array [N] or [N, 1] as [N]; choices [N, C].

    One question's choices may come as a plain list of them.

    Raises InputError for what is no string, and for lists of lists of unequal length.
    """
    made = {}
    for name, texts in columns.items():
        if name in TABLES:
            texts = _lists(name, texts)
        if isinstance(texts, str | bytes):
            texts = [texts]
        elif not isinstance(texts, np.ndarray):
            try:
                texts = list(texts)
            except TypeError:
                raise InputError(f"{name} is {seen(texts)}, a text or a list of texts is needed") from None
        shape = np.shape(texts) if isinstance(texts, np.ndarray) else _shape(name, texts)
        values = np.empty(int(np.prod(shape)), object)
        values[:] = [_bytes(name, text) for text in _flat(texts)]
        made[name] = values.reshape(shape) if name in TABLES or (len(shape) > 1 and shape[-1] > 1) else values
    return made


def listed(texts: Texts) -> ManyTexts:
    """A plain text as a list of one."""
    return [texts] if isinstance(texts, str | bytes) else texts if isinstance(texts, np.ndarray) else list(texts)


def single(columns: Mapping[str, Texts]) -> bool:
    """Whether a request is for one answer: every column is a plain text, or one text's choices."""
    return all(_is_one(value) if name in TABLES else isinstance(value, str | bytes) for name, value in columns.items())


def _is_one(lists: Any) -> bool:
    """Whether a column of lists of texts is one such list alone."""
    return len(lists) > 0 and isinstance(lists[0], str | bytes)


def _lists(name: str, texts: Any) -> Any:
    """A column of lists of texts, of one list where it is one list alone. Raises InputError."""
    if isinstance(texts, str | bytes) or not hasattr(texts, "__len__"):
        raise InputError(f"{name} is {seen(texts)}; a list of texts, or a list of such lists, is needed")
    return [texts] if _is_one(texts) else texts


def request_tensors(protocol: Any, columns: Mapping[str, Texts], max_bytes: int) -> list[Any]:
    """The request's tensors for a tritonclient module. Raises InputError, or MessageTooLarge before it is sent."""
    tensors, size = [], 0
    for name, values in arrays(columns).items():
        tensor = protocol.InferInput(name, list(values.shape), "BYTES")
        tensor.set_data_from_numpy(values)
        size += sum(len(text) + 4 for text in values.ravel())
        tensors.append(tensor)
    if size > max_bytes:
        raise MessageTooLarge(
            f"the request has {size / _MIB:.1f} MiB, {max_bytes // _MIB} MiB are allowed (max_message_mib): "
            "send fewer or shorter texts"
        )
    return tensors


def reply_tensors(reply: Any) -> dict[str, np.ndarray]:
    """A tritonclient reply's tensors by name; BYTES come as `str`."""
    response = reply.get_response()
    outputs = response["outputs"] if isinstance(response, dict) else response.outputs
    names = [output["name"] if isinstance(output, dict) else output.name for output in outputs]
    return {name: _decoded(reply.as_numpy(name)) for name in names}


def sendable(parameters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Parameters as both protocols carry them: no null, no fractions. Raises InputError for what is no mapping."""
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InputError(f"parameters are {seen(parameters)}, a mapping is needed; texts go by name, as in TEXT=...")
    sent = {
        name: "none" if v is None else str(v) if isinstance(v, float) else v for name, v in (parameters or {}).items()
    }
    return sent or None


def channel_options(max_bytes: int) -> list[tuple[str, int]]:
    """gRPC's own limits, said outright, and a quick look again for a server that was away."""
    return [
        ("grpc.max_send_message_length", max_bytes),
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


def served_tasks(names: Iterable[str]) -> list[str]:
    """Of the loaded models' names the tasks: what has a step `NAME_encode`."""
    known = set(names)
    return sorted(name for name in known if any(f"{name}_{step}" in known for step in STEPS))


def too_large(task: str, url: str, max_bytes: int, size: int = 0) -> MessageTooLarge:
    seen = f"has {size / _MIB:.1f} MiB, " if size else "is larger than the limit: "
    return MessageTooLarge(
        f"{task}: the reply of {url} {seen}{max_bytes // _MIB} MiB are allowed (max_message_mib): ask for less at once"
    )


def timed_out(task: str, url: str, timeout_s: float) -> RequestTimeout:
    return RequestTimeout(f"{task}: no answer from {url} within {timeout_s:g} s")


def unreachable(task: str, url: str, reason: object) -> ServerUnavailable:
    return ServerUnavailable(f"{task}: no server at {url}: {reason}; start one with `make serve`, or give its address")


def refused(task: str, url: str, status: int, message: str, timeout_s: float, max_bytes: int) -> ClientError:
    """A server's refusal, by HTTP status and text, as an error to raise."""
    message = re.sub(r"^in ensemble '[^']*', ", "", re.sub(r"\[request id: <id_unknown>\] ", "", message))
    message = " ".join(message.split())
    if re.match("<!doctype|<html|<head|<body", message, re.IGNORECASE):
        kind = ServerFault if status >= 500 else ServerUnavailable  # of a proxy in between, it may be
        return kind(f"{task}: what answers at {url} is no Triton server: a page, HTTP status {status}")
    if status in (408, 504) or "timeout expired" in message.lower():
        return timed_out(task, url, timeout_s)
    if "no available versions" in message or "is not ready" in message:
        return TaskUnavailable(f"{task} is not ready at {url}: {message}")
    if "unknown model" in message or "is not found" in message or status == 404:
        return TaskUnavailable(f"{task} is not served at {url}: {message}")
    if status == 429 or "maximum queue size" in message:
        return ServerBusy(f"{task}: the queue of {url} is full: {message}; ask again later")
    if status == 413:
        return MessageTooLarge(f"{task}: {message}; {max_bytes // _MIB} MiB are allowed here (max_message_mib)")
    if status == 503:
        return ServerUnavailable(f"{task}: {url} cannot answer now: {message}")
    if 400 <= status < 500:
        inputs = re.search(r"unexpected inference input|expected \d+ inputs? but got", message)
        return InvalidRequest(message, f"Client.inputs({task!r}) names its inputs" if inputs else "")
    return ServerFault(f"{task}: {url} failed: {message or f'HTTP status {status}'}")


def http_error(
    task: str, url: str, status: int, headers: Headers, reply: bytes, timeout_s: float, max_bytes: int
) -> ClientError:
    """An HTTP reply other than 200 as an error to raise: Triton's words, or that it is not Triton who answers."""
    said = error_text(reply)
    if not said and status in (404, 405, 501):  # Triton knows the path, and says in JSON what it lacks
        return no_triton(task, url, f"HTTP status {status}", headers)
    if not said and b"<" not in reply[:1].strip() and "html" not in headers.get("Content-Type", ""):
        said = reply[:200].decode("utf-8", "replace")
    return refused(task, url, status, said or f"HTTP status {status}", timeout_s, max_bytes)


def no_triton(task: str, url: str, seen: str, headers: Headers) -> ServerUnavailable:
    kind = headers.get("Content-Type", "").partition(";")[0]
    return ServerUnavailable(
        f"{task}: what answers at {url} is no Triton ({seen}{f', {kind}' if kind else ''}): give the server's own "
        "address, or start it on another port (`make serve HTTP_PORT=18000`)"
    )


def parsed(protocol: Any, task: str, url: str, headers: Headers, reply: bytes) -> dict[str, np.ndarray]:
    """The tensors of an HTTP reply with status 200. Raises ServerUnavailable where it is none of Triton's."""
    length = headers.get("Inference-Header-Content-Length")
    try:
        result = protocol.InferenceServerClient.parse_response_body(
            reply, header_length=int(length) if length else None
        )
        return reply_tensors(result)
    except (ValueError, KeyError, TypeError):
        raise no_triton(task, url, "no inference reply", headers) from None


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels that a task's configuration on the server, as JSON, names among its parameters; () for none."""
    found = config.get("parameters", {}).get(LABELS, {}).get("string_value", "")
    return tuple(json.loads(found)) if found else ()


def inputs_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The inputs that a task's configuration on the server, as JSON, names."""
    return tuple(tensor["name"] for tensor in config.get("input", ()))


def grpc_error(task: str, url: str, error: Exception, timeout_s: float, max_bytes: int) -> ClientError:
    """An error of tritonclient.grpc as one of ours."""
    from tritonclient.utils import InferenceServerException

    if not isinstance(error, InferenceServerException):
        return InvalidRequest(f"{task}: the request cannot be sent: {' '.join(str(error).split())}")
    name = str(error.status()).rpartition(".")[2]
    message = " ".join((error.message() or str(error)).split())
    if name == "UNAVAILABLE" and unsent(message):
        return unreachable(task, url, message)
    if name == "UNAVAILABLE" and ("socket closed" in message.lower() or "reset" in message.lower()):
        return ServerFault(f"{task}: the connection to {url} broke before the answer: {message}")
    if name == "RESOURCE_EXHAUSTED" and "eceived message larger" in message:
        return too_large(task, url, max_bytes)
    if name == "CANCELLED" and "timeout" in message.lower():
        return timed_out(task, url, timeout_s)
    return refused(task, url, _STATUSES.get(name, 500), message, timeout_s, max_bytes)


def unsent(message: str) -> bool:
    """Whether gRPC's words say that no connection was made, so nothing can have been sent."""
    return any(
        said in message.lower()
        for said in ("failed to connect to all addresses", "connection refused", "dns resolution failed")
    )


def may_retry(error: ClientError) -> bool:
    """Whether asking again is safe: nothing was sent, or the server refused before it began.

    Never after a timeout or a broken connection: the server may still be at work on the first one.
    """
    if isinstance(error, ServerBusy):
        return True
    if isinstance(error, TaskUnavailable):
        return "is not ready at" in str(error)  # being loaded (again), not unknown
    return isinstance(error, ServerUnavailable) and "no server at" in str(error)


def pause_s(attempt: int) -> float:
    """Seconds before attempt 1, 2, ...: 0.1, 0.2, 0.4 up to 2."""
    return float(min(0.1 * 2 ** (attempt - 1), 2.0))


def _shape(name: str, texts: Sequence[Any]) -> tuple[int, ...]:
    widths = {len(text) if isinstance(text, list | tuple | np.ndarray) else 0 for text in texts}
    if widths <= {0}:
        return (len(texts),)
    if len(widths) > 1:
        raise InputError(f"{name}: lists of {', '.join(map(str, sorted(widths)))} texts; all need the same number")
    return (len(texts), widths.pop())


def _flat(texts: Any) -> list[Any]:
    if isinstance(texts, np.ndarray):
        return list(texts.ravel())
    return [item for text in texts for item in (_flat(text) if isinstance(text, list | tuple | np.ndarray) else [text])]


def _bytes(name: str, text: Any) -> bytes:
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str):
        raise InputError(f"a text of {name} is {seen(text)}, a string is needed")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"a text of {name} has a lone surrogate at character {error.start}; decode it rightly first"
        ) from None


def _decoded(values: np.ndarray) -> np.ndarray:
    if values.dtype != object:
        return values
    return np.array([v.decode("utf-8") if isinstance(v, bytes) else v for v in values.ravel()], object).reshape(
        values.shape
    )
