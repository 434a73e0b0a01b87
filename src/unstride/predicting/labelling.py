"""A page on this computer to label disagreements: a thumbnail, two answers in random order, saved at every click."""

from __future__ import annotations

import html
import io
import json
import secrets
import threading
import webbrowser
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import TYPE_CHECKING, Any

from unstride.errors import DataError, OptionError, UnstrideError
from unstride.predicting import labels as label_files
from unstride.predicting.containers import Entry
from unstride.predicting.inputs import ImageInputs
from unstride.predicting.labels import LabelRow
from unstride.predicting.rows import readable
from unstride.storage import strict_json
from unstride.views.images import open_image

if TYPE_CHECKING:
    from unstride.predicting.compare import Comparison

SIDE = 640  # pixels of a thumbnail
BODY = 1 << 12  # bytes of a request
SECONDS = 30.0  # for a client to send its request


class LabelPage:
    """The images to be labelled, and their labels, which are saved at once."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, self.lock = comparison, threading.Lock()
        self.rows = label_files.update(comparison.out, comparison.rows())
        wanted = {row.image for row in self.rows}
        self.entries: dict[str, Entry] = {}
        for entry in ImageInputs(comparison.inputs):
            if readable(entry.name) in wanted:
                self.entries[readable(entry.name)] = entry
        self.token = secrets.token_urlsafe(16)

    @property
    def done(self) -> bool:
        return all(row.label for row in self.rows)

    def label(self, number: Any, text: Any) -> None:
        """Label one image, or with "" take its label back."""
        if type(number) is not int or not 0 <= number < len(self.rows) or not isinstance(text, str):
            raise DataError(f"label: got row {number!r:.20} and label {text!r:.60}, expected a row and a text.")
        if text:
            self.comparison.label_of(text.strip())
        with self.lock:
            changed = list(self.rows)
            changed[number] = replace(changed[number], label=text.strip())
            label_files.write(self.comparison.out, changed)
            self.rows = changed

    def thumbnail(self, number: int) -> bytes:
        """The image as JPEG, at most SIDE pixels wide and high."""
        with self.lock:  # entries of a data set may not be read from several threads
            source = self.entries[self.rows[number].image].fetch()
        image = open_image(source)
        image.thumbnail((SIDE, SIDE))
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=90)
        return stream.getvalue()

    def html(self) -> bytes:
        """The page, with everything that it needs in it but the thumbnails."""
        data = {"rows": [_public(row) for row in self.rows], "token": self.token}
        options = "".join(f"<option>{html.escape(name)}</option>" for name in self.comparison.classes)
        text = resources.files("unstride.predicting").joinpath("labelling.html").read_text(encoding="utf-8")
        page = text.replace("__DATA__", json.dumps(data).replace("<", "\\u003c")).replace("__CLASSES__", options)
        return page.replace("__FILE__", html.escape(str(self.comparison.out))).encode()


def _public(row: LabelRow) -> dict[str, Any]:
    """What the browser sees: nothing says which recipe gave which answer."""
    return {"image": row.image, "answers": [row.answer_1, row.answer_2], "label": row.label}


class LabelServer(ThreadingHTTPServer):
    """Listens on 127.0.0.1 only."""

    daemon_threads = True

    def __init__(self, page: LabelPage, port: int = 0) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise OptionError(f"--port {port}: cannot be used ({error}). Give another, or 0 for a free one.") from error
        self.page = page

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is not worth a traceback."""


class _Handler(BaseHTTPRequestHandler):
    server: LabelServer
    timeout = SECONDS

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, respond: Any) -> None:
        port = self.server.server_address[1]
        try:
            if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
                raise PermissionError("this page has no other name")  # another site may point its own name here
            respond()
        except PermissionError as error:
            self._send(HTTPStatus.FORBIDDEN, str(error).encode())
        except (UnstrideError, ValueError, KeyError, TypeError) as error:
            self._send(HTTPStatus.BAD_REQUEST, str(error).encode())

    def _get(self) -> None:
        page = self.server.page
        kind, _, number = self.path.strip("/").partition("/")
        if not kind:
            self._send(HTTPStatus.OK, page.html(), "text/html; charset=utf-8")
        elif kind == "image" and number.isdecimal() and int(number[:9]) < len(page.rows):
            self._send(HTTPStatus.OK, page.thumbnail(int(number[:9])), "image/jpeg")
        else:
            self._send(HTTPStatus.NOT_FOUND, b"There is no such page here.")

    def _post(self) -> None:
        if not secrets.compare_digest(self.headers.get("X-Token", ""), self.server.page.token):
            raise PermissionError("another site may not label")
        length = int(self.headers.get("Content-Length", 0))
        if not 0 < length <= BODY:
            raise ValueError(f"a request of {length} bytes")
        data = strict_json.loads(self.rfile.read(length))
        self.server.page.label(data["row"], data["label"])
        self._send(HTTPStatus.OK, json.dumps({"done": self.server.page.done}).encode(), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header(
            "Content-Security-Policy",
            "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        )
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed for each request."""


def serve(comparison: Comparison, port: int = 0, show: bool = True) -> None:
    """Serve the page until Ctrl-C. Labels are in the file after every click."""
    server = LabelServer(LabelPage(comparison), port)
    print(f"label the images at {server.url}; Ctrl-C ends it, and every label is saved", flush=True)
    if show:
        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
