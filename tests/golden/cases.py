"""The cases as plain data: a network, a task, images, a recipe. The words are those of recipes, not of one version.

A stage has views, states (None, {"near": 4}, {"search": ...} or a list of states), and where it needs them a gate,
weights, temperatures, and for a search: aggregate, align, border, space. A list of states with edges "zeros" is
aggregated as a search is; with edges "pinned" its outputs are averaged as those of near states are. `until` ends the
search of an image that is not below that confidence any more. Confidence by entropy is 1 - H / log K. An entry of a
state is a selection (y, x) or its index y R + x.
"""

from typing import Any

Case = dict[str, Any]
Stages = list[dict[str, Any]]

# Seed, count, size, margin of the images that a network is shown.
IMAGES = {
    "strided": (50, 4, 64, 0),
    "strided-one": (11, 4, 64, 0),
    "strided-labels": (12, 4, 64, 0),
    "strided-numbers": (13, 4, 64, 0),
    "strided-vector": (14, 4, 64, 0),
    "resnet": (15, 4, 64, 0),
    "mobile": (16, 4, 60, 0),
    "patches": (17, 4, 64, 0),
    "patches-token": (18, 4, 64, 0),
    "segmenter": (19, 3, 64, 0),
    "segmenter-32": (22, 3, 92, 0),  # padded to 96
    "depth": (20, 3, 48, 0),
    "pyramid": (21, 3, 64, 0),
}
CANVAS = {name: (*some[:3], 8) for name, some in IMAGES.items()}  # with pixels around what the network usually sees
TILES = (22, 3, 96, 0)
CASES: list[Case] = []


def case(
    name: str,
    network: str,
    task: str,
    stages: Stages | str,
    *,
    combine: str = "",
    temperature: float = 1.0,
    images: tuple[int, int, int, int] | None = None,
    **more: Any,
) -> None:
    """Add a case. `stages` may be the name of a preset."""
    seed, count, size, margin = images or IMAGES[network]
    recipe: dict[str, Any] = {"preset": stages} if isinstance(stages, str) else {"stages": stages}
    if combine:
        recipe["combine"] = combine
    if temperature != 1:
        recipe["temperature"] = temperature
    shown = {"seed": seed, "count": count, "size": size, "margin": margin}
    CASES.append({"name": name, "network": network, "task": task, "images": shown, "recipe": recipe, **more})


def stage(*views: str, states: Any = None, **more: Any) -> dict[str, Any]:
    return {"views": list(views or ["plain"]), "states": states, **more}


def gate(by: str, below: float, **more: Any) -> dict[str, Any]:
    return {"by": by, "below": below, **more}


def near(count: int) -> dict[str, int]:
    return {"near": count}


def search(
    budget: int,
    criterion: str = "entropy",
    *,
    aggregate: str = "entropy",
    align: str = "average",
    border: str = "renormalise",
    space: str = "",
    **more: Any,
) -> Stages:
    states = {"search": {"budget": budget, "criterion": criterion, **more}}
    return [stage(states=states, aggregate=aggregate, align=align, border=border, space=space)]


def given(states: list[Any], aggregate: str = "mean", border: str = "renormalise", space: str = "") -> Stages:
    """States of a list, aggregated as in a search."""
    options = {"aggregate": aggregate, "align": "average", "border": border, "space": space}
    return [stage(states=states, edges="zeros", **options)]


def until(by: str, below: float, **more: Any) -> Stages:
    return search(10, until=gate(by, below, **more))


