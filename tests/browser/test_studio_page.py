"""The studio in a real browser: a photograph, recipes, gates, the slider, links, and a screenshot of it.

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
from unstride.execution.prediction import Prediction
from unstride.show.answers import probabilities
from unstride.studio import Studio, make_server, tuner
from unstride.studio.choices import samples_for

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


@pytest.fixture(scope="module")
def embedded() -> Iterator[str]:
    with serving("sample") as url:
        yield url


def opened(
    chrome: Chrome, url: str, width: int = 1280, height: int = 1000, dark: bool = False, story: str = "recipe=paper"
) -> Chrome:
    chrome.complaints()  # those of the test before
    chrome.window(width, height, dark)
    chrome.open("about:blank")  # another story of a page that is open would not load it again
    chrome.open(f"{url}#{story}")
    chrome.wait(DONE)
    return chrome


def rows(browser: Chrome) -> int:
    return int(browser.run("return document.querySelectorAll('#tree .state').length"))


def is_an_image(path: Path) -> bool:
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
    assert is_an_image(browser.screenshot(shots / "studio-classification.png"))
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
    assert is_an_image(browser.screenshot(shots / "studio-segmentation.png"))
    browser.keys("#budget", HOME)
    assert browser.run(same)  # one state is the plain network
    assert browser.complaints() == []


def test_a_depth_map_is_one_image_and_classes_come_back(chrome: Chrome, nets: str, photo: Path, shots: Path) -> None:
    with serving(f"{nets}:depth") as url:
        browser = opened(chrome, url, story="recipe=flip")
        browser.keys("#file", str(photo))
        browser.wait(f"!{PRESSED} && {DONE}")
        assert browser.run("const i = document.getElementById('drawn'); return !i.hidden && i.naturalWidth > 800")
        assert "becomes" in browser.text("#headline")
        assert "spread, on average" in browser.text("#facts")
        assert "keeps 1 of 4" in browser.text("#layer-rows")
        hidden = "return ['slider', 'columns', 'answers'].every(id => document.getElementById(id).hidden)"
        assert browser.run(hidden)
        assert is_an_image(browser.screenshot(shots / "studio-depth.png"))
        browser.run("location.hash = 'model=sample&recipe=flip&image=0'")
        browser.wait(f"{DONE} && document.getElementById('drawn').hidden && !!document.querySelector('.card')")
        assert not browser.run(hidden)
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
    assert is_an_image(browser.screenshot(shots / "studio-narrow-dark.png"))


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
    for wanted in ("model", "recipe", "file", "0", "1", "play", "budget", "link"):
        assert wanted in reached


def stories() -> tuple[str, str, list[Prediction]]:
    """Of the embedded images, one where the default recipe looks again and one where it stops; and all of them."""
    loaded = models.load("sample")
    better = unstride.enhance(loaded.model, loaded.example(), preprocess=loaded.preprocess)
    found = better.explain([s.image for s in samples_for("sample")])
    again = [p.stopped == "all looks" for p in found]
    return str(again.index(True)), str(again.index(False)), found


def shown(browser: Chrome, selector: str) -> list[str]:
    return list(browser.run("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector))


def margin(p: Prediction) -> float:
    first, second = probabilities(p.plain).topk(2).values.tolist()
    return float(first - second)


def test_a_link_tells_the_story_of_an_image(chrome: Chrome, embedded: str, shots: Path) -> None:
    again, sure, found = stories()
    garments, classes = samples_for("sample"), models.load("sample").classes
    for key in (again, sure):
        p, truth = found[int(key)], classes[int(garments[int(key)].truth)]
        browser = opened(chrome, embedded, story=f"model=sample&recipe=default&image={key}")
        words = (
            f"margin {margin(p):.2f} < 0.50: looks again"
            if key == again
            else f"margin {margin(p):.2f} ≥ 0.50: stops here"
        )
        assert shown(browser, ".gate.open b, .gate.closed b") == ["gate open" if key == again else "gate closed"]
        assert words in browser.text(".gate")
        own = [(int(v.logits.argmax()), float(probabilities(v.logits).max())) for v in p.states]
        cards = shown(browser, ".card .own")
        assert len(cards) == len(own) == (2 if key == again else 1)
        for text, (best, probability) in zip(cards, own, strict=True):
            assert text.startswith(f"{classes[best]} {probability:.0%}")
            assert ("✓ right" if classes[best] == truth else "✗ wrong") in text
        final = classes[int(p.logits.argmax())]
        assert final in browser.text("#answers [data-of='with default']")
        assert ("✓ right" if final == truth else "✗ wrong") in browser.text("#answers [data-of='with default']")
        assert truth in browser.text("#answers [data-of=truth]")
        assert shown(browser, ".spent span") == ["1.00x plain", "2.00x plain" if key == again else "would be 2.00x"]
        wide = "return [...document.querySelectorAll('.stage')].every(s => s.getBoundingClientRect().width > 400)"
        assert browser.run(wide)  # the row is full
        assert is_an_image(browser.screenshot(shots / f"studio-story-{'again' if key == again else 'sure'}.png"))
        assert browser.complaints() == []
    for width in (800, 360):
        browser = opened(chrome, embedded, width, story=f"recipe=default&image={again}")
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")


def test_recipes_are_picked_and_back_goes_back(chrome: Chrome, embedded: str, photo: Path) -> None:
    browser = opened(chrome, embedded, story="recipe=default&image=1")
    first = browser.run("return location.href")
    assert browser.run("return document.getElementById('link').href") == first
    browser.keys("#recipe", "flip")
    browser.wait(f"location.hash.includes('recipe=flip') && {DONE} && !document.querySelector('.gate')")
    assert len(shown(browser, ".card")) == 2
    browser.keys("#file", str(photo))
    browser.wait(f"location.hash.includes('image=upload-') && {DONE} && !{PRESSED}")
    assert shown(browser, "#answers [data-of=truth]") == []  # nobody knows
    own = browser.run("return location.href")
    browser.run("history.back()")
    browser.wait(f"location.hash.includes('recipe=flip&image=1') && {DONE} && !!{PRESSED}")
    browser.run("history.back()")
    browser.wait(f"location.href === '{first}' && {DONE} && !!document.querySelector('.gate')")
    browser = opened(chrome, embedded, story=own.partition("#")[2])  # in a new page, the photograph is still there
    assert len(shown(browser, ".card")) == 2
    assert not browser.run(f"return !!{PRESSED}")
    browser.run("location.hash = 'model=sample&recipe=nonsense&image=0'")
    browser.wait("!document.getElementById('error').hidden")
    assert 'the recipe "nonsense" of this link is not here' in browser.text("#error")


def test_a_link_to_a_search_has_its_budget(chrome: Chrome, classifying: str) -> None:
    browser = opened(chrome, classifying, story="recipe=paper&states=3")
    assert rows(browser) == 3
    faint = "return document.querySelectorAll('#tree .ghost').length"
    assert browser.run(faint) == 13  # those to come keep their places
    browser.keys("#budget", RIGHT)
    assert "states=4" in browser.run("return location.hash")
    assert browser.run(faint) == 12


def test_tuning_on_the_sample(chrome: Chrome, embedded: str, shots: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "IMAGES", 40)
    browser = opened(chrome, embedded, story="recipe=default&image=1")
    browser.click("#tune")
    browser.wait("document.querySelectorAll('#frontier tbody tr').length > 2", 300)
    assert shown(browser, "#frontier tbody td:first-child")[:2] == ["plain", "flip"]
    browser.keys("#recipe", "tuned")
    browser.wait(
        f"location.hash.includes('recipe=tuned') && {DONE} && document.querySelector('[data-of=\"with tuned\"]')"
    )
    assert is_an_image(browser.screenshot(shots / "studio-tuned.png"))
    assert browser.complaints() == []
