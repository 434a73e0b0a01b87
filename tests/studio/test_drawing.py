"""Tasks without classes in the studio: what is drawn is what the enhanced model says."""

import base64
import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_nets import photo, png, write_nets
from torch.nn.functional import cosine_similarity

import unstride
from unstride import models, show
from unstride.errors import InputError, OptionError
from unstride.studio import Studio
from unstride.studio.choices import Sample
from unstride.studio.drawing import drawn

pytest.importorskip("matplotlib")


def told(answer: bytes) -> dict[str, Any]:
    return json.loads(gzip.decompress(answer))


def ready(tmp_path: Path, name: str, task: str, recipe: str = "flip") -> tuple[models.LoadedModel, unstride.Enhanced]:
    loaded = models.load(f"{write_nets(tmp_path)}:{name}").for_task(task)
    example = loaded.seen(photo(1, (48, 64)))[None]
    return loaded, unstride.enhance(loaded.model, example, task=task, recipe=recipe, preprocess=loaded.preprocess)


def given(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[Any, ...]]:
    """What a plot is called with; it is drawn all the same."""
    seen: list[tuple[Any, ...]] = []
    plot = getattr(show, name)
    monkeypatch.setattr(show, name, lambda *args: (seen.append(args), plot(*args))[1])
    return seen


def facts(data: dict[str, Any]) -> dict[str, str]:
    return {name: value for value, name in data["facts"]}


def is_an_image(data: str) -> bool:
    image = Image.open(io.BytesIO(base64.b64decode(data.removeprefix("data:image/png;base64,"))))
    return image.width > 800 and len(np.unique(np.asarray(image.convert("L")))) > 50


def test_a_depth_map_with_its_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = given(monkeypatch, "plot_map")
    loaded, better = ready(tmp_path, "depth", "dense")
    image = photo(2, (48, 64))
    data = drawn(loaded, better, Sample("mine", image))
    x = loaded.seen(image)[None]
    plain, flipped = better.plain(x)[0], better.plain(x.flip(-1))[0].flip(-1)
    _, p = seen[0]
    torch.testing.assert_close(p.plain, plain)
    torch.testing.assert_close(p.logits, (plain + flipped) / 2)
    torch.testing.assert_close(p.spread, torch.stack([plain, flipped]).std(0, correction=0))
    assert is_an_image(data["figure"])
    assert data["headline"].startswith("mean ")
    assert facts(data)["looks"] == "2" and facts(data)["cost: MACs of a plain forward"] == "2.0x"
    assert [layer["rate"] for layer in data["layers"]["layers"]] == [[2, 2], [2, 2]]


def test_features_plain_and_stitched_lie_on_one_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = given(monkeypatch, "plot_features")
    loaded, better = ready(tmp_path, "net", "features", "default")
    image = photo(2)
    data = drawn(loaded, better, Sample("mine", image))
    maps = seen[0][1]
    assert list(maps) == ["plain, bilinear", "4 looks", "stitched"]
    plain = loaded.model[:4](loaded.seen(image)[None])[0].detach()
    torch.testing.assert_close(maps["plain, bilinear"][:, ::4, ::4], plain)  # its own cells are among them
    torch.testing.assert_close(maps["stitched"], better.features([image], finer=4)[0])
    assert maps["stitched"].shape == maps["4 looks"].shape == (8, 32, 32)
    assert data["headline"] == "8x8 cells become 32x32"
    assert is_an_image(data["figure"])
    _, alone = ready(tmp_path, "net", "features", "plain")
    drawn(loaded, alone, Sample("mine", image))
    assert list(seen[1][1]) == ["plain, bilinear", "stitched"]


def test_the_nearest_by_cosine_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = given(monkeypatch, "plot_neighbours")
    loaded, better = ready(tmp_path, "tower", "embedding")
    others = [Sample(str(k), photo(k), k % 2) for k in range(10, 20)]
    data = drawn(loaded, better, Sample("mine", photo(2), 1), others)
    for row, said in ((1, loaded.model), (2, better)):
        with torch.no_grad():
            query, *vectors = [said(loaded.seen(s.image)[None]) for s in (Sample("mine", photo(2)), *others)]
        order = sorted(range(10), key=lambda k, q=query, v=vectors: -float(cosine_similarity(q, v[k])))[:6]
        assert [others.index(next(o for o in others if o.image is i)) for i in seen[0][row]] == order
        right = [others[k].truth == 1 for k in order]
        assert seen[0][3][row - 1] == right
        assert facts(data)[f"of its class, {('plain', 'enhanced')[row - 1]}"] == f"{sum(right)} of 6"
    assert is_an_image(data["figure"])
    with pytest.raises(InputError, match="no neighbours"):
        drawn(loaded, better, Sample("mine", photo(2)))


def test_uploads_are_neighbours_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    studio = Studio(f"{write_nets(tmp_path)}:tower")
    first = told(studio.look("0", png(photo(60))))
    again = told(studio.look("0", first["image"]))
    assert again == first
    told(studio.look("0", png(photo(61))))
    more = told(studio.look("0", first["image"]))
    near = [int(facts(d)["images to be near to"]) for d in (first, more)]
    assert near[1] == near[0] + 1


def test_the_task_can_be_asked_for(tmp_path: Path) -> None:
    spec = f"{write_nets(tmp_path)}:net"
    studio = Studio(spec, task="features")
    assert "paper" not in studio.recipes("0")  # there is no search without classes
    assert told(studio.look("0", "0", "plain"))["task"] == "features"
    assert "paper" not in Studio(f"{write_nets(tmp_path)}:depth", task="depth").recipes("0")  # by any of its names
    with pytest.raises(InputError, match="not regression"):
        Studio(spec, task="regression").look("0", "0")
    with pytest.raises(OptionError, match="task"):
        Studio(task="features")


def test_neighbours_of_garments_are_on_offer() -> None:
    studio = Studio()
    key = next(k for k, choice in studio.choices.items() if choice.spec == "sample-neighbours")
    data = told(studio.look(key, "0", "flip"))
    assert facts(data)["images to be near to"] in ("59", "60")  # never the image itself
    assert "of its class, enhanced" in facts(data)
