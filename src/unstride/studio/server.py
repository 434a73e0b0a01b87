"""The page's server: Python's own, with fixed routes, checks of who asks, and bounds on connections, sizes and time.

No path of a request is ever joined to a folder: pages are read at the start, everything else is looked up in lists.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from unstride.errors import OptionError, UnstrideError
from unstride.studio.studio import UPLOAD_BYTES, Busy, Studio, packed

CONNECTIONS = 32  # that may wait for their client at once
SECONDS = 30.0  # for a client to send its request, or to take its answer
TURNS = 16  # requests that may wait for their turn, each with an upload in memory

PAGES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/studio.css": ("studio.css", "text/css; charset=utf-8"),
    "/studio.js": ("studio.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Connections:
    """The connections that wait for their client. Where there are too many, the one that waits longest is closed."""

    def __init__(self, limit: int = CONNECTIONS, seconds: float = SECONDS) -> None:
        self.limit, self.seconds = limit, seconds
        self._since: dict[socket.socket, float] = {}  # the oldest first
        self._lock = threading.Lock()

    def wait(self, connection: socket.socket) -> None:
        """From now on the client has to send, or to receive."""
        with self._lock:
            self._since.pop(connection, None)
            self._since[connection] = time.monotonic()
            while len(self._since) > self.limit:
                self._close(next(iter(self._since)))

    def ready(self, connection: socket.socket) -> None:
        """The request is complete, or the answer is sent."""
        with self._lock:
            self._since.pop(connection, None)

    def close_expired(self) -> None:
        with self._lock:
            for connection, since in list(self._since.items()):
                if time.monotonic() - since > self.seconds:
                    self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        """Its thread reads the end of the stream."""
        del self._since[connection]
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class StudioServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # Python's 5 would refuse a page full of images

    def __init__(self, studio: Studio, host: str, port: int) -> None:
        self.studio, self.host = studio, host
        self.connections, self.turns = Connections(), threading.BoundedSemaphore(TURNS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        folder = resources.files("unstride.studio").joinpath("page")
        self.pages = {path: (folder.joinpath(name).read_bytes(), kind) for path, (name, kind) in PAGES.items()}
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.wait(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.ready(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second."""
        self.connections.close_expired()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error of ours."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def make_server(studio: Studio, host: str = "127.0.0.1", port: int = 7860) -> StudioServer:
    """A server that is bound and waits for `serve_forever()`; port 0 takes any free one, and `server.url` names it."""
    try:
        return StudioServer(studio, host, port)
    except (OSError, OverflowError) as error:
        raise OptionError(f"cannot listen at {host}, port {port} ({error}). Choose another one with --port.") from error


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def trusted(header: str | None, bound: str) -> bool:
    """True if a Host header names this server. A page of another site that points its own name here does not."""
    try:
        name = urlsplit(f"//{header or ''}").hostname
        if not name or "@" in str(header):
            return False
        if is_loopback(name) or name == bound.lower():
            return True
        return ipaddress.ip_address(name) is not None and not is_loopback(bound)  # a bare address cannot be re-pointed
    except ValueError:
        return False


