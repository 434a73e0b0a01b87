"""unstride.extend: what is registered is found by name, is held to its contract, and takes nobody else's name."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import unstride
from unstride import extend
from unstride.errors import DataError, InputError, OptionError, SpecError
from unstride.geometry.rules import RULES
from unstride.models import libraries
from unstride.recipe.view import RULES as OPS
from unstride.recipe.view import parse_view
from unstride.views import transforms


@pytest.fixture(autouse=True)
def _forgotten():
    """Each test leaves every table as it was."""
    tables = (RULES, unstride.data.KINDS, unstride.data.TASKS, libraries.LIBRARIES, OPS, transforms.TRANSFORMS)
    kept = [dict(table) for table in tables]
    yield
    for table, before in zip(tables, kept, strict=True):
        table.clear()
        table.update(before)


@torch.library.custom_op("extended::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    return nn.functional.avg_pool2d(x, 2)


@halve.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], x.shape[2] // 2, x.shape[3] // 2)


class Net(nn.Module):
    def __init__(self, op=halve):
        super().__init__()
        self.conv, self.op, self.head = nn.Conv2d(3, 4, 3, 2, 1), op, nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.op(self.conv(x)).relu().mean((2, 3)))


def halved(walk, node, value):
    source = node.args[0]
    pos = walk.pos(source)
    walk.trace.sites.append(extend.Site(node, source, "thin", rate=(2, 2)))

    def cells(t):
        for dim in (2, 3):
            t = extend.resample(t, dim, 2.0 * torch.arange(value.shape[dim]) + 0.5)
        return t

    return pos.map(cells), [source]


def test_a_rule_makes_an_op_a_layer():
    x = torch.randn(1, 3, 32, 32)
    assert len(unstride.inspect(Net().eval(), x).layers) == 1
    extend.rule("extended.halve")(halved)
    assert len(unstride.inspect(Net().eval(), x).layers) == 2


def test_a_rule_is_held_to_its_contract():
    x = torch.randn(1, 3, 32, 32)
    extend.rule("extended.halve")(lambda walk, node, value: (walk.pos(node.args[0]), [node.args[0]]))
    with pytest.raises(OptionError, match=r"extended\.halve gave positions of shape \(1, 4, 16, 16\)"):
        unstride.inspect(Net().eval(), x)
    extend.rule("extended.halve")(lambda walk, node, value: None)
    with pytest.raises(OptionError, match="returned None; expected a position and a list"):
        unstride.inspect(Net().eval(), x)


def tiles(path, split, classes):
    pixels = np.zeros((3, 8, 8, 3), np.uint8)
    extend.check_labels(["a", "b", "c"], [0, 1, 2], classes)
    return extend.of_arrays(pixels, [0, 1, 2], ("x", "y", "z"))


def test_a_reader_is_a_kind_of_data():
    extend.reader("tiles", task="classification")(tiles)
    found = unstride.data.load("tiles:anywhere", unstride.Preprocess(8, 8), limit=2)
    assert (len(found), found.task, found.classes) == (2, "classification", ("x", "y", "z"))
    with pytest.raises(DataError, match="label is 2"):
        unstride.data.load("tiles:anywhere", unstride.Preprocess(8, 8), classes=2)
    named = unstride.data.load("tiles:anywhere", unstride.Preprocess(8, 8), classes=("z", "y", "x"))
    assert [item.target for item in named] == [2, 1, 0]
    extend.reader("lists", task="segmentation")(lambda path, split, classes: [])
    with pytest.raises(DataError, match="lists:there: its reader returned list; expected a Listing"):
        unstride.data.load("lists:there", unstride.Preprocess(None, None))


def test_evaluate_knows_the_task_of_a_reader(tmp_path):
    """A segmenter whose preprocessing nobody said sees images of own kinds whole, as those of unstride's kinds."""

    scenes = nn.Sequential(nn.Conv2d(3, 3, 2, 2), nn.Upsample(scale_factor=2))

    def masks(path, split, classes):
        def item(entry):
            image = Image.new("RGB", (16, 12), entry)
            return extend.Item(entry, lambda: image, lambda: torch.zeros(12, 16, dtype=torch.long))

        return extend.Listing(["red", "green"], item, ("a", "b", "c"))

    extend.reader("colours", task="segmentation")(masks)
    loaded = unstride.models.LoadedModel("ours", scenes.eval(), unstride.Preprocess())
    rows = unstride.evaluate(loaded, "colours:x", recipe="flip", out=tmp_path, progress=False)
    assert all("miou" in row.metric.lower() for row in rows) and rows[0].images == 2


