import os
import pickle
import sys
import tracemalloc

import numpy as np
import pytest
from planting import plant, settle

from nestling.ssl.data.sources.lists import ImageList
from nestling.ssl.errors import UserError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(path, content):
    path.write_bytes(content)
    return str(path)


def write_parquet(file, /, **columns):
    pq.write_table(pa.table(columns), file)
    return str(file)


def paths_in(images):
    return [images.path(i) for i in range(len(images))]


def test_a_text_list_holds_one_path_a_line(tmp_path):
    plant(tmp_path, "x/b c.png", "a.png")
    elsewhere = plant(tmp_path / "elsewhere", "d.png") + "/d.png"
    images = ImageList(write(tmp_path / "list.txt", f"x/b c.png\na.png\n{elsewhere}".encode()))
    assert paths_in(images) == [str(tmp_path / "x/b c.png"), str(tmp_path / "a.png"), elsewhere]
    assert images.load(1)[0, 0].tolist() == [1, 0, 0]
    assert images.labels is None
    assert images.class_names is None
    assert images.passed_over == ""


def test_paths_do_not_depend_on_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "lists").mkdir()
    write(tmp_path / "lists" / "list.txt", b"a.png\n../b.png\n")
    monkeypatch.chdir(tmp_path)
    images = ImageList("lists/list.txt")
    assert paths_in(images) == [str(tmp_path / "lists/a.png"), str(tmp_path / "lists/../b.png")]
    assert images.name == "lists/list.txt"


def test_blank_lines_windows_line_ends_and_a_byte_order_mark_are_no_part_of_names(tmp_path):
    images = ImageList(write(tmp_path / "list.TXT", b"\xef\xbb\xbfa.png\r\n\r\n  \nb.png\r\n\n"))
    assert [os.path.basename(path) for path in paths_in(images)] == ["a.png", "b.png"]
    assert images.passed_over == "3 blank lines"


def test_names_of_any_bytes_survive_in_every_kind_of_list(tmp_path):
    name = b"\xff/\xfe,\"'.png"
    quoted = b'"' + name.replace(b'"', b'""') + b'"'
    lists = [
        write(tmp_path / "list.txt", name + b"\n"),
        write(tmp_path / "list.csv", b"path\n" + quoted + b"\n"),
        write_parquet(tmp_path / "list.parquet", path=pa.array([name], pa.binary())),
    ]
    for file in lists:
        assert paths_in(ImageList(file)) == [os.path.join(str(tmp_path), os.fsdecode(name))], file


def test_a_table_may_have_labels_and_other_columns(tmp_path):
    content = (
        "\ufeffsplit, label ,path\ntrain,dog,1.png\n\ntrain,é,2.png\nval,cat,3.png\nval,dog,1.png\n".encode()
    )
    images = ImageList(write(tmp_path / "list.csv", content))
    assert [os.path.basename(path) for path in paths_in(images)] == ["1.png", "2.png", "3.png", "1.png"]
    assert images.class_names == ["cat", "dog", "é"]
    assert images.labels.tolist() == [1, 2, 0, 1]
    assert images.labels.dtype == np.int64
    assert images.passed_over == "1 blank line"


def test_a_table_without_labels_has_none(tmp_path):
    assert ImageList(write(tmp_path / "list.csv", b"path\n1.png\n")).labels is None
    assert ImageList(write_parquet(tmp_path / "list.parquet", path=["1.png"])).labels is None


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["b", "a", "b"], ["a", "b"]),
        ([10, 9, 10], ["10", "9"]),
        (pa.array(["b", "a", "b"]).dictionary_encode(), ["a", "b"]),
        (pa.array([b"b", b"\xff", b"b"], pa.binary()), ["b", os.fsdecode(b"\xff")]),
        ([True, False, True], ["False", "True"]),
    ],
)
def test_labels_of_any_kind_are_names_in_a_parquet_list(tmp_path, labels, names):
    images = ImageList(
        write_parquet(tmp_path / "list.parquet", other=[1, 2, 3], path=list("xyz"), label=labels)
    )
    values = labels if isinstance(labels, list) else labels.to_pylist()
    expected = [os.fsdecode(value) if isinstance(value, bytes) else str(value) for value in values]
    assert images.class_names == names
    assert [images.class_names[label] for label in images.labels] == expected


