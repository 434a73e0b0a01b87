"""Images of every kind of place, in one fixed order, one by one."""

import io
import os
import tarfile

import pytest
from small_nets import photo, png

from unstride.errors import DataError, OptionError
from unstride.predicting.inputs import ImageInputs
from unstride.views.images import images_below, open_image


def entries(inputs):
    return iter(ImageInputs(inputs))


def survey(inputs):
    return ImageInputs(inputs).survey()


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


def test_an_image_is_listed_once_however_often_it_is_given(tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("a/1.png", "a/2.png"):
        photo().save(tmp_path / name)
    (tmp_path / "list.txt").write_text("a/1.png\na\n")
    inputs = ImageInputs([tmp_path / "a", tmp_path / "a" / "2.png", tmp_path / "a", f"@{tmp_path / 'list.txt'}"])
    assert [entry.name for entry in inputs] == [str(tmp_path / "a" / f"{k}.png") for k in (1, 2)]
    assert inputs.repeated == (6, str(tmp_path / "a" / "2.png"))
    assert inputs.survey().count == 2


def test_globs_are_sorted_and_find_images_and_folders(tmp_path):
    for name in ("x/1.png", "x/2.jpg.txt", "y/3.png", "4.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        photo().save(tmp_path / name, "PNG")
    assert names(f"{tmp_path}/*/*") == [str(tmp_path / "x/1.png"), str(tmp_path / "y/3.png")]
    assert names(f"{tmp_path}/**/*.png") == [str(tmp_path / n) for n in ("4.png", "x/1.png", "y/3.png")]
    assert names(f"{tmp_path}/[xy]") == [str(tmp_path / "x/1.png"), str(tmp_path / "y/3.png")]
    with pytest.raises(DataError, match="no file matches"):
        names(f"{tmp_path}/*.gif")


def test_a_list_may_begin_with_a_byte_order_mark(tmp_path):
    photo().save(tmp_path / "a.png")
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbfa.png\n")
    assert names(f"@{tmp_path / 'list.txt'}") == [str(tmp_path / "a.png")]


def test_a_list_that_is_no_utf_8_is_named(tmp_path):
    photo().save(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text("a.png\n", encoding="utf-16")
    with pytest.raises(DataError, match=r"list\.txt: it is not a text file in UTF-8"):
        names(f"@{tmp_path / 'list.txt'}")


def test_lists_may_name_lists_but_not_themselves(tmp_path):
    photo().save(tmp_path / "a.png")
    (tmp_path / "one.txt").write_text("@two.txt\n")
    (tmp_path / "two.txt").write_text("a.png\n")
    assert names(f"@{tmp_path / 'one.txt'}") == [str(tmp_path / "a.png")]
    (tmp_path / "two.txt").write_text("a.png\n@one.txt\n")
    with pytest.raises(DataError, match="names itself"):
        names(f"@{tmp_path / 'one.txt'}")


@pytest.mark.parametrize(("suffix", "mode"), [(".tar", "w"), (".tar.gz", "w:gz")])
def test_links_in_a_tar_are_counted(tmp_path, suffix, mode):
    path = tmp_path / f"s{suffix}"
    with tarfile.open(path, mode) as tar:
        for name, kind in (("a.png", tarfile.REGTYPE), ("b.png", tarfile.SYMTYPE), ("c.png", tarfile.LNKTYPE)):
            info, data = tarfile.TarInfo(name), png(photo())
            info.type, info.linkname = kind, "a.png"
            info.size = len(data) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(data))
    inputs = ImageInputs(str(path))
    assert [entry.name for entry in inputs] == [f"{path}/a.png"]
    assert inputs.links == (2, f"{path}/b.png -> a.png")


@pytest.mark.parametrize("nested", [False, True])
def test_parquet_files_hold_images_as_bytes(tmp_path, nested):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    images = [png(photo(k)) for k in range(3)]
    column = [{"bytes": data, "path": f"{k}.png"} for k, data in enumerate(images)] if nested else images
    parquet.write_table(arrow.table({"image": [*column, None], "label": [0, 1, 2, 3]}), tmp_path / "a.parquet")
    *good, empty = entries(tmp_path / "a.parquet")
    assert [entry.name for entry in good] == [f"{tmp_path / 'a.parquet'}/{k:08d}" for k in range(3)]
    assert [entry.fetch() for entry in good] == images
    with pytest.raises(DataError, match="00000003: there is no image"):
        empty.fetch()
    assert survey(tmp_path / "a.parquet").count == 4
    parquet.write_table(arrow.table({"label": [0, 1]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="columns label; expected"):
        names(tmp_path / "b.parquet")


def test_object_stores_are_read_by_fsspec(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    for name in ("b/2.png", "a/1.png", "a/notes.txt"):
        files.pipe(f"/store/{name}", png(photo(len(name))))
    files.pipe("/store/s.tar.gz", shard(tmp_path / "s.tar.gz", [("k.png", png(photo(3)))], "w:gz").read_bytes())
    found = list(entries("memory://store"))
    wanted = ["a/1.png", "b/2.png", "s.tar.gz/k.png"]
    assert [entry.name for entry in found] == [f"memory:///store/{name}" for name in wanted]
    assert found[0].fetch() == png(photo(len("a/1.png"))) and found[2].fetch() == png(photo(3))
    assert names("memory://store/*/*.png") == [f"memory:///store/{name}" for name in wanted[:2]]
    assert names("memory://store/b/2.png") == ["memory:///store/b/2.png"]
    before = survey("memory://store/a").digest
    files.pipe("/store/a/1.png", png(photo(9)))
    assert survey("memory://store/a").digest != before
    with pytest.raises(DataError, match="nothing at this address"):
        names("memory://nowhere")
    with pytest.raises(DataError, match="nosuch"):
        names("nosuch://bucket")


def test_what_is_no_input_is_refused():
    for wrong in (None, [], [3], 3):
        with pytest.raises(OptionError, match="images: got"):
            ImageInputs(wrong)
