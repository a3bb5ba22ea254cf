"""Connections to one HTTP server, kept alive and shared by any number of threads.

tritonclient's own HTTP client is for one thread; this one lends each request a connection of its own.
"""

import http.client
import select
import threading
import time
from collections import deque
from collections.abc import Mapping
from email.message import Message
from urllib.parse import urlsplit

_CHUNK = 1 << 20


class NotConnected(Exception):
    """No connection was made: nothing has been sent."""


class ReplyTooLarge(Exception):
    """The reply has more bytes than allowed: `args[0]`, as far as it is known."""


class HttpPool:
    """`size` idle connections are kept; more are made while they are needed.

    Connections go past any proxy of the user's.
    """

    def __init__(self, url: str, size: int) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._secure = parts.hostname or "", parts.port, parts.scheme == "https"
        self.base = parts.path.rstrip("/")
        self._size, self._idle, self._lock = size, deque[http.client.HTTPConnection](), threading.Lock()

    def call(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float, max_bytes: int
    ) -> tuple[int, Message, bytes]:
        """Status, headers and body of one exchange, which as a whole takes `timeout_s` at most.

        Raises NotConnected, ReplyTooLarge, TimeoutError, and OSError or http.client.HTTPException where the connection
        broke after something was sent.
        """
        deadline_s = time.monotonic() + timeout_s
        connection = self._borrow(deadline_s)
        try:
            connection.sock.settimeout(_left(deadline_s))
            connection.request(method, self.base + path, body, dict(headers))
            connection.sock.settimeout(_left(deadline_s))
            reply = connection.getresponse()
            length = int(reply.headers.get("Content-Length") or 0)
            if length > max_bytes:
                raise ReplyTooLarge(length)
            parts, size = [], 0
            while True:
                if connection.sock is not None:  # http.client lets go of it where the server will close
                    connection.sock.settimeout(_left(deadline_s))
                part = reply.read1(_CHUNK)
                if not part:
                    break
                parts.append(part)
                size += len(part)
                if size > max_bytes:
                    raise ReplyTooLarge(size)
            will_close = reply.will_close
            reply.close()  # http.client leaves an exchange open whose body was read to its end in pieces
            if length > size:
                raise http.client.IncompleteRead(b"".join(parts), length - size)
        except BaseException:
            connection.close()
            raise
        if will_close:
            connection.close()
        else:
            self._give_back(connection)
        return reply.status, reply.headers, b"".join(parts)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()

    def _borrow(self, deadline_s: float) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                break
            if not _stale(connection):
                return connection
            connection.close()
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_left(deadline_s))
        try:
            connection.connect()
        except TimeoutError:
            raise
        except OSError as error:
            raise NotConnected(error.strerror or str(error)) from None
        return connection

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < self._size:
                self._idle.append(connection)
                return
        connection.close()


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _stale(connection: http.client.HTTPConnection) -> bool:
    """Whether the server has closed an idle connection: it is readable though nothing was asked."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))
