"""Fixed routes, checks of who asks, bounds on connections and time, words instead of stack traces."""

import gzip
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from importlib import resources
from typing import Any

import pytest
from small_nets import photo, png, write_nets

from unstride.errors import OptionError
from unstride.pipeline import open_pipeline
from unstride.studio import Studio, make_server
from unstride.studio import server as serving
from unstride.studio.server import StudioServer, is_loopback, trusted

EXPLAIN = "/api/explain?networks=0&recipe=0"
STALLED = b"POST /api/explain?networks=0 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StudioServer]:
    studio = Studio(open_pipeline([f"{write_nets(tmp_path_factory.mktemp('nets'))}:net"], recipe="paper"))
    with make_server(studio, port=0) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(
    server: StudioServer, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        sent = {"Host": f"127.0.0.1:{server.server_address[1]}", **(headers or {})}
        if body is not None:
            sent.setdefault("Content-Length", str(len(body)))
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        if answer.getheader("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        return answer.status, dict(answer.getheaders()), content
    finally:
        connection.close()


def error_of(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    return answer[0], json.loads(answer[2])["error"]


@pytest.mark.parametrize(("path", "kind"), [("/", "html"), ("/studio.css", "css"), ("/studio.js", "javascript")])
def test_the_page_comes_with_a_policy_that_lets_nothing_else_in(server: StudioServer, path: str, kind: str) -> None:
    status, headers, content = ask(server, "GET", path)
    assert status == 200
    assert kind in headers["Content-Type"]
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert content


def test_the_page_asks_nobody_else() -> None:
    folder = resources.files("unstride.studio").joinpath("page")
    for name, _ in serving.PAGES.values():
        text = folder.joinpath(name).read_text(encoding="utf-8")
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}


def test_an_image_on_offer_and_an_upload(server: StudioServer) -> None:
    assert json.loads(ask(server, "GET", "/api/networks")[2])["networks"][0]["key"] == "0"
    offer = json.loads(ask(server, "GET", "/api/offer?networks=0")[2])
    recipes = {recipe["title"].partition(":")[0]: recipe["key"] for recipe in offer["recipes"]}
    status, _, content = ask(server, "POST", f"{EXPLAIN}&image={offer['images'][0]['key']}", b"")
    assert status == 200
    assert len(json.loads(content)["stages"][0]["passes"]) == 10
    status, _, content = ask(server, "POST", EXPLAIN, png(photo(5)))
    assert status == 200
    image = json.loads(content)["image"]
    _, _, content = ask(server, "POST", f"/api/explain?networks=0&image={image}&recipe={recipes['flip']}", b"")
    assert json.loads(content)["image"] == image  # a link to the own image, with another recipe


def test_a_bad_image_gives_a_message(server: StudioServer) -> None:
    status, message = error_of(ask(server, "POST", EXPLAIN, b"GIF89a not really"))
    assert status == 422
    assert message == "The file cannot be read as an image. It is damaged, or not an image."


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/../../../../../../etc/passwd",
        "/page/../server.py",
        "/studio.js/../../server.py",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%2f..%2f..%2fetc%2fpasswd",
        "/..\\..\\etc\\passwd",
        "//etc/passwd",
        "file:///etc/passwd",
        "/server.py",
        "/index.html",
        "/page/index.html",
        "/api/explain",
        "/api/",
        "/studio.js%00",
        "/[",
        "http://[/",
    ],
)
def test_no_file_of_the_machine_can_be_reached(server: StudioServer, path: str) -> None:
    status, _, content = ask(server, "GET", path)
    assert status in (400, 404)
    assert set(json.loads(content)) == {"error"}


@pytest.mark.parametrize("name", ["../../../etc/passwd", "%2fetc%2fpasswd", "..%2fnets.py", ""])
def test_no_parameter_names_a_file(server: StudioServer, name: str) -> None:
    images = [f"/api/explain?networks={name}&image=0", f"/api/explain?networks=0&image={name}"]
    for path in (*images, f"/api/explain?networks=0&image=0&recipe={name}"):
        assert error_of(ask(server, "POST", path, b""))[0] == 422
    assert error_of(ask(server, "GET", f"/api/offer?networks={name}"))[0] == 422


def test_another_name_for_this_address_is_refused(server: StudioServer) -> None:
    port = server.server_address[1]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "127.0.0.1@evil.example"):
        for method, path in (("GET", "/"), ("GET", "/api/networks"), ("POST", "/api/explain?networks=0&image=0")):
            assert error_of(ask(server, method, path, b"", {"Host": host}))[0] == 403
    assert ask(server, "GET", "/", None, {"Host": f"localhost:{port}"})[0] == 200