# ---------------------------------------------------------------- classification: every recipe on four networks
STATES: dict[str, list[Any]] = {
    "strided": [[0, 0, 0, 0], [0, 1, 0, 2], [[0, 0], [0, -1], [1, 0], [0, 0]]],
    "resnet": [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 3, 2, 0], [[0, 0], [1, 0], [0, 0], [0, 1], [0, 0]]],
    "mobile": [[0, 0, 0, 0], [2, 0, 0, 0], [[0, 0], [1, 1], [0, -1], [0, 0]]],
    "patches": [[0], [9], [[3, -2]], [[0, 4]]],
}
LAYERS = {"strided": [3, 4], "resnet": [1, 2, 3, 4, 5], "mobile": [1, 2, 3, 4], "patches": [1]}
CHANNELS = {"strided": 24, "resnet": 24, "mobile": 24, "patches": 16}
# Between the confidences of the images, so that some pass and some do not.
BELOW = {
    "strided": {"margin": 0.56, "probability": 0.67, "entropy": 0.38, "agreement": 0.9},
    "resnet": {"margin": 0.25, "probability": 0.54, "entropy": 0.41, "agreement": 0.9},
    "mobile": {"margin": 0.4, "probability": 0.6, "entropy": 0.3, "agreement": 0.9},
    "patches": {"margin": 0.3, "probability": 0.7, "entropy": 0.5, "agreement": 0.5},
}
SEVERAL = {
    "strided": (0.2, 0.46, 0.24),
    "resnet": (0.2, 0.5, 0.3),
    "mobile": (0.4, 0.45, 0.3),
    "patches": (0.3, 0.4, 0.1),
}
FIVE = ("FiveCrop=LeftTop", "FiveCrop=RightTop", "FiveCrop=LeftBottom", "FiveCrop=RightBottom")


def classification(network: str) -> None:
    below, states, canvas = BELOW[network], STATES[network], CANVAS[network]

    def add(name: str, stages: Stages | str, **more: Any) -> None:
        case(f"{network}: {name}", network, "classification", stages, **more)

    def learned(seed: int) -> dict[str, int]:
        return {"seed": seed, "channels": CHANNELS[network]}

    for preset in ("plain", "default", "flip", "paper"):
        add(f"preset {preset}", preset)
    add("preset multiscale-flip", "multiscale-flip", images=canvas)
    add("preset multiscale-flip without a canvas", "multiscale-flip")

    add("gate by margin", [stage(), stage("flip", gate=gate("margin", below["margin"]))])
    add("gate by probability", [stage(), stage("flip", gate=gate("probability", below["probability"]))])
    add("gate by entropy", [stage(), stage("flip", "FlipUD", gate=gate("entropy", below["entropy"]))])
    first, again = stage("plain", "flip", "FlipUD"), gate("agreement", below["agreement"])
    add("gate by agreement", [first, stage(states=near(4), gate=again)])
    by_margin, by_probability, by_entropy = SEVERAL[network]
    several = [
        stage(),
        stage("flip", gate=gate("margin", by_margin)),
        stage("plain", "flip", states=near(3), gate=gate("probability", by_probability)),
        stage("1.3x", gate=gate("entropy", by_entropy)),
    ]
    add("three gates", several, images=canvas)
    weighted = {"weights": [1.0, 0.5, 2.0], "temperatures": [1.0, 0.8, 1.5]}
    add("weights and temperatures", [stage("plain", "flip", "1.3x", **weighted)], temperature=1.7, images=canvas)
    weighted = {"weights": [0.5, 0.25], "temperatures": [1.2, 0.9]}
    again = gate("margin", below["margin"])
    add("gated, weights", [stage(), stage("flip", "Field=0.8", **weighted, gate=again)], combine="probabilities")
    add("near states", [stage(states=near(6))])
    add("near states, flipped", [stage("plain", "flip", states=near(4))])
    add("near states, gated", [stage(), stage(states=near(5), gate=again)])
    add("written states", [stage("plain", "flip", states=states, edges="pinned")])
    more = [stage("plain", "flip"), stage("plain", "flip", states=near(3)), stage(states=near(5))]
    add("views go on in more states", more)
    add("sizes and shifts", [stage("plain", "1.3x", "flip + 0.75x", "ShiftX=5", "ShiftY=-6")], images=canvas)
    add("fields and corners", [stage("plain", "Field=0.8", "Field=1.2"), stage(*FIVE)], images=canvas)
    add("shifts without a canvas", [stage("plain", "ShiftX=5", "Field=1.2", "FiveCrop=RightTop")])
    add("combine probabilities", [stage("plain", "flip", "FlipUD")], combine="probabilities", temperature=0.6)

    add("search 1", search(1))
    add("search 2", search(2))
    add("search 4, mean", search(4, aggregate="mean"), budgets=[1, 2, 4])
    add("search 10", search(10), budgets=[1, 2, 4, 10])
    add("search 10, zeros", search(10, border="zeros"))
    add("search 10, layers", search(10, layers=LAYERS[network]), budgets=[2, 10])
    add("search 10, without alignment", search(10, align="none"))
    add("search 6, max", search(6, aggregate="max"))
    add("search 6, max, zeros", search(6, aggregate="max", border="zeros"))
    add("search 4, features", search(4, space="features"))
    add("search 10, logits", search(10, space="logits"), budgets=[2, 10])
    add("search 4, logits, temperature", search(4, aggregate="mean", space="logits"), temperature=2.5)
    add("displacement", search(10, "displacement"), budgets=[1, 4, 10])
    add("random", search(10, "random", seed=3))
    add("random, another seed", search(8, "random", seed=4, aggregate="mean"))
    add("learned", search(10, "learned", aggregate="learned"), budgets=[1, 2, 10], attention=learned(1))
    add("learned, zeros", search(6, "learned", aggregate="learned", border="zeros"), attention=learned(2))
    add("learned, by entropy", search(6, aggregate="learned"), attention=learned(3))
    add("given states", given(states))
    add("given states, entropy, zeros", given(states[1:], "entropy", "zeros"))
    add("given states, logits", given(states, "entropy", space="logits"))
    for by in ("margin", "probability", "entropy"):
        add(f"until {by}", until(by, below[by]))
    add("until agreement", until("agreement", 1.0, after=4))


