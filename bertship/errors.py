"""The exception tree. Every message is one line: what, where, the value seen, what to do.

BertshipError
├── InputError        wrong usage or input                      exit code 2
├── CheckFailed       a gate or a comparison did not hold       exit code 1
└── ClientError       asking a server failed                    exit code 1
    ├── InvalidRequest        the server refused what was asked; asking again is no use
    │   └── MessageTooLarge   a request or a reply has more bytes than `max_message_mib`
    ├── ServerUnavailable     nothing was answered, and nothing was begun: ask again, later or elsewhere
    │   ├── TaskUnavailable   the server is there, the task is not served, or not at this moment
    │   └── ServerBusy        the queue is full
    ├── RequestTimeout        no answer within `timeout_s`
    └── ServerFault           the server, or the connection to it, broke while it answered
"""


def seen(value: object, most: int = 60) -> str:
    """A value for a message: as Python writes it, cut to `most` characters and an ellipsis where it is longer."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most].rstrip()} ..."


def counted(number: int, noun: str) -> str:
    """`1 row`, `2,000 rows`: a number and what it counts, in messages."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


class BertshipError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class InputError(BertshipError):
    """Wrong usage, configuration or data."""

    exit_code = 2


class CheckFailed(BertshipError):
    """A gate or a comparison did not hold; nothing was published."""


class ClientError(BertshipError):
    """Asking a server failed."""


class InvalidRequest(ClientError):
    """The server understood the request and refused it (INVALID_ARG).

    `reason` is the server's own; `hint`, which the text ends with, says what to do in Python.
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(f"{reason}; {hint}" if hint else reason)
        self.reason = reason


class MessageTooLarge(InvalidRequest):
    """A request that was not sent, or a reply that was not read: it has more bytes than `max_message_mib`."""


class ServerUnavailable(ClientError):
    """No server answered at the address, or the model is not ready."""


class TaskUnavailable(ServerUnavailable):
    """The server answers, and does not serve the task: never, or not until it has been loaded (again)."""


class ServerBusy(ServerUnavailable):
    """The server's queue is full."""


class RequestTimeout(ClientError):
    """No answer within `timeout_s`; what the server had not begun by then, it drops."""


class ServerFault(ClientError):
    """The server failed at a request that it had taken, or the connection broke before its answer was there."""
