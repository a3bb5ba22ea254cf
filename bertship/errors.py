"""The exception tree. Every message is one line: what, where, the value seen, what to do.

BertshipError
├── InputError        wrong usage or input                      exit code 2
├── CheckFailed       a gate or a comparison did not hold       exit code 1
└── ClientError       asking a server failed                    exit code 1
    ├── InvalidRequest      the server refused what was asked
    ├── ServerUnavailable   no server, or the model is not ready
    └── RequestTimeout      no answer within `timeout_s`
"""


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
    """The server understood the request and refused it (INVALID_ARG)."""


class ServerUnavailable(ClientError):
    """No server answered at the address, or the model is not ready."""


class RequestTimeout(ClientError):
    """No answer within `timeout_s`."""
