"""The page for labelling disagreements in a real browser: clicks and keys are saved, mistakes are shown."""

import csv
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from chrome import Chrome, missing
from small_nets import photo, write_nets

from unstride import Recipe, Stage
from unstride.pipeline import open_pipeline
from unstride.predicting.compare import compare
from unstride.predicting.labelling import LabelPage, LabelServer

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LabelServer]:
    folder, spec = tmp_path / "photos", write_nets(tmp_path)
    folder.mkdir()
    for k in range(20):
        photo(k).save(folder / f"{k}.png")
    recipe = Recipe((Stage(), Stage(network="net2", join="replace")))
    two = [open_pipeline([f"{spec}:net", f"{spec}:other"], recipe=r) for r in ("plain", recipe)]
    server = LabelServer(LabelPage(compare(*two, folder, tmp_path / "to_label.csv", count=4)))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def labels(server: LabelServer) -> list[str]:
    with server.page.comparison.out.open(newline="") as stream:
        return [row["label"] for row in csv.DictReader(stream)]


def test_labels_are_saved_by_click_key_and_text(server: LabelServer, tmp_path: Path) -> None:
    rows = server.page.rows
    with Chrome(tmp_path) as chrome:
        chrome.open(server.url)
        chrome.wait("document.getElementById('image').naturalWidth > 0")
        assert chrome.text("#first") == f"{rows[0].answer_1} (1)"
        chrome.click("#second")
        chrome.wait("document.getElementById('count').textContent.startsWith('1 of 4')")
        chrome.keys("body", "3")
        chrome.wait("document.getElementById('count').textContent.startsWith('2 of 4')")
        assert labels(server) == [rows[0].answer_2, "neither", "", ""]
        chrome.keys("#text", "tabby\ue007")
        chrome.wait("document.getElementById('message').textContent.includes('not a class')")
        assert labels(server)[2] == ""
        chrome.run("document.getElementById('text').value = ''")
        chrome.keys("#text", "<b>[odd]</b> name\ue007")
        chrome.wait("document.getElementById('count').textContent.startsWith('3 of 4')")
        chrome.keys("body", "1")
        chrome.wait("document.getElementById('count').textContent.includes('Everything is saved')")
        assert labels(server) == [rows[0].answer_2, "neither", "<b>[odd]</b> name", rows[3].answer_1]
        chrome.open(server.url)  # again: what is labelled is there
        chrome.wait("document.getElementById('count').textContent.startsWith('4 of 4')")
        assert chrome.run("return document.querySelectorAll('[aria-pressed=true]').length") == 1
        assert chrome.complaints() == [] or all("400" in line for line in chrome.complaints())
