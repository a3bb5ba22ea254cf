"""The page and its answers over HTTP, on this machine alone.

What a browser may reach is listed here and is no more than this: the files of `page/`, the list of tasks, and one
request to one task of the one server. A page of another site can neither read an answer nor send a request: `Host` has
to be the playground's own address (against DNS rebinding), a request's `Origin` too, and its type JSON.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from bertship.errors import ClientError, InputError, seen
from serving.playground.served import Served

PAGE = Path(__file__).parent / "page"
MAX_BYTES = 64 << 20  # of one request: more than the server takes characters, whatever they are escaped as
# said here: what a machine's own table of types has for .js is not always JavaScript
_TYPES = {
    "": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # nothing from other hosts, nothing inline, in nobody's frame
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Playground:
    """The web server of the page; `url` is where it is. Port 0 takes a free one. Raises InputError for a taken one."""

    def __init__(self, served: Served, port: int = 8003, host: str = "127.0.0.1") -> None:
        self.served, self._serving = served, False
        files = {f"/{path.name}": path.read_bytes() for path in sorted(PAGE.iterdir())}
        files["/"] = files.pop("/index.html")

        class Handler(_Handler):
            playground = self
            pages = files

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(
                f"the playground cannot listen on {host}:{port}: {reason.lower()}; "
                "PLAYGROUND_PORT=N (--port N) takes another port"
            ) from None
        self._server.daemon_threads = True
        self.host, self.port = host, int(self._server.server_address[1])
        shown = "127.0.0.1" if host in ("0.0.0.0", "localhost") else host
        self.url = f"http://{shown}:{self.port}"
        # an address to listen on everywhere is reached by names that only its user knows
        self.hosts = None if host == "0.0.0.0" else {f"{name}:{self.port}" for name in (host, "127.0.0.1", "localhost")}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def serve(self) -> None:
        """Answer until `close`, or Ctrl-C."""
        self._serving = True
        self._server.serve_forever(poll_interval=0.1)

    def start(self) -> Self:
        """Answer in a thread of its own."""
        self._serving = True
        threading.Thread(target=self.serve, name="playground", daemon=True).start()
        return self

    def close(self) -> None:
        """Stop answering and give the port back."""
        if self._serving:  # else there is no loop to wait for
            self._server.shutdown()
        self._server.server_close()


class _Refused(Exception):
    """What a browser asked is not for it; status and one line."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    playground: Playground
    pages: dict[str, bytes]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "bertship", ""
    disable_nagle_algorithm = True
    wbufsize = -1  # one segment a reply, not one a header
    timeout = 120

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_POST(self) -> None:
        self._guarded(self._post)

    def _guarded(self, action: Any) -> None:
        self._body: bytes | None = None
        try:
            self._check_address()
            action(urlsplit(self.path).path)
        except _Refused as refused:
            # what was not read would be taken for the next request
            self.close_connection = self.close_connection or (self.command == "POST" and self._body is None)
            self._send_json(refused.status, {"error": str(refused)})
        except ClientError as error:
            self._send_json(502, {"error": str(error)})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the browser has gone on to the next question
        except Exception as error:  # a fault of ours; the page says so, and goes on
            self._send_json(500, {"error": f"unexpected {type(error).__name__}: {error}"})

    def _check_address(self) -> None:
        hosts = self.playground.hosts
        host = self.headers.get("Host", "")
        if hosts is not None and host not in hosts:
            raise _Refused(403, f"host {host!r} is not the playground's; it is at {self.playground.url}")
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{host}":
            raise _Refused(403, f"origin {origin!r} may not ask; open {self.playground.url} itself")

    def _get(self, path: str) -> None:
        if path == "/api/tasks":
            served = self.playground.served
            self._send_json(200, {"server": served.url, "tasks": served.tasks()})
        elif path in self.pages:
            self._send(200, self.pages[path], _TYPES[Path(path).suffix])
        else:
            raise _Refused(404, f"nothing at {seen(path, 200)}")

    def _post(self, path: str) -> None:
        parts = path.split("/")
        if len(parts) != 4 or parts[:2] != ["", "api"] or parts[2] not in ("infer", "rows"):
            raise _Refused(404, f"nothing at {seen(path, 200)}")
        if self.headers.get_content_type() != "application/json":
            raise _Refused(415, f"type {seen(self.headers.get('Content-Type'), 100)}: application/json is needed")
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            raise _Refused(411, "a request's Content-Length is needed")
        if int(length) > MAX_BYTES:
            raise _Refused(413, f"the request has {int(length):,} bytes; at most {MAX_BYTES:,} are allowed")
        self._body = self.rfile.read(int(length))
        served, task = self.playground.served, unquote(parts[3])
        if not served.knows(task):
            raise _Refused(404, f"no task {seen(task, 100)} is served at {served.url}")
        if parts[2] == "rows":
            self._send_json(200, served.rows(task, self._body))
            return
        reply = served.infer(task, self._body)
        timing = {"Server-Timing": f"triton;dur={reply.seconds * 1e3:.3f}"}
        self._send(reply.status, reply.body, "application/json", timing)

    def _send_json(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {**_HEADERS, **(more or {}), "Content-Type": kind, "Content-Length": str(len(body))}
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what is typed in the page is nobody's business."""