class _RequestError(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: StudioServer
    server_version, sys_version = "unstride", ""
    timeout = SECONDS  # of each read and write; `Connections` bounds them together

    def do_GET(self) -> None:
        self._answer({"/api/networks": self._networks, "/api/offer": self._offer})

    def do_POST(self) -> None:
        self._answer({"/api/explain": self._explain})

    # -- routes
    def _networks(self, query: dict[str, str]) -> bytes:
        return self.server.studio.catalogue()

    def _offer(self, query: dict[str, str]) -> bytes:
        return self._in_turn(lambda: self.server.studio.offer(query.get("networks", "")))

    def _explain(self, query: dict[str, str]) -> bytes:
        body = self._body(self._size())
        image: str | bytes = query.get("image", body)
        networks, recipe = query.get("networks", ""), query.get("recipe", "0")
        return self._in_turn(lambda: self.server.studio.explain(networks, recipe, image))

    def _in_turn(self, compute: Callable[[], bytes]) -> bytes:
        """The request is complete, and its client waits for us."""
        if not self.server.turns.acquire(blocking=False):
            raise Busy("Too many images are waiting. Try again when they are done.")
        self.server.connections.ready(self.connection)
        try:
            return compute()
        finally:
            self.server.turns.release()
            self.server.connections.wait(self.connection)

    # -- around them
    def _answer(self, routes: dict[str, Callable[[dict[str, str]], bytes]]) -> None:
        """Errors become words for the page; a client that went away gets nothing."""
        try:
            try:
                self._route(routes)
            except _RequestError as error:
                self._error(error.status, str(error))
            except Busy as error:
                self._error(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            except UnstrideError as error:
                self._error(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            except OSError:
                raise
            except Exception as error:
                traceback.print_exc(file=sys.stderr)  # for whoever runs the server, not for the page
                words = f"An error occurred ({type(error).__name__}). The terminal shows more."
                self._error(HTTPStatus.INTERNAL_SERVER_ERROR, words)
        except OSError:
            self.close_connection = True

    def _route(self, routes: dict[str, Callable[[dict[str, str]], bytes]]) -> None:
        self._check()
        path, query = self._address()
        if path in self.server.pages and self.command == "GET":
            self._send(HTTPStatus.OK, *self.server.pages[path])
        elif path in routes:
            self._json(HTTPStatus.OK, routes[path](query))
        else:
            raise _RequestError(HTTPStatus.NOT_FOUND, "There is no such page here.")

    def _check(self) -> None:
        if not trusted(self.headers.get("Host"), self.server.host):
            raise _RequestError(HTTPStatus.FORBIDDEN, f"This page is at {self.server.url}, not under another name.")
        origin = self.headers.get("Origin")
        try:
            foreign = origin is not None and urlsplit(origin).netloc != self.headers.get("Host")
        except ValueError as error:
            raise _RequestError(HTTPStatus.BAD_REQUEST, "The Origin of this request cannot be read.") from error
        foreign |= self.headers.get("Sec-Fetch-Site") == "cross-site"
        if foreign and self.path != "/":  # a link to the page is fine
            raise _RequestError(HTTPStatus.FORBIDDEN, "Another site may not use this page.")

    def _address(self) -> tuple[str, dict[str, str]]:
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, keep_blank_values=True, max_num_fields=8)
        except ValueError as error:
            raise _RequestError(HTTPStatus.BAD_REQUEST, "This address cannot be read.") from error
        return parts.path, {name: values[0] for name, values in query.items()}

    def _size(self) -> int:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 16):
            raise _RequestError(HTTPStatus.LENGTH_REQUIRED, "The request must say its size (Content-Length).")
        size = int(length)
        if size > UPLOAD_BYTES:
            self._drain(min(size, 4 * UPLOAD_BYTES))  # a browser that still writes would not read the answer
            most = UPLOAD_BYTES >> 20
            words = f"The file has {size / 2**20:.0f} MB; at most {most} MB are allowed here."
            raise _RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, words)
        return size

    def _body(self, size: int) -> bytes:
        body = self.rfile.read(size)
        if len(body) != size:
            raise _RequestError(HTTPStatus.BAD_REQUEST, "The upload ended early.")
        return body

    def _drain(self, size: int) -> None:
        while size > 0 and (part := self.rfile.read(min(size, 1 << 20))):
            size -= len(part)

    def _error(self, status: HTTPStatus, message: str) -> None:
        self._json(status, packed({"error": message}))

    def _json(self, status: HTTPStatus, content: bytes) -> None:
        self._send(status, content, "application/json", {"Content-Encoding": "gzip"})

    def _send(self, status: HTTPStatus, content: bytes, kind: str, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        own = {"Content-Type": kind, "Content-Length": str(len(content))}
        for name, value in {**own, **HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal is for errors."""