for _network in STATES:
    classification(_network)

case("token: near states", "patches-token", "classification", [stage("plain", "flip", states=near(3))])
case("token: search", "patches-token", "classification", search(6), budgets=[2, 6])
case("strided: the last layer, exhausted", "strided", "classification", search(10, layers=[4]))
case("one logit: default", "strided-one", "classification", "default")
case("one logit: probabilities", "strided-one", "classification", [stage("plain", "flip")], combine="probabilities")
case("one logit: search", "strided-one", "classification", search(6))
_until = search(6, aggregate="mean", space="logits", until=gate("margin", 0.5))
case("one logit: until margin", "strided-one", "classification", _until)


# ---------------------------------------------------------------- labels, numbers, vectors
def labels(name: str, stages: Stages | str, **more: Any) -> None:
    case(f"labels: {name}", "strided-labels", "multilabel", stages, **more)


labels("default", "default")
_stages = [stage(), stage("flip", states=near(3), gate=gate("probability", 0.6))]
labels("gate by probability", _stages, combine="probabilities")
labels("gate by entropy", [stage(), stage("flip", gate=gate("entropy", 0.4))])
labels("gate by agreement", [stage("plain", "flip"), stage("FlipUD", gate=gate("agreement", 0.95))])
labels("search", search(8, aggregate="mean"), budgets=[2, 8])
labels("search, logits", search(8, aggregate="mean", space="logits"))
labels("max", search(4, aggregate="max"))


def numbers(name: str, stages: Stages | str, **more: Any) -> None:
    case(f"numbers: {name}", "strided-numbers", "regression", stages, **more)


numbers("default", "default")
numbers("median", [stage("plain", "flip", states=near(2))], combine="median")
numbers("search", search(6, "displacement", aggregate="mean"), budgets=[2, 6])
numbers("random, logits", search(6, "random", aggregate="mean", space="logits", seed=2))


def vectors(name: str, stages: Stages | str, **more: Any) -> None:
    case(f"vectors: {name}", "strided-vector", "embedding", stages, **more)


