"""The studio in a real browser: a photograph, the slider, what is shown, and a screenshot of it.

UNSTRIDE_SCREENSHOTS names a folder for the screenshots (CI keeps them); otherwise they go where pytest's files go.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from chrome import Chrome, missing
from PIL import Image
from small_nets import photo as make_photo
from small_nets import write_nets

import unstride
from unstride import models
from unstride.show.answers import probabilities
from unstride.studio import Studio, make_server

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")]

CLASSES = ("red", "green", "blue", "<b>[odd]</b> name")
DONE = "!document.body.classList.contains('busy') && !document.getElementById('result').hidden"
PRESSED = "document.querySelector('.samples [aria-pressed=\"true\"]')"
LEFT, RIGHT, HOME, END, SPACE = "\ue012", "\ue014", "\ue011", "\ue010", " "  # the protocol's names of keys


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = os.environ.get("UNSTRIDE_SCREENSHOTS")
    path = Path(folder) if folder else tmp_path_factory.mktemp("screenshots")
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_nets(tmp_path_factory.mktemp("nets"))


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    make_photo(4, (60, 80)).save(path)
    return path


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with Chrome(tmp_path_factory.mktemp("chrome")) as browser:
        yield browser


@contextmanager
def serving(spec: str) -> Iterator[str]:
    with make_server(Studio(spec), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def classifying(nets: str) -> Iterator[str]:
    with serving(f"{nets}:net") as url:
        yield url


@pytest.fixture(scope="module")
def segmenting(nets: str) -> Iterator[str]:
    with serving(f"{nets}:segmenter") as url:
        yield url


def opened(chrome: Chrome, url: str, width: int = 1280, height: int = 1000, dark: bool = False) -> Chrome:
    chrome.complaints()  # those of the test before
    chrome.window(width, height, dark)
    chrome.open(url)
    chrome.wait(DONE)
    return chrome


def rows(browser: Chrome) -> int:
    return int(browser.run("return document.querySelectorAll('#tree .state').length"))


def is_a_picture(path: Path) -> bool:
    image = Image.open(path).convert("RGB")
    small = np.asarray(image.resize((200, 200)), np.int64)
    return image.height > 600 and len(np.unique(small @ (65536, 256, 1))) > 200


def test_a_photograph_is_loaded_and_the_slider_moved(
    chrome: Chrome, classifying: str, nets: str, photo: Path, shots: Path
) -> None:
    spec = f"{nets}:net"
    loaded = models.load(spec)
    x = loaded.preprocess(Image.open(photo))[None]
    better = unstride.enhance(loaded.model, x)
    browser = opened(chrome, classifying)
    assert browser.run(f"return !!{PRESSED}")  # a sample is looked at to begin with
    browser.keys("#file", str(photo))
    browser.wait(f"!{PRESSED} && {DONE}")

    browser.keys("#budget", HOME)
    assert browser.text("#states") == "1 state (plain)"
    assert rows(browser) == 1
    browser.keys("#budget", RIGHT * 5)
    assert browser.text("#states") == "6 states"
    assert rows(browser) == 6
    wanted = probabilities(better.with_options(budget=6)(x)[0])
    bars = browser.run(
        "return [...document.querySelectorAll('#bars .class')].map(b => [b.dataset.name, +b.dataset.plain, "
        "+b.dataset.enhanced, b.innerText])"
    )
    assert [b[0] for b in bars] == [CLASSES[k] for k in wanted.argsort(descending=True)]
    plain = probabilities(loaded.model(x)[0].detach())
    for name, before, after, text in bars:
        assert before == pytest.approx(float(plain[CLASSES.index(name)]), abs=2e-4)
        assert after == pytest.approx(float(wanted[CLASSES.index(name)]), abs=2e-4)
        assert name in text  # names are text, never markup
        assert f"{after:.1%}" in text
    assert CLASSES[int(wanted.argmax())] in browser.text("#headline")
    cost = better.with_options(budget=6).explain(x)[0].cost
    assert f"{cost:.1f}x" in browser.text("#facts")
    assert "keeps 1 of 4" in browser.text("#layer-rows")
    warm = "return document.getElementById('canvas-heat').getContext('2d').getImageData(0, 0, 64, 64).data.join()"
    before = browser.run(warm)
    browser.keys("#budget", END)
    assert rows(browser) == 16
    assert browser.run(warm) != before
    assert is_a_picture(browser.screenshot(shots / "studio-classification.png"))
    assert browser.complaints() == []


def test_play_grows_the_tree_state_by_state(chrome: Chrome, classifying: str) -> None:
    browser = opened(chrome, classifying)
    browser.keys("#budget", HOME)
    browser.keys("#play", SPACE)  # with the keyboard
    browser.wait("document.querySelectorAll('#tree .state').length >= 3")
    assert browser.text("#play") == "Pause"
    browser.click("#play")
    stopped = rows(browser)
    assert browser.text("#play") == "Play"
    browser.run("return new Promise(done => setTimeout(done, 1200))")
    assert rows(browser) == stopped < 16


def test_a_bad_image_gives_a_message_and_the_page_goes_on(
    chrome: Chrome, classifying: str, photo: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(photo.read_bytes()[:300])
    browser = opened(chrome, classifying)
    browser.keys("#file", str(bad))
    browser.wait("!document.getElementById('error').hidden")
    assert "cannot be read as an image" in browser.text("#error")
    browser.click(".samples button:nth-child(2)")
    browser.wait(f"{DONE} && document.getElementById('error').hidden")
    assert rows(browser) == 10


def test_segmentation_shows_overlays_and_differences(chrome: Chrome, segmenting: str, photo: Path, shots: Path) -> None:
    browser = opened(chrome, segmenting)
    browser.keys("#file", str(photo))
    browser.wait(f"!{PRESSED} && {DONE}")
    browser.keys("#budget", END)
    names = browser.run("return [...document.querySelectorAll('canvas')].map(c => c.id)")
    assert names == ["canvas-seen", "canvas-plain", "canvas-enhanced", "canvas-differ", "canvas-heat"]
    same = (
        "const [a, b] = ['plain', 'enhanced'].map(n => document.getElementById('canvas-' + n).toDataURL());"
        "return a === b"
    )
    assert not browser.run(same)
    assert "of the pixels change" in browser.text("#headline")
    assert is_a_picture(browser.screenshot(shots / "studio-segmentation.png"))
    browser.keys("#budget", HOME)
    assert browser.run(same)  # one state is the plain network
    assert browser.complaints() == []


def test_it_is_readable_in_a_narrow_dark_window(chrome: Chrome, classifying: str, shots: Path) -> None:
    browser = opened(chrome, classifying, 360, 740, dark=True)
    assert browser.run("return matchMedia('(prefers-color-scheme: dark)').matches")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    paper, ink = browser.run(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color].map("
        "c => c.match(/\\d+/g).slice(0, 3).reduce((sum, v) => sum + +v, 0))"
    )
    assert paper < 120 < 600 < ink
    tall = "return document.querySelector('#tree svg').getBoundingClientRect().height"
    whole = browser.run(tall)
    browser.keys("#budget", HOME)
    assert browser.run(tall) < whole / 3  # nothing stands beside the tree here, so it takes no more room than it needs
    browser.keys("#budget", END)
    assert is_a_picture(browser.screenshot(shots / "studio-narrow-dark.png"))


def test_everything_can_be_reached_with_the_keyboard(chrome: Chrome, classifying: str) -> None:
    browser = opened(chrome, classifying)
    reached = []
    for _ in range(40):
        browser.command("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        browser.command("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        name = browser.run("const e = document.activeElement; return e.id || e.dataset.key || e.className")
        if name in reached:
            break
        reached.append(name)
    for wanted in ("model", "file", "0", "1", "play", "budget"):
        assert wanted in reached