def test_a_library_is_a_source_of_models(tmp_path):
    @extend.library("acme")
    def acme(name):
        if name != "net":
            raise SpecError(f"acme has no {name}")
        return extend.Blueprint(
            build=lambda classes=None, names=(): nn.Sequential(nn.Flatten(), nn.Linear(12, classes or 4)),
            pretrained=lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 4)),
            preprocess=lambda weights, model: extend.Preprocess(2, 2),
            task=lambda model: "classification",
        )

    loaded = unstride.models.load("acme:net")
    assert (loaded.task, loaded.preprocess.size, loaded.model.training) == ("classification", (2, 2), False)
    torch.save(nn.Sequential(nn.Flatten(), nn.Linear(12, 7)).state_dict(), tmp_path / "w.pt")
    assert unstride.models.load("acme:net", weights=tmp_path / "w.pt").model(torch.zeros(1, 3, 2, 2)).shape == (1, 7)
    with pytest.raises(SpecError, match="acme has no other"):
        unstride.models.load("acme:other")
    with pytest.raises(SpecError, match="did you mean acme"):
        unstride.models.load("acm:net")
    extend.library("blank")(lambda name: None)
    with pytest.raises(SpecError, match="blank:net: the library returned NoneType; expected a Blueprint"):
        unstride.models.load("blank:net")


def gamma(image, op):
    return image**op.number


def test_a_view_that_changes_values():
    extend.view("Gamma", values=(0.5, 2.0), neutral=1.0)(gamma)
    view = parse_view("FlipLR + Gamma=2")
    x = torch.rand(2, 3, 8, 9)
    assert torch.equal(transforms.apply(view, x), x.flip(-1) ** 2)
    assert view.intensity == 1.0 and transforms.needs_pixels(view) and transforms.changes_values(view)
    back, valid = transforms.undo(view, x.flip(-1), (8, 9), (8, 9))
    assert torch.equal(back, x) and valid is None
    pixels = (x[0] * 255).to(torch.uint8)
    wanted = (pixels.flip(-1).float() / 255) ** 2 * 255
    assert (transforms.apply(view, pixels).float() - wanted).abs().max() <= 1
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    assert torch.equal(
        torch.tensor(np.array(transforms.apply(view, image))).permute(2, 0, 1), transforms.apply(view, pixels)
    )
    with pytest.raises(OptionError, match=r"Gamma takes a number from 0\.5 to 2, not 3"):
        parse_view("Gamma=3")


def test_a_view_that_moves_pixels_comes_back_and_knows_what_it_saw():
    def left(image, op):
        step = int(op.number)
        return nn.functional.pad(image[..., step:], (0, step))

    def right(output, op):
        step = int(op.number)
        return nn.functional.pad(output[..., :-step], (step, 0))

    extend.view("Left", values=(1, 4), moves=True, undo=right)(left)
    view = parse_view("Left=2 + FlipUD")
    x = torch.rand(1, 3, 6, 8)
    back, valid = transforms.undo(view, transforms.transform(view, x, (6, 8)), (6, 8), (6, 8))
    assert valid is not None and valid[..., 2:].all() and not valid[..., :2].any()
    assert torch.equal(back[..., 2:], x[..., 2:])
    assert transforms.needs_pixels(view) and not transforms.changes_values(view)


def test_a_view_without_a_way_back_is_for_classification():
    extend.view("Mix", moves=True)(lambda image, op: image.roll(1, -1))
    with pytest.raises(OptionError, match="Mix has no exact way back"):
        transforms.check_undo(parse_view("Mix"))
    with pytest.raises(OptionError, match="Mix takes no value"):
        parse_view("Mix=1")


def test_a_view_keeps_the_shape():
    extend.view("Half")(lambda image, op: image[..., ::2, ::2])
    with pytest.raises(InputError, match=r"Half made \(3, 4, 4\) of an image of \(3, 8, 8\)"):
        transforms.apply(parse_view("Half"), torch.rand(3, 8, 8))


def other(*args):
    raise AssertionError


@pytest.mark.parametrize(
    ("register", "names"),
    [
        (extend.rule, ("conv2d", "extended.halve")),
        (lambda name: extend.reader(name, "classification"), ("imagenet", "tiles")),
        (extend.library, ("timm", "acme")),
        (extend.view, ("FlipLR", "Gamma")),
    ],
    ids=["rule", "reader", "library", "view"],
)
def test_a_name_is_given_once(register, names):
    theirs, ours = names
    with pytest.raises(OptionError, match=f"{theirs}' is there already, it is unstride's own; choose another name"):
        register(theirs)(gamma)
    register(ours)(gamma)
    register(ours)(gamma)  # the same function: a cell that is run again
    with pytest.raises(OptionError, match=f"{ours}' is there already by .*gamma; choose another name"):
        register(ours)(other)


@pytest.mark.parametrize(
    "register",
    [
        lambda: extend.rule("acme::thin")(gamma),
        lambda: extend.reader("a:b", "classification")(gamma),
        lambda: extend.reader("sample-ours", "classification")(gamma),
        lambda: extend.library("file.py")(gamma),
        lambda: extend.view("Up=1")(gamma),
    ],
)
def test_a_name_has_its_form(register):
    with pytest.raises(OptionError, match="expected a name of the form"):
        register()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: extend.reader("tiles", "counting"), "task: got 'counting', expected one of"),
        (lambda: extend.view("Gamma", values=(2.0, 1.0)), r"expected \(low, high\)"),
        (lambda: extend.view("Gamma", undo=gamma), "say moves=True"),
    ],
)
def test_what_is_asked_for_makes_sense(make, words):
    with pytest.raises(OptionError, match=words):
        make()
