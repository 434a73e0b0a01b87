"""One computation at a time, nothing twice, and every refusal in words."""

import gzip
import io
import json
import threading
from pathlib import Path

import pytest
from PIL import Image
from small_nets import photo, png, write_nets

import unstride
from unstride.errors import InputError
from unstride.studio import Studio, room


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    return Studio(f"{write_nets(tmp_path_factory.mktemp('nets'))}:net")


def told(answer: bytes) -> dict:
    return json.loads(gzip.decompress(answer))


def test_the_given_model_comes_first_with_images_to_try(studio: Studio) -> None:
    catalogue = told(studio.catalogue())
    specs = [m["spec"] for m in catalogue["models"]]
    assert specs[0] == "nets.py:net"  # where the file lies is nobody's business
    assert "sample" in specs
    for model in catalogue["models"]:
        assert model["samples"]
        assert all(s["data"].startswith("data:image/png;base64,") for s in model["samples"])


def test_an_image_is_computed_once(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    first = studio.look("0", png(photo(7)))
    monkeypatch.setattr(room, "look", lambda *_: pytest.fail("computed again"))
    assert studio.look("0", png(photo(7))) is first
    assert told(first)["task"] == "classification"


def test_old_answers_are_forgotten(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(room, "look", lambda *_: calls.append(1) or {})
    monkeypatch.setattr(room, "KEPT", 2)
    for seed in (20, 21, 22, 22, 21, 20):
        studio.look("0", png(photo(seed)))
    assert len(calls) == 4


def test_computations_wait_for_each_other(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = [0], [0]
    gate = threading.Event()

    def slow(*_: object) -> dict:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        gate.wait(0.05)
        inside[0] -= 1
        return {}

    monkeypatch.setattr(room, "look", slow)
    threads = [threading.Thread(target=studio.look, args=("0", png(photo(seed)))) for seed in range(30, 36)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert most == [1]


def test_who_waits_too_long_is_told(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PATIENCE", 0.05)
    with studio._lock, pytest.raises(room.Busy, match="still being computed"):
        studio.look("0", png(photo(40)))


@pytest.mark.parametrize("body", [b"", b"hello", png(photo())[:200], b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg/>"])
def test_what_is_not_an_image_is_said_in_words(studio: Studio, body: bytes) -> None:
    with pytest.raises(InputError, match=r"empty|cannot be read as an image") as caught:
        studio.look("0", body)
    assert "object at" not in str(caught.value)


def test_an_image_of_too_many_pixels_is_refused_before_it_is_unpacked(studio: Studio) -> None:
    stream = io.BytesIO()
    Image.new("1", (8000, 6000)).save(stream, "PNG")
    assert len(stream.getvalue()) < 20_000
    with pytest.raises(InputError, match="40 million pixels"):
        studio.look("0", stream.getvalue())


def test_a_strip_that_resizing_would_blow_up_is_refused(studio: Studio) -> None:
    with pytest.raises(InputError, match="at most 20 to 1"):
        studio.look("0", png(Image.new("RGB", (60_000, 2))))


def test_a_model_forgets_sizes(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    first = studio._model("0")
    assert studio._model("0") is first
    monkeypatch.setattr(room, "SIZES", 0)
    assert studio._model("0") is not first


@pytest.mark.parametrize("key", ["99", "-1", "", "../../etc/passwd", "/etc/passwd", "0\0"])
def test_only_what_is_in_the_lists_can_be_named(studio: Studio, key: str) -> None:
    with pytest.raises(InputError, match="reload the page"):
        studio.look(key, "0")
    with pytest.raises(InputError, match="reload the page"):
        studio.look("0", key)
    with pytest.raises(InputError, match="reload the page"):
        studio.look("0", "0", key)
    with pytest.raises(InputError, match="reload the page"):
        studio.layers(key)


def test_recipes_can_be_picked_the_given_one_first(studio: Studio, tmp_path: Path) -> None:
    assert list(studio.recipes("0")) == ["default", "plain", "flip", "multiscale-flip", "paper"]
    for name, looks in (("plain", 1), ("flip", 2), ("multiscale-flip", 6), ("paper", 16)):
        data = told(studio.look("0", "0", name))
        assert len(data["states"]) == looks
        assert data["recipe"].startswith(name)
        assert (data["story"] is None) == (name == "paper")
    path = unstride.recipe.write(tmp_path / "mine.toml", unstride.recipe.get("flip"))
    given = Studio(f"{write_nets(tmp_path)}:net", recipe=str(path))
    first = next(iter(told(given.catalogue())["models"][0]["recipes"]))
    assert first == {"key": "given", "title": "given: mine.toml"}  # not the folder it is in
    assert told(given.look("0", "0"))["enhanced"] == told(given.look("0", "0", "flip"))["enhanced"]


def test_a_link_opens_an_upload_while_it_is_remembered(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "look", lambda *_: {})
    first, second = png(photo(50)), png(photo(51))
    monkeypatch.setattr(room, "UPLOADS", max(len(first), len(second)))
    name = told(studio.look("0", first))["image"]
    assert told(studio.look("0", name, "flip"))["image"] == name
    studio.look("0", second)
    with pytest.raises(InputError, match="choose it again"):
        studio.look("0", name, "plain")


def test_layers_are_those_of_inspect(studio: Studio, tmp_path: Path) -> None:
    layers = told(studio.layers("0"))
    assert [(x["index"], x["rate"], x["map"]) for x in layers["layers"]] == [(1, [2, 2], [16, 16]), (2, [2, 2], [8, 8])]
    assert layers["states"] == 16


def test_a_recipe_that_was_made_for_a_task_is_shown_for_it(tmp_path: Path) -> None:
    tuned = unstride.recipe.files.write(tmp_path / "tuned.toml", unstride.recipe.presets.get("flip", "embedding"))
    given = Studio(f"{write_nets(tmp_path)}:net", recipe=str(tuned))
    assert given.choices["0"].task == "embedding"
