"""Tasks without classes, as one image each: a map with its spread, features plain and stitched, who is nearest.

drawn(loaded, better, sample, others)["figure"]  # a PNG as a data address, drawn by `unstride.show`
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from unstride import show
from unstride.enhanced import Enhanced
from unstride.errors import InputError, OptionError
from unstride.geometry.grids import by
from unstride.geometry.states import State
from unstride.models import LoadedModel
from unstride.procedure.features import interpolated, phases
from unstride.procedure.gates import Stage
from unstride.execution.prediction import Prediction
from unstride.procedure.tasks import Plan
from unstride.show.answers import answer_of, headline
from unstride.studio.choices import Sample
from unstride.studio.looking import layers, shrunk

DRAWN = ("dense", "features", "embedding")
NEAREST = 6
FINER = (4, 2)  # the first that the network's states allow
SIDES = ("plain", "enhanced")
Fact = tuple[str, str]


def drawn(loaded: LoadedModel, better: Enhanced, sample: Sample, others: Sequence[Sample] = ()) -> dict[str, Any]:
    """What the page shows of one image; `others`: among which an embedding's neighbours are looked for."""
    image = shrunk(loaded, sample.image)
    p = _explained(better, image)
    view = show.seen(loaded.preprocess, image)
    if better.task == "dense":
        figure, words, more = show.plot_map(view, p), headline(answer_of(p)), list[Fact]()
    elif better.task == "features":
        figure, words, more = _features(loaded, better, image, p)
    else:
        figure, words, more = _neighbours(loaded, better, sample, others, p)
    return {
        "task": better.task,
        "recipe": str(better.recipe),
        "headline": words,
        "figure": _png(figure),
        "facts": [
            (f"{p.cost:.1f}x", "cost: MACs of a plain forward"),
            (str(len(p.states)), "looks"),
            (f"{p.agreement:.1%}", "agreement of the looks"),
            (f"{float(p.spread.mean()):.3g}", "spread, on average"),
            *more,
        ],
        "layers": layers(better.fitted(loaded.seen(image)[None])[1], ()),
    }


def _explained(better: Enhanced, image: Image.Image) -> Prediction:
    p = better.explain([image])[0]
    if p.problem is not None:
        raise InputError(p.problem)
    return p


def _features(loaded: LoadedModel, better: Enhanced, image: Image.Image, p: Prediction) -> tuple[Any, str, list[Fact]]:
    """Principal components of the plain map, of the recipe's, and of the states stitched, on one grid."""
    _, plan, _ = better.fitted(loaded.seen(image)[None])
    finer, states = _stitching(plan)
    plain = better.with_options(stages=(Stage(),)).features([image])
    maps = {"plain, bilinear": interpolated(plain, finer)[0]}
    if len(p.states) > 1:
        maps[f"{len(p.states)} looks"] = interpolated(better.features([image]), finer)[0]
    words, more = f"{_cells(plain)} cells", list[Fact]()
    if finer > 1:
        maps["stitched"] = better.features([image], finer=finer)[0]
        words += f" become {_cells(maps['stitched'])}"
        cost = plan.engine.trie_macs(states) / plan.plain_macs
        more = [(f"{cost:.1f}x", f"cost of {len(states)} states, stitched")]
    return show.plot_features(show.seen(loaded.preprocess, image), maps), words, more


def _stitching(plan: Plan) -> tuple[int, tuple[State, ...]]:
    """How much finer this network's states can make its map, and these states."""
    for finer in FINER:
        with suppress(OptionError):
            return finer, phases(plan, finer)
    return 1, ()


def _cells(maps: Tensor) -> str:
    return by(maps.shape[-2:])


def _neighbours(
    loaded: LoadedModel, better: Enhanced, sample: Sample, others: Sequence[Sample], p: Prediction
) -> tuple[Any, str, list[Fact]]:
    """The nearest of the other images by cosine, with the plain vectors and with the recipe's."""
    if not others:
        raise InputError("one image has no neighbours: choose another photograph, too")
    found = [_explained(better, shrunk(loaded, other.image)) for other in others]
    rows = [_nearest(p.plain, [f.plain for f in found]), _nearest(p.logits, [f.logits for f in found])]
    near = [[others[k].image for k in row] for row in rows]
    more = [(str(len(others)), "images to be near to")]
    right: list[list[bool]] = []
    if isinstance(sample.truth, int):
        right = [[others[k].truth == sample.truth for k in row] for row in rows]
        more += [(f"{sum(right[k])} of {len(rows[k])}", f"of its class, {name}") for k, name in enumerate(SIDES)]
    stay = len({*rows[0]} & {*rows[1]})
    words = (
        f"{stay} of the {len(rows[0])} nearest stay" if rows[0] != rows[1] else "the same neighbours, in the same order"
    )
    return show.plot_neighbours(sample.image, near[0], near[1], right), words, more


def _nearest(query: Tensor, gallery: Sequence[Tensor]) -> list[int]:
    vectors = normalize(torch.stack([v.flatten().float() for v in gallery]), dim=1)
    cosines = vectors @ normalize(query.flatten().float(), dim=0)
    found: list[int] = cosines.topk(min(NEAREST, len(gallery))).indices.tolist()
    return found


def _png(figure: Any) -> str:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
