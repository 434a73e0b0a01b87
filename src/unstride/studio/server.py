"""The page's server: Python's own, fixed routes, and an eye on who asks.

No path of a request is ever joined to a folder: pages are read at the start, everything else is looked up in lists.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from urllib.parse import parse_qs, urlsplit

from unstride.errors import OptionError, UnstrideError
from unstride.studio.room import PATIENCE, UPLOAD_BYTES, Busy, Studio, packed

WAITING = 4  # uploads that are held in memory, the one being computed included

PAGES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/studio.css": ("studio.css", "text/css; charset=utf-8"),
    "/studio.js": ("studio.js", "text/javascript; charset=utf-8"),
    "/draw.js": ("draw.js", "text/javascript; charset=utf-8"),
    "/story.js": ("story.js", "text/javascript; charset=utf-8"),
    "/tuning.js": ("tuning.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class StudioServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # of those that call in one moment; Python's 5 would hang up on a page full of images

    def __init__(self, studio: Studio, host: str, port: int) -> None:
        self.studio, self.host = studio, host
        self.uploads = threading.BoundedSemaphore(WAITING)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        folder = resources.files("unstride.studio").joinpath("page")
        self.pages = {path: (folder.joinpath(name).read_bytes(), kind) for path, (name, kind) in PAGES.items()}
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"


def make_server(studio: Studio, host: str = "127.0.0.1", port: int = 7860) -> StudioServer:
    """A server that is bound and waits for `serve_forever()`; port 0 takes any free one (`server.url` tells it)."""
    try:
        return StudioServer(studio, host, port)
    except (OSError, OverflowError) as error:
        raise OptionError(f"cannot listen at {host}, port {port} ({error}); choose another with --port") from error


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def trusted(header: str | None, bound: str) -> bool:
    """Whether a Host header names this server. A page of another site that points its own name here does not."""
    try:
        name = urlsplit(f"//{header or ''}").hostname
        if not name or "@" in str(header):
            return False
        if is_loopback(name) or name == bound.lower():
            return True
        return ipaddress.ip_address(name) is not None and not is_loopback(bound)  # a bare address cannot be re-pointed
    except ValueError:
        return False


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: StudioServer
    server_version, sys_version = "unstride", ""
    timeout = 30  # seconds for a client that stops in the middle of a request

    def do_GET(self) -> None:
        self._handle({"/api/models": self._models, "/api/layers": self._layers, "/api/tune": self._tune})

    def do_POST(self) -> None:
        self._handle({"/api/look": self._look, "/api/tune": self._tune})

    # -- routes
    def _models(self, asked: dict[str, str]) -> bytes:
        return self.server.studio.catalogue()

    def _layers(self, asked: dict[str, str]) -> bytes:
        return self.server.studio.layers(asked.get("model", ""))

    def _tune(self, asked: dict[str, str]) -> bytes:
        return self.server.studio.tune(asked.get("model", ""), start=self.command == "POST")

    def _look(self, asked: dict[str, str]) -> bytes:
        size = self._size()
        if not self.server.uploads.acquire(timeout=PATIENCE):
            self._drain(size)
            raise Busy("too many images are waiting; try again when they are done")
        try:
            body = self._body(size)
            return self.server.studio.look(asked.get("model", ""), asked.get("sample", body), asked.get("recipe"))
        finally:
            self.server.uploads.release()

    # -- around them
    def _handle(self, routes: dict[str, Callable[[dict[str, str]], bytes]]) -> None:
        try:
            self._check()
            path, query = self._asked()
            if path in self.server.pages and self.command == "GET":
                self._send(HTTPStatus.OK, *self.server.pages[path])
            elif path in routes:
                self._json(HTTPStatus.OK, routes[path](query))
            else:
                raise _Refused(HTTPStatus.NOT_FOUND, "there is no such page here")
        except _Refused as error:
            self._error(error.status, str(error))
        except Busy as error:
            self._error(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except UnstrideError as error:
            self._error(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except OSError:
            self.close_connection = True  # the client went away, or stopped in the middle
        except Exception as error:
            traceback.print_exc(file=sys.stderr)  # for whoever runs the server, not for the page
            kind = type(error).__name__
            self._error(HTTPStatus.INTERNAL_SERVER_ERROR, f"that went wrong ({kind}); the terminal says more")

    def _check(self) -> None:
        if not trusted(self.headers.get("Host"), self.server.host):
            raise _Refused(HTTPStatus.FORBIDDEN, f"this page is at {self.server.url}, not under the name you asked for")
        origin = self.headers.get("Origin")
        try:
            foreign = origin is not None and urlsplit(origin).netloc != self.headers.get("Host")
        except ValueError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, "the Origin of this request cannot be understood") from error
        foreign |= self.headers.get("Sec-Fetch-Site") == "cross-site"
        if foreign and self.path != "/":  # a link to the page is fine
            raise _Refused(HTTPStatus.FORBIDDEN, "another site may not use this page")

    def _asked(self) -> tuple[str, dict[str, str]]:
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, keep_blank_values=True, max_num_fields=8)
        except ValueError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, "this address cannot be understood") from error
        return parts.path, {name: values[0] for name, values in query.items()}

    def _size(self) -> int:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 16):
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "the size of the file must come first (Content-Length)")
        size = int(length)
        if size > UPLOAD_BYTES:
            self._drain(min(size, 4 * UPLOAD_BYTES))  # a browser that still writes would not read the answer
            raise _Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the file has {size / 2**20:.0f} MB; at most {UPLOAD_BYTES >> 20} MB are allowed here",
            )
        return size

    def _body(self, size: int) -> bytes:
        body = self.rfile.read(size)
        if len(body) != size:
            raise _Refused(HTTPStatus.BAD_REQUEST, "the upload broke off")
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
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            **HEADERS,
            **(more or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Silence: the terminal is for errors."""