def test_all_kinds_of_text_columns_hold_paths(tmp_path):
    for kind in (
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.string_view(),
        pa.binary_view(),
        pa.binary(1),
    ):
        file = write_parquet(tmp_path / f"{kind}.parquet", path=pa.array(["b", "a"], pa.string()).cast(kind))
        assert [os.path.basename(path) for path in paths_in(ImageList(file))] == ["b", "a"], kind


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"file,class\n1.png,a\n", r"a table needs the column path, found file, class$"),
        ("a.csv", b"", "needs the column path, found none"),
        ("a.csv", b"path,label,path\n1,a,2\n", "2 columns are named path; keep one"),
        ("a.csv", b"label,path, label\na,1,b\n", "2 columns are named label; keep one"),
        ("a.csv", b"Path,label\n1.png,a\n", "found the column Path; did you mean path"),
        ("a.csv", b"path,LABEL\n1.png,a\n", "found the column LABEL; did you mean label"),
        ("a.csv", b"path;label\n1.png;a\n", "its columns are separated by semicolons; save it with commas"),
        ("a.csv", b"path\tlabel\n1.png\ta\n", "its columns are separated by tabs; save it with commas"),
        ("a.txt", b"a.png\rb.png\r", "its lines end by CR alone; save it with the line ends of Linux"),
        ("a.txt", b"a.png\rb.png", "its lines end by CR alone; save it with the line ends of Linux"),
        ("a.csv", b"path,label\n1.png,a\n2.png,\n", "line 3 has no label"),
        ("a.csv", b"path,label\n1.png,a\n2.png\n", "line 3 has no label"),
        ("a.csv", b"label,path\na,1.png\n\nb,\n", "line 4 has no path"),
        ("a.csv", b"label,path\na\n", "line 2 has no path"),
        ("a.csv", b"path\n" + b"x" * 200_000, "line 2 is no row of a table"),
        ("a.csv", b"path,label\n", "no image is named, saw nothing"),
        ("a.txt", b"", "no image is named, saw nothing"),
        ("a.txt", b"\n \n", "no image is named, saw 2 blank lines"),
        ("a.txt", "a.png\n".encode("utf-16"), "line 1: .* holds a zero byte.*save the list as UTF-8"),
        ("a.parquet", b"no parquet", "it is no sound parquet file"),
        ("a.parquet", b"", "it is no sound parquet file"),
    ],
)
def test_a_list_that_is_not_sound_is_refused_by_its_place(tmp_path, name, content, message):
    with pytest.raises(UserError, match=rf"(?s)^data\.val={tmp_path}/{name}: .*{message}") as refusal:
        ImageList(write(tmp_path / name, content), key="data.val")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": ["a"]}, "needs the column path, found image"),
        ({"PATH": ["a"]}, "found the column PATH; did you mean path"),
        ({"path": ["a"], "Label": ["x"]}, "found the column Label; did you mean label"),
        ({"path": [1]}, "the column path holds int64"),
        ({"path": ["a"], "label": [[1]]}, "the column label holds list"),
        ({"path": ["a", None]}, "row 2 has no path"),
        ({"path": ["a", "b"], "label": [1, None]}, "row 2 has no label"),
        ({"path": ["a", "b"], "label": [float("nan"), 1.0]}, "row 1 has no label"),
        ({"path": pa.array([], pa.string())}, "no image is named"),
        ({"path": ["a"], "label": ["  "]}, "row 1 has no label"),
    ],
)
def test_a_parquet_list_that_is_not_sound_is_refused(tmp_path, columns, message):
    with pytest.raises(UserError, match=message):
        ImageList(write_parquet(tmp_path / "list.parquet", **columns))


@pytest.mark.parametrize("name", ["path", "label"])
def test_a_column_that_is_there_twice_is_refused_in_a_parquet_list(tmp_path, name):
    table = pa.Table.from_arrays([pa.array(["a"])] * 3, names=["path", "label", name])
    pq.write_table(table, tmp_path / "list.parquet")
    with pytest.raises(UserError, match=f"2 columns are named {name}; keep one of them"):
        ImageList(str(tmp_path / "list.parquet"))


def test_zeros_that_fill_bytes_up_are_no_part_of_names(tmp_path):
    padded = pa.array([b"a\0\0", b"abc"], pa.binary(3))
    columns = {"path": padded, "label": padded.dictionary_encode()}
    images = ImageList(write_parquet(tmp_path / "list.parquet", **columns))
    assert [os.path.basename(path) for path in paths_in(images)] == images.class_names == ["a", "abc"]


