"""The examples that serve an exported file: over HTTP under load, as a Triton repository, in a browser."""

from __future__ import annotations

import asyncio
import functools
import http.server
import io
import re
import runpy
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import chrome
import numpy as np
import pytest
import tiny
from PIL import Image
from torch import nn

import unstride
from unstride.exporting.checking import noise_photos
from unstride.exporting.networks import session

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gated recipe that takes pixels."""
    model: nn.Module = tiny.net()
    preprocess = unstride.Preprocess(40, (32, 32))
    better = unstride.enhance(model, recipe="default", task="classification", preprocess=preprocess)
    return unstride.export(better, tmp_path_factory.mktemp("net") / "net.onnx", from_pixels=True, checked=4).path


def photos() -> list[Image.Image]:
    return noise_photos((40, 40), 8)


def jpeg(photo: Image.Image) -> bytes:
    stream = io.BytesIO()
    photo.save(stream, "PNG")
    return stream.getvalue()


# ---------------------------------------------------------------------------------------------------- HTTP


def test_serve_is_short() -> None:
    assert len((EXAMPLES / "serve.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("requests", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_under_load_no_request_is_lost_and_each_gets_its_own_answer(exported: Path, requests: int) -> None:
    pytest.importorskip("aiohttp")
    from aiohttp.test_utils import TestClient, TestServer

    make = runpy.run_path(str(EXAMPLES / "serve.py"))["create_app"]
    images = photos()
    opened = session(exported)
    alone = [opened.run(None, {"images": np.asarray(photo)[None]}) for photo in images]

    async def scenario() -> None:
        async with TestClient(TestServer(make(str(exported)))) as client:
            gate = asyncio.Semaphore(32)

            async def one(k: int) -> None:
                async with gate:
                    reply = await client.post("/predict", data=jpeg(images[k % len(images)]))
                    assert reply.status == 200
                    answer, wanted = await reply.json(), alone[k % len(images)]
                    assert answer["class"] == int(wanted[0].argmax())
                    assert answer["pass_count"] == int(wanted[2][0])
                    assert abs(answer["confidence"] - float(wanted[1][0])) < 1e-4

            await asyncio.gather(*(one(k) for k in range(requests)))
            health = await client.get("/health")
            assert (health.status, await health.json()) == (200, {"waiting": 0})
            assert (await client.post("/predict", data=b"not an image")).status == 400
            assert (await client.post("/predict", data=bytes(10_000_001))).status == 413

    asyncio.run(scenario())


# ---------------------------------------------------------------------------------------------------- Triton


def test_the_triton_repository_declares_the_files_own_inputs_and_outputs(exported: Path) -> None:
    """Triton is not here: its form is checked, against the exported file."""
    folder = EXAMPLES / "triton_server" / "recipe"
    config = (folder / "config.pbtxt").read_text()
    assert re.search(r'^name: "recipe"$', config, re.MULTILINE)
    assert re.search(r'^platform: "onnxruntime_onnx"$', config, re.MULTILINE)
    assert not re.search(r"^backend", config, re.MULTILINE)
    repository = re.search(r"--model-repository (\S+)", config)[1]  # type: ignore[index]
    assert (EXAMPLES.parent / repository).samefile(folder.parent)
    assert f"--out {repository}/recipe/1/model.onnx" in config
    assert int(re.search(r"^max_batch_size: (\d+)$", config, re.MULTILINE)[1]) > 1  # type: ignore[index]
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["1"]
    declared = re.findall(r'name: "(\w+)"\s+data_type: TYPE_(\w+)\s+dims: \[ ([-\d, ]*) \]', config)
    graph = onnx.load(exported).graph
    kinds = {1: "FP32", 2: "UINT8", 7: "INT64"}
    assert {name: kind for name, kind, _ in declared} == {
        value.name: kinds[value.type.tensor_type.elem_type] for value in (*graph.input, *graph.output)
    }
    for name, _, dims in declared:
        (value,) = [v for v in (*graph.input, *graph.output) if v.name == name]
        own = value.type.tensor_type.shape.dim
        assert len(own) - 1 == len([d for d in dims.split(",") if d.strip()]) or (len(own) == 1 and dims == "1")


# ---------------------------------------------------------------------------------------------------- browser


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The npm package onnxruntime-web."""
    if not shutil.which("npm"):
        pytest.skip("no npm, which downloads onnxruntime-web")
    folder = tmp_path_factory.mktemp("npm")
    done = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "onnxruntime-web@1"], cwd=folder, capture_output=True
    )
    if done.returncode:
        pytest.skip(f"npm cannot download onnxruntime-web: {done.stderr.decode()[-200:]}")
    return folder / "node_modules" / "onnxruntime-web" / "dist"


@pytest.fixture
def page(exported: Path, runtime: Path, tmp_path: Path) -> Iterator[str]:
    """The example's folder with the package and an exported file in it, on a server of its own."""
    site = tmp_path / "site"
    shutil.copytree(EXAMPLES / "browser", site)
    shutil.copytree(runtime, site / "ort")
    shutil.copy(exported, site / "recipe.onnx")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.browser
@pytest.mark.skipif(bool(chrome.missing()), reason=chrome.missing())
def test_in_a_browser_a_photograph_gets_the_answer_of_the_file(page: str, exported: Path, tmp_path: Path) -> None:
    photo = photos()[3]
    photo.save(tmp_path / "photo.png")
    scores, _, count, cost = session(exported).run(None, {"images": np.asarray(photo)[None]})
    with chrome.Chrome(tmp_path) as browser:
        browser.open(page)
        browser.wait("document.body.dataset.state === 'ready'")
        browser.keys("input[type=file]", str(tmp_path / "photo.png"))
        browser.wait("document.body.dataset.state === 'answered'")
        assert browser.text("#class").endswith(str(int(scores.argmax())))
        assert browser.text("#passes") == str(int(count[0]))
        assert float(browser.text("#cost")) == pytest.approx(float(cost[0]), abs=0.01)
        assert not browser.complaints()
