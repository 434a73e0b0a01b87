"""`unstride tune` from the command line: what is written, what is refused, what a recipe file does afterwards."""

import itertools
import json
from pathlib import Path

import made_pools
import pytest
from PIL import Image
from typer.testing import CliRunner

import unstride.tuning.partners as partners
from unstride.cli.main import app
from unstride.errors import OptionError, SpecError
from unstride.recipe.files import read

NETWORKS = """
import sys
sys.path.insert(0, {folder!r})
import made_pools
def small(): return made_pools.loaded(3.0, 4, "small")
def large(): return made_pools.loaded(0.5, 16, "large")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "nets.py").write_text(NETWORKS.format(folder=str(Path(made_pools.__file__).parent)))
    return folder


def run(*arguments: object):
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def specs(folder: Path) -> list[str]:
    return [f"{folder / 'nets.py'}:small", f"{folder / 'nets.py'}:large"]


def test_it_writes_a_recipe_a_page_and_json(folder):
    data, out, page = made_pools.npz(folder, 200), folder / "best.toml", folder / "page.html"
    done = run(*specs(folder), "--data", data, "--cost", 2.5, "--out", out, "--report", page, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["decision"] == "use" and found["out"] == str(out) and found["report"] == str(page)
    assert set(read(out).recipe.networks) == {"base", "net2"} and "ensemble of all" in page.read_text()
    ran = CliRunner().invoke(app, ["evaluate", *specs(folder), "--data", data, "--recipe", str(out), "--json"])
    assert ran.exit_code == 0, ran.output


def test_keep_writes_nothing_without_anyway(folder):
    data, out = made_pools.npz(folder, 60, seed=9), folder / "keep.toml"
    done = run(specs(folder)[1], "--data", data, "--cost", 1.2, "--out", out)
    assert done.exit_code == 0 and "Keep" in done.stdout and "--anyway writes it" in done.stdout
    assert not out.exists()
    assert run(specs(folder)[1], "--data", data, "--cost", 1.2, "--out", out, "--anyway").exit_code == 0
    assert read(out).figures["decision"] == "keep"


def test_images_without_labels_set_the_gates(folder):
    photos = folder / "photos"
    photos.mkdir()
    for k, x in enumerate(made_pools.images(40)[0]):
        Image.fromarray(x).save(photos / f"{k}.png")
    done = run(*specs(folder), "--images", photos, "--cost", 2.0, "--out", folder / "gates.toml")
    assert done.exit_code == 0 and "without labels" in done.stdout, done.output
    assert read(folder / "gates.toml").figures["decision"] == "inconclusive"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --data with labels, or --images without"),
        (("--data", "sample", "--images", "x"), "give --data with labels, or --images without"),
        (("--images", "x", "--report", "y.html"), "--report needs labels"),
        (("--data", "sample", "--recipe", "flip", "--against", "plain"), "--recipe is the baseline here"),
    ],
)
def test_usage_is_checked_first(arguments, message):
    done = run("sample", *arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.replace("│", " ").split())


def test_a_cost_of_nothing_is_refused(folder):
    done = run(*specs(folder), "--data", made_pools.npz(folder, 60, seed=9), "--cost", 0)
    assert done.exit_code == 1 and "cost: got 0.0, expected more than 0" in done.output


def test_partners_are_cheaper_and_apart_and_named_where_no_hub_answers(monkeypatch, capsys):
    found = partners.partners_of("timm:resnet50")
    assert 2 <= len(found) <= 3 and all(p.gmacs <= 0.7 * 4.1 for p in found)
    assert all(a.gmacs >= 1.4 * b.gmacs for a, b in itertools.pairwise(found))
    asked, here = [], {"timm:resnet50"}

    def load(spec, weights):
        asked.append((spec, weights))
        if spec not in here:
            raise SpecError(f"{spec}: its weights could not be fetched")
        return made_pools.loaded(0.5, 16, spec)

    monkeypatch.setattr(partners, "load", load)
    with pytest.warns(match=f"{found[0].spec}.* where a hub can be reached"):
        loaded = partners.with_partners(["timm:resnet50"], "auto", "own.pth")
    assert [n.spec for n in loaded] == ["timm:resnet50"]
    assert asked == [("timm:resnet50", "own.pth"), *((p.spec, "default") for p in found)]
    here.clear()
    with pytest.raises(SpecError, match=f"could not be fetched. Partners to try .*{found[0].spec}"):
        partners.with_partners("timm:resnet50", "auto")
    with pytest.raises(OptionError, match="no network much cheaper than timm:mobilenetv3_small_100"):
        partners.with_partners("timm:mobilenetv3_small_100", "auto")


def test_the_table_of_partners_names_networks_that_timm_has():
    timm = pytest.importorskip("timm")
    known = {name.partition(".")[0] for name in timm.list_models()}
    assert {p.name.partition(".")[0] for p in partners.TABLE} <= known
