"""The studio under many and odd uploads: one image in memory at a time, and every error in words."""

import gzip
import http.client
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from small_nets import SOURCE, photo, png, write_nets

from unstride.errors import UnstrideError
from unstride.pipeline import open_pipeline
from unstride.studio import Studio, make_server
from unstride.studio import server as serving
from unstride.studio import studio as answering
from unstride.studio.server import StudioServer

EXPLAIN = "/api/explain?networks=0"


def opened(spec: str) -> Studio:
    return Studio(open_pipeline([spec]))


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    return opened(f"{write_nets(tmp_path_factory.mktemp('nets'))}:net")


@pytest.fixture
def server(studio: Studio) -> Iterator[StudioServer]:
    with make_server(studio, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def ask(server: StudioServer, body: bytes | None, path: str = EXPLAIN, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(
        "GET" if body is None else "POST", path, body, {k.replace("_", "-"): v for k, v in headers.items()}
    )
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    zipped = answer.getheader("Content-Encoding") == "gzip"
    return answer.status, json.loads(gzip.decompress(content), parse_constant=pytest.fail) if zipped else content


def all_at_once(server: StudioServer, bodies: list[bytes]) -> list[int]:
    found: list[int] = []
    threads = [threading.Thread(target=lambda b=b: found.append(ask(server, b)[0])) for b in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


def test_images_are_decoded_one_at_a_time_by_one_thread(server: StudioServer, monkeypatch: Any) -> None:
    inside, most, threads = [0], [0], set()
    usual = answering.open_image

    def watched(*arguments: Any, **options: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threads.add(threading.get_ident())
        time.sleep(0.05)
        inside[0] -= 1
        return usual(*arguments, **options)

    monkeypatch.setattr(answering, "open_image", watched)
    monkeypatch.setattr(answering, "explained", lambda *_: {})
    assert all_at_once(server, [png(photo(100 + k)) for k in range(12)]) == [200] * 12
    assert (most[0], len(threads)) == (1, 1)


def test_few_uploads_are_held_in_memory(server: StudioServer, monkeypatch: Any) -> None:
    inside, most, end = [0], [0], threading.Event()

    def slow(*_: Any) -> bytes:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        end.wait(0.2)
        inside[0] -= 1
        return gzip.compress(b"{}")

    monkeypatch.setattr(server.studio, "explain", slow)
    assert all_at_once(server, [bytes([k]) * 1000 for k in range(16)]) == [200] * 16
    assert most[0] <= serving.TURNS


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "//[", "http://[fe80::%eth0", "http://[v1.x]y"])
def test_an_origin_that_cannot_be_read_is_a_bad_request(server: StudioServer, origin: str) -> None:
    for path, body in (("/api/networks", None), (EXPLAIN, b"x")):
        status, answer = ask(server, body, path, Origin=origin)
        assert status in (400, 403)  # 403: Python of another version understands it, and it is not ours
        assert "error" in answer
    assert ask(server, None, "/api/networks", Origin="http://[")[0] == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        b"GIF89a" + b"\xff" * 200,
        b"II*\x00" + b"\xff" * 200,
        b"RIFF\xff\xff\xff\xffWEBPVP8 ",
        b"<?xml version='1.0'?><svg/>",
        b"\xff\xd8\xff\xe0" + bytes(50),
        b"%PDF-1.4",
    ],
    ids=["nothing", "png", "gif", "tiff", "webp", "svg", "jpeg", "pdf"],
)
def test_what_is_no_image_is_an_error_in_words(server: StudioServer, body: bytes) -> None:
    status, answer = ask(server, body)
    assert status == 422
    assert "object at" not in answer["error"]


def test_images_too_large_for_their_file_are_refused(server: StudioServer) -> None:
    for size in ((8000, 6000), (60_000, 1), (1, 60_000), (1000, 1)):
        stream = io.BytesIO()
        Image.new("1", size).save(stream, "PNG")
        status, answer = ask(server, stream.getvalue())
        assert status == 422, answer


def test_a_model_whose_answer_is_not_finite(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "import torch\nfrom torch import nn\nfrom unstride.models import LoadedModel, Preprocess\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.a, self.b, self.c = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Linear(4, 3)\n"
        "    def forward(self, x):\n"
        "        return self.c(self.b(self.a(x).relu()).mean((2, 3)).exp() * 1e30) * 1e30\n"
        "def net():\n    return LoadedModel('x', Net(), Preprocess(32, 32))\n"
    )
    with pytest.raises(UnstrideError, match=r"not finite|deterministic|overflow"):
        opened(f"{tmp_path}/odd.py:net").explain("0", "0", png(photo()))


def test_a_model_in_double_precision(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(
        f"{SOURCE}\ndef wide():\n    made = net()\n    made.model.double()\n    return made\n"
    )
    answer = json.loads(gzip.decompress(opened(f"{tmp_path}/wide.py:wide").explain("0", "0", png(photo()))))
    assert answer["task"] == "classification"


MEMORY = """
import io, resource, sys, threading
from PIL import Image
from test_uploads import all_at_once, opened
from small_nets import write_nets
from pathlib import Path
from unstride.studio import make_server
server = make_server(opened(f"{write_nets(Path(sys.argv[1]))}:net"), port=0)
threading.Thread(target=server.serve_forever, daemon=True).start()
def body(k):
    stream = io.BytesIO()
    Image.new("RGB", (6300, 6300), (k, 10, 20)).save(stream, "PNG")
    return stream.getvalue()
bodies = [body(k) for k in range(16)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert all_at_once(server, bodies) == [200] * 16
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_sixteen_large_uploads_at_once_take_the_memory_of_one(tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]\n{MEMORY}"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 1 << 30
