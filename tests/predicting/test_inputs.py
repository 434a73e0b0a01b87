"""Images of every kind of place, in one fixed order, one by one."""

import io
import os
import tarfile

import pytest
from small_nets import photo, png

from unstride.errors import DataError
from unstride.predicting.inputs import entries, survey
from unstride.views.images import images_below, open_image


def names(*inputs):
    return [entry.name for entry in entries(inputs)]


def shard(path, members, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_a_folder_is_listed_as_everywhere_else(tmp_path):
    for name in ("b/2.png", "a/x/1.png", "c.png", "a/0.png", "a/notes.txt", "a/._hidden.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        photo().save(tmp_path / name, "PNG")
    assert names(tmp_path) == [str(p) for p in images_below(tmp_path)]
    assert len(names(tmp_path)) == 4


def test_links_lead_to_each_image_once_and_never_in_a_circle(tmp_path):
    (tmp_path / "a").mkdir()
    photo().save(tmp_path / "a" / "1.png")
    os.symlink(tmp_path / "a" / "1.png", tmp_path / "again.png")
    os.symlink(tmp_path, tmp_path / "a" / "back")
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    photo().save(outside / "2.png")
    os.symlink(outside, tmp_path / "other")
    assert names(tmp_path) == [str(tmp_path / "a" / "1.png"), str(tmp_path / "other" / "2.png")]


def test_a_list_names_images_folders_and_shards_relative_to_itself(tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("a/1.png", "2.png"):
        photo().save(tmp_path / name)
    shard(tmp_path / "s.tar", [("k.png", png(photo()))])
    (tmp_path / "list.txt").write_text("# images\n2.png\n\na\ns.tar\nmissing.png\n")
    found = names(f"@{tmp_path / 'list.txt'}")
    assert [os.path.relpath(name, tmp_path) for name in found] == ["2.png", "a/1.png", "s.tar/k.png", "missing.png"]


@pytest.mark.parametrize(("suffix", "mode"), [(".tar", "w"), (".tar.gz", "w:gz")])
def test_a_shard_gives_its_images_as_it_comes(tmp_path, suffix, mode):
    images = [photo(k) for k in range(3)]
    members = [m for k, p in enumerate(images) for m in ((f"{k:03d}.png", png(p)), (f"{k:03d}.cls", b"1"))]
    path = shard(tmp_path / f"s{suffix}", members, mode)
    found = [(entry.name, open_image(entry.fetch()).tobytes()) for entry in entries([path])]
    assert found == [(f"{path}/{k:03d}.png", p.tobytes()) for k, p in enumerate(images)]
    assert survey([path]).count == (3 if suffix == ".tar" else None)


def test_a_shard_that_was_cut_off_says_so_and_gives_what_came_before(tmp_path):
    path = shard(tmp_path / "s.tar", [(f"{k}.png", png(photo(k))) for k in range(4)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    good, errors = [], []
    for entry in entries([path]):
        try:
            good.append(open_image(entry.fetch()))
        except DataError as error:
            errors.append(str(error))
    assert 1 <= len(good) <= 3
    assert errors and "damaged" in errors[-1]


def test_hugging_face_on_disk_with_and_without_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"image": [{"bytes": png(photo(k)), "path": None} for k in range(3)]})
    data = data.cast_column("image", datasets.Image())
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(str(tmp_path / "two"))
    assert len(names(tmp_path / "one")) == 3
    assert [n.rsplit("/", 2)[1] for n in names(f"hf:{tmp_path / 'two'}")] == ["train"] * 3 + ["test"]
    assert open_image(next(entries([tmp_path / "one"])).fetch()).tobytes() == photo(0).tobytes()


def test_a_row_without_an_image_is_an_error_of_its_own(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"image": [{"bytes": png(photo()), "path": None}, None]})
    data.cast_column("image", datasets.Image()).save_to_disk(str(tmp_path / "one"))
    first, second = entries([tmp_path / "one"])
    assert first.fetch()
    with pytest.raises(DataError, match="row 1: there is no image"):
        second.fetch()


def test_a_list_is_a_file_whatever_its_bytes(tmp_path):
    (tmp_path / "list.txt").write_bytes(b"\xff.png\n")
    assert names(f"@{tmp_path / 'list.txt'}") == [str(tmp_path / os.fsdecode(b"\xff.png"))]
    with pytest.raises(DataError, match="is a folder"):
        names(f"@{tmp_path}")


def test_what_is_not_there_is_said_before_anything_is_read(tmp_path):
    photo().save(tmp_path / "a.png")
    with pytest.raises(DataError, match="no such file or folder"):
        next(entries([tmp_path / "a.png", tmp_path / "nowhere"]))


def test_a_survey_tells_one_listing_from_another(tmp_path):
    photo().save(tmp_path / "a.png")
    before = survey([tmp_path])
    assert before == survey([tmp_path])
    photo().save(tmp_path / "b.png")
    after = survey([tmp_path])
    assert (before.count, after.count) == (1, 2)
    assert before.digest != after.digest
