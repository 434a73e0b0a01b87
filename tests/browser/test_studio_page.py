"""The studio in a real browser: networks, recipes, gates, an own image, links, the keyboard, what screen readers get.

UNSTRIDE_SCREENSHOTS names a folder for the screenshots (CI keeps them); otherwise they go where pytest's files go.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chrome import Chrome, missing
from PIL import Image
from small_nets import photo as make_photo
from small_nets import write_nets

from unstride.pipeline import Pipeline, open_pipeline
from unstride.show.answers import probabilities
from unstride.studio import Studio, make_server
from unstride.studio.choices import images_for

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")]

DONE = "!document.body.classList.contains('busy') && !document.getElementById('result').hidden"
CHECKED = "document.querySelector('input[name=image]:checked')"
DOWN, RIGHT = "\ue015", "\ue014"  # the protocol's names of keys
CONTRAST = """
const levels = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255).map(
  v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
const light = (text) => { const [r, g, b] = levels(text); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ground = (e) => { const c = getComputedStyle(e).backgroundColor;
  return c !== 'rgba(0, 0, 0, 0)' ? c : e.parentElement ? ground(e.parentElement) : 'rgb(255, 255, 255)'; };
const words = [...document.querySelectorAll('main *')].filter(e => e.offsetParent && e.tagName !== 'OPTION'
  && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()));
const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
return words.map(e => [ratio(light(getComputedStyle(e).color), light(ground(e))), e.textContent.slice(0, 40)])
  .filter(([value]) => value < 4.5);
"""
NAMELESS = """
const parts = [...document.querySelectorAll('select, input, button, [tabindex], img, table')];
const named = (e) => (e.labels && e.labels.length) || e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')
  || e.alt || e.querySelector('caption') || e.tagName === 'PRE';
return parts.filter(e => e.offsetParent && !named(e)).map(e => e.outerHTML.slice(0, 80));
"""


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = os.environ.get("UNSTRIDE_SCREENSHOTS")
    path = Path(folder) if folder else tmp_path_factory.mktemp("screenshots")
    path.mkdir(parents=True, exist_ok=True)
    return path


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
def serving(pipeline: Pipeline | None = None) -> Iterator[str]:
    with make_server(Studio(pipeline), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def embedded() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Pipeline]]:
    pipeline = open_pipeline([f"{write_nets(tmp_path_factory.mktemp('nets'))}:net"], recipe="flip")
    with serving(pipeline) as url:
        yield url, pipeline


def opened(chrome: Chrome, url: str, link: str = "", width: int = 1280, dark: bool = False) -> Chrome:
    chrome.complaints()  # those of the test before
    chrome.window(width, 1000, dark)
    chrome.open("about:blank")  # another link to a page that is open would not load it again
    chrome.open(f"{url}#{link}")
    chrome.wait(DONE)
    return chrome


def shown(browser: Chrome, selector: str) -> list[str]:
    return list(browser.run("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector))


def fact(browser: Chrome, name: str) -> str:
    return browser.text(f"#facts [data-of='{name}'] dd")


def is_an_image(path: Path) -> bool:
    image = Image.open(path).convert("RGB")
    small = np.asarray(image.resize((200, 200)), np.int64)
    return image.height > 600 and len(np.unique(small @ (65536, 256, 1))) > 100


def test_it_opens_on_a_cascade_of_two_networks(chrome: Chrome, embedded: str, shots: Path) -> None:
    browser = opened(chrome, embedded)
    assert browser.run("return document.getElementById('networks').selectedOptions[0].text") == "sample + sample-large"
    pipeline = open_pipeline(["sample", "sample-large"])
    predictions = pipeline.better.explain([one.image for one in images_for("sample")])
    assert {len(p.passes) for p in predictions} == {1, 2}  # some stop, some go on
    for key, p in enumerate(predictions):
        browser = opened(chrome, embedded, f"image={key}")
        assert len(shown(browser, ".passes tbody tr")) == len(p.passes)
        base, final = (probabilities(output) for output in (p.base, p.output))
        assert fact(browser, "Base model").startswith(f"{pipeline.classes[int(base.argmax())]} {float(base.max()):.0%}")
        assert fact(browser, "Recipe").startswith(f"{pipeline.classes[int(final.argmax())]} {float(final.max()):.0%}")
        assert fact(browser, "Cost").startswith(f"{p.cost:.2f}x")
        margin = float(base.topk(2).values.diff().abs())
        words = (
            f"margin {margin:.2f} is below 0.50: go on" if len(p.passes) > 1 else f"margin {margin:.2f} is not below"
        )
        assert words in browser.text(".gate")
        assert ("Not run" in browser.text("#stages")) == (len(p.passes) == 1)
        label = fact(browser, "Label")
        right = pipeline.classes[int(final.argmax())] == label
        assert ("✓ right" if right else "✗ wrong") in fact(browser, "Recipe")
    assert is_an_image(browser.screenshot(shots / "studio-cascade.png"))
    assert browser.complaints() == []


def test_an_own_image_with_another_recipe_and_a_link_to_it(
    chrome: Chrome, own: tuple[str, Pipeline], photo: Path, shots: Path
) -> None:
    url, pipeline = own
    browser = opened(chrome, url)
    browser.keys("#file", str(photo))
    browser.wait(f"location.hash.includes('upload-') && {DONE} && !{CHECKED}")
    (p,) = pipeline.better.explain([Image.open(photo)])
    final, base = probabilities(p.output), probabilities(p.base)
    rows = browser.run(
        "return [...document.querySelectorAll('#scores tbody tr')].map(r => r.innerText.split(/\\s*\\t\\s*/))"
    )
    assert [row[0] for row in rows] == [pipeline.classes[k] for k in final.argsort(descending=True)]  # text, not markup
    for name, before, after in rows:
        k = pipeline.classes.index(name)
        assert (before, after) == (f"{100 * base[k]:.1f}%", f"{100 * final[k]:.1f}%")
    browser.keys("#recipe", "paper")
    browser.wait(f"{DONE} && document.querySelectorAll('.passes tbody tr').length === 10")
    assert fact(browser, "Why it stopped") == "The search reached its budget."
    link = browser.run("return document.getElementById('link').href")
    browser = opened(chrome, url, link.partition("#")[2])  # in a new page, the image is still there
    assert len(shown(browser, ".passes tbody tr")) == 10
    assert is_an_image(browser.screenshot(shots / "studio-search.png"))
    assert browser.complaints() == []


def test_a_damaged_image_gives_a_message_and_the_page_goes_on(
    chrome: Chrome, own: tuple[str, Pipeline], photo: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(photo.read_bytes()[:300])
    browser = opened(chrome, own[0])
    browser.keys("#file", str(bad))
    browser.wait("!document.getElementById('error').hidden")
    assert "cannot be read as an image" in browser.text("#error")
    browser.click("#images label:nth-child(2)")
    browser.wait(f"{DONE} && document.getElementById('error').hidden")


def test_a_segmentation_shows_its_maps(chrome: Chrome, embedded: str, shots: Path) -> None:
    browser = opened(chrome, embedded)
    browser.keys("#networks", "sample-segmentation")
    browser.wait(
        f"location.hash.includes('networks=1') && {DONE} && document.querySelectorAll('.maps img').length === 5"
    )
    assert "of the pixels right" in fact(browser, "Recipe")
    assert browser.run(
        "return [...document.querySelectorAll('.maps img')].every(i => i.complete && i.naturalWidth > 90)"
    )
    assert is_an_image(browser.screenshot(shots / "studio-segmentation.png"))
    assert browser.complaints() == []


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_readable_in_a_narrow_window(chrome: Chrome, embedded: str, shots: Path, dark: bool) -> None:
    browser = opened(chrome, embedded, width=360, dark=dark)
    assert browser.run("return matchMedia('(prefers-color-scheme: dark)').matches") is dark
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.run(CONTRAST) == []
    assert is_an_image(browser.screenshot(shots / f"studio-narrow-{'dark' if dark else 'light'}.png"))


def test_everything_has_a_name_for_screen_readers(chrome: Chrome, embedded: str) -> None:
    browser = opened(chrome, embedded)
    assert browser.run(NAMELESS) == []
    assert browser.run("return document.querySelector('[role=status]').textContent").startswith("Done")
    assert browser.run("return document.querySelectorAll('.passes thead th[scope=col]').length") > 0
    assert browser.run("return document.documentElement.lang") == "en"


def test_the_keyboard_reaches_everything(chrome: Chrome, embedded: str) -> None:
    browser = opened(chrome, embedded)
    reached: list[Any] = []
    for _ in range(20):
        browser.command("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        browser.command("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        name = browser.run("const e = document.activeElement; return e.id || e.name || e.className")
        if not name or (name in reached and name != "scroll"):
            break
        reached.append(name)
        outlined = (
            "const e = document.activeElement; const s = getComputedStyle(e.name === 'image' ? e.nextSibling : e);"
        )
        assert browser.run(f"{outlined} return s.outlineStyle") == "solid", name
    assert [n for n in reached if n != "scroll"] == ["networks", "recipe", "file", "image", "recipe-text", "link"]
    browser.keys("input[name=image]:checked", RIGHT)  # arrow keys choose among the images
    browser.wait(f"location.hash.includes('image=1') && {DONE}")
    browser.keys("#recipe", DOWN)
    browser.wait(f"location.hash.includes('recipe=1') && {DONE}")