vectors("flip", "flip")
vectors("median", [stage("plain", "flip", "FlipUD")], combine="median")
vectors("values", [stage("plain", "flip")], combine="values")
vectors("gate by agreement", [stage("plain", "flip"), stage(states=near(3), gate=gate("agreement", 0.99))])
vectors("search", search(6, "displacement", aggregate="mean"))
vectors("search, logits", search(6, "random", aggregate="mean", space="logits", seed=1))


# ---------------------------------------------------------------- maps
def segmentation(name: str, stages: Stages | str, **more: Any) -> None:
    case(f"segmentation: {name}", "segmenter", "segmentation", stages, **more)


segmentation("plain", "plain")
segmentation("default", "default")
_stages = [stage("plain", "flip", "1.25x", "flip + 0.75x")]
segmentation("sizes", _stages, combine="probabilities", images=CANVAS["segmenter"])
segmentation("flips", [stage("plain", "FlipUD", "flip + FlipUD")])
segmentation("near states", [stage("plain", "flip", states=near(4))])
_stages = [stage(), stage("flip", weights=[0.5], gate=gate("margin", 0.5))]
segmentation("gate by margin", _stages, combine="probabilities")
segmentation("gate by entropy", [stage(), stage(states=near(3), gate=gate("entropy", 0.4))], temperature=1.4)
for _below in (0.1, 0.4):
    _again = gate("margin", _below, tile=8, context=8)
    segmentation(f"tiles below {_below}", [stage(), stage("flip", gate=_again)], images=TILES)
_again = gate("entropy", 0.2, tile=16, context=4)
_stages = [stage(), stage("plain", "flip", states=near(3), gate=_again)]
segmentation("tiles, near states", _stages, combine="probabilities", images=TILES)
_again = gate("probability", 0.55, tile=16, context=8)
_stages = [stage(), stage("flip", gate=_again), stage("1.25x", weights=[0.5])]
segmentation("tiles, two stages", _stages, images=TILES)
segmentation("search", search(10), budgets=[2, 10])
segmentation("search, layers", search(10, layers=[2, 3]))
segmentation("mean, zeros", search(4, aggregate="mean", border="zeros"))
segmentation("entropy, zeros", search(6, border="zeros"))
segmentation("max", search(4, aggregate="max"))
segmentation("without alignment", search(4, align="none"))
segmentation("random", search(4, "random", aggregate="mean", seed=1), temperature=0.7)
segmentation("given states", given([[0, 1, 0], [[1, 0], [0, 1], [0, -1]]], "entropy"))
segmentation("stitch", search(10, align="stitch", aggregate="mean"))
segmentation("stitch by entropy", search(6, "displacement", align="stitch"))
segmentation("until margin", search(8, until=gate("margin", 0.5)))


def padded(name: str, stages: Stages | str, **more: Any) -> None:
    case(f"padded: {name}", "segmenter-32", "segmentation", stages, **more)


padded("default", "default")
padded("sizes, near states", [stage("plain", "flip"), stage("1.25x", states=near(2))])
padded("search", search(4), budgets=[2, 4])
padded("tiles", [stage(), stage("flip", gate=gate("margin", 0.09, tile=8, context=4))])

case("pixel labels: flip", "segmenter", "multilabel-segmentation", "flip")
case("pixel labels: search", "segmenter", "multilabel-segmentation", search(4, aggregate="mean"))


def depth(name: str, stages: Stages | str, **more: Any) -> None:
    case(f"depth: {name}", "depth", "dense", stages, **more)


depth("flip", "flip")
depth("median", [stage("plain", "flip", "FlipUD", "1.25x")], combine="median", images=CANVAS["depth"])
depth("near states", [stage(states=near(5))])
depth("search", search(6, "displacement", aggregate="mean"), budgets=[2, 6])
depth("stitch", search(4, "displacement", aggregate="mean", align="stitch"))
case("features: default", "pyramid", "features", "default")
_stages = [stage("plain", "flip", states=near(3))]
case("features: directions", "pyramid", "features", _stages, combine="directions")
case("features: median", "pyramid", "features", [stage("plain", "flip", "FlipUD")], combine="median")