def test_other_sites_may_not_use_it(server: StudioServer) -> None:
    port, path = server.server_address[1], "/api/explain?networks=0&image=0"
    for origin in ("https://evil.example", "null", f"http://localhost:{port}", "http://127.0.0.1:1"):
        assert error_of(ask(server, "POST", path, b"", {"Origin": origin}))[0] == 403
    assert error_of(ask(server, "GET", "/api/networks", None, {"Sec-Fetch-Site": "cross-site"}))[0] == 403
    assert ask(server, "POST", path, b"", {"Origin": f"http://127.0.0.1:{port}"})[0] == 200
    assert ask(server, "GET", "/", None, {"Sec-Fetch-Site": "cross-site"})[0] == 200  # but may link to it


def test_uploads_have_a_limit(server: StudioServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "UPLOAD_BYTES", 1 << 20)
    status, message = error_of(ask(server, "POST", EXPLAIN, bytes(3 << 20)))
    assert status == 413
    assert "at most 1 MB" in message
    for length in ("-1", "1e9", "", "٣", "9" * 30):
        answer = ask(server, "POST", EXPLAIN, b"", {"Content-Length": length.encode().decode("latin-1")})
        assert answer[0] == 411
    assert ask(server, "POST", EXPLAIN, None, {"Transfer-Encoding": "chunked"})[0] == 411


def test_an_upload_that_ends_early_is_not_an_image(server: StudioServer) -> None:
    with socket.create_connection(server.server_address[:2], timeout=30) as s:
        s.sendall(STALLED)
        s.shutdown(socket.SHUT_WR)
        assert b" 400 " in s.makefile("rb").readline()
    assert ask(server, "GET", "/api/networks")[0] == 200


def test_an_unexpected_error_is_shown_in_the_terminal_only(
    server: StudioServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> bytes:
        raise RuntimeError("the secret folder")

    monkeypatch.setattr(server.studio, "explain", broken)
    status, message = error_of(ask(server, "POST", EXPLAIN, b"x"))
    assert status == 500
    assert message == "An error occurred (RuntimeError). The terminal shows more."
    assert "the secret folder" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_do_nothing(server: StudioServer, method: str) -> None:
    assert ask(server, method, "/api/explain?networks=0&image=0", b"")[0] == 501


def test_names_that_are_trusted() -> None:
    assert trusted("127.0.0.1:7860", "127.0.0.1")
    assert trusted("[::1]:7860", "::1")
    assert trusted("LOCALHOST", "127.0.0.1")
    assert not trusted("192.168.1.7:7860", "127.0.0.1")
    assert trusted("192.168.1.7:7860", "0.0.0.0")
    assert trusted("box.lan", "box.lan")
    for header in (None, "", "evil.example", "localhost.evil.example", "[::1", "a:b:c", "127.0.0.1, evil"):
        assert not trusted(header, "0.0.0.0")
    assert is_loopback("127.8.8.8")
    assert not is_loopback("0.0.0.0")


def test_a_port_that_is_taken_says_what_to_do(server: StudioServer) -> None:
    with pytest.raises(OptionError, match="--port"):
        make_server(server.studio, port=server.server_address[1])


def test_two_hundred_stalled_uploads_block_nobody(server: StudioServer) -> None:
    stalled = []
    try:
        for _ in range(200):
            stalled.append(socket.create_connection(server.server_address[:2], timeout=30))
            stalled[-1].sendall(STALLED)
        begun = time.monotonic()
        assert ask(server, "GET", "/")[0] == 200
        assert ask(server, "POST", EXPLAIN, png(photo(6)))[0] == 200
        assert time.monotonic() - begun < 10
        assert stalled[0].recv(1 << 16) == b""  # the oldest were closed
    finally:
        for connection in stalled:
            connection.close()


def test_a_client_has_a_limited_time_for_its_request(server: StudioServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.connections, "seconds", 0.3)
    with socket.create_connection(server.server_address[:2], timeout=30) as s:
        begun = time.monotonic()
        s.sendall(STALLED)
        while s.recv(1 << 16):  # an error in words, then the end
            pass
        assert time.monotonic() - begun < 10


def test_many_requests_wait_in_a_bounded_queue(server: StudioServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "turns", threading.BoundedSemaphore(1))
    assert server.turns.acquire()
    status, message = error_of(ask(server, "POST", EXPLAIN, png(photo(6))))
    assert (status, "Try again" in message) == (503, True)


def test_a_client_that_hangs_up_prints_nothing(
    server: StudioServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered = threading.Event()

    def large(*_: Any) -> bytes:
        answered.wait(30)
        return bytes(8 << 20)

    monkeypatch.setattr(server.studio, "explain", large)
    reset = struct.pack("ii", 1, 0)  # closing sends a reset
    for request in (b"GET /", STALLED, b"POST /api/explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx"):
        s = socket.create_connection(server.server_address[:2], timeout=30)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        s.sendall(request)
        time.sleep(0.1)
        s.close()
    answered.set()
    assert ask(server, "GET", "/")[0] == 200
    deadline = time.monotonic() + 10
    while any(t.name.startswith("Thread") and "process_request_thread" in t.name for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