def test_blanks_around_labels_are_no_part_of_them_but_those_of_paths_are(tmp_path):
    images = ImageList(write(tmp_path / "list.csv", b"path,label\na.png ,owl\nb.png, owl \nc.png,a b\n"))
    assert images.class_names == ["a b", "owl"]
    assert images.labels.tolist() == [1, 1, 0]
    assert images.path(0) == str(tmp_path / "a.png ")


def test_a_table_whose_lines_end_by_cr_alone_is_read(tmp_path):
    images = ImageList(write(tmp_path / "list.csv", b"path,label\ra.png,x\rb.png,y\r"))
    assert [os.path.basename(path) for path in paths_in(images)] == ["a.png", "b.png"]


def test_a_name_that_holds_a_cr_survives(tmp_path):
    images = ImageList(write(tmp_path / "list.txt", b"a\rb.png\nc.png"))
    assert [os.path.basename(path) for path in paths_in(images)] == ["a\rb.png", "c.png"]


def test_text_that_is_no_utf8_is_refused_in_a_parquet_list(tmp_path):
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"], pa.binary()).buffers())
    with pytest.raises(UserError, match="no UTF-8; store such names as binary"):
        ImageList(write_parquet(tmp_path / "list.parquet", path=broken))


def test_a_parquet_list_cut_short_is_refused(tmp_path):
    file = tmp_path / "list.parquet"
    write_parquet(file, path=[f"{i}.png" for i in range(10_000)])
    content = file.read_bytes()
    middle = len(content) // 3
    file.write_bytes(content[:middle] + bytes(200) + content[middle + 200 :])
    with pytest.raises(UserError, match="no sound parquet file"):
        ImageList(str(file))


def test_a_parquet_list_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    file = write_parquet(tmp_path / "list.parquet", path=["a"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install nestling\[parquet\]"):
        ImageList(file)


def test_a_missing_list_is_refused_by_its_key(tmp_path):
    with pytest.raises(UserError, match=r"data\.train=.*gone\.txt can't be read: No such file"):
        ImageList(str(tmp_path / "gone.txt"))


def test_a_list_is_read_again_only_when_it_changed(tmp_path):
    file = tmp_path / "list.txt"
    write(file, b"a\nb\n")
    settle(tmp_path)
    times = os.stat(file)
    cache = str(tmp_path / "cache")
    assert len(ImageList(str(file), cache=cache)) == 2
    write(file, b"c\nd\n")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert [os.path.basename(path) for path in paths_in(ImageList(str(file), cache=cache))] == ["a", "b"]
    os.utime(file)
    assert [os.path.basename(path) for path in paths_in(ImageList(str(file), cache=cache))] == ["c", "d"]


def test_a_list_just_written_is_read_again(tmp_path):
    file = tmp_path / "list.txt"
    write(file, b"a\n")
    times = os.stat(file)
    assert ImageList(str(file)).path(0).endswith("a")
    write(file, b"b\n")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert ImageList(str(file)).path(0).endswith("b")


def test_lists_survive_pickling_at_the_cost_of_a_name(tmp_path):
    rows = "".join(f"x/{i}.png,{i % 7}\n" for i in range(3000))
    images = ImageList(write(tmp_path / "list.csv", f"path,label\n{rows}".encode()))
    pickled = pickle.dumps(images)
    again = pickle.loads(pickled)
    assert len(pickled) < 2000
    assert paths_in(again) == paths_in(images)
    assert again.labels.tolist() == [i % 7 for i in range(3000)]


def test_sides_of_listed_files_are_told(tmp_path):
    plant(tmp_path, "a.png")
    images = ImageList(write(tmp_path / "list.txt", b"gone.png\na.png\na.png\n"))
    assert images.sides(np.arange(3)).tolist() == [0, 2, 2]


def test_reading_a_long_list_takes_little_more_than_the_packed_paths(tmp_path):
    count = 20_000
    rows = "".join(f"folder_{i % 100}/image_{i:08d}.png,class_{i % 10}\n" for i in range(count))
    file = write(tmp_path / "list.csv", f"path,label\n{rows}".encode())
    tracemalloc.start()
    ImageList(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (
        peak < 150 * count
    )  # 3 million rows: 450 MB for a moment; as Python strings 90 each and 8 in the list
