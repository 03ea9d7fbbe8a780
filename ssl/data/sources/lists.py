"""A list of image files: one path a line, or a table with the columns `path` and, perhaps, `label`."""

import csv
import os
import time
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.sources.base import first_alike
from nestling.ssl.data.sources.cache import Remembered
from nestling.ssl.data.sources.files import FileSource
from nestling.ssl.data.sources.index import is_settled, keep, kept, key_of, mark_used, stamp
from nestling.ssl.data.sources.packed import Packer
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

if TYPE_CHECKING:
    import pyarrow

PATH, LABEL = "path", "label"
BOM = b"\xef\xbb\xbf"  # that some editors put before UTF-8
BATCH = 65_536  # rows of a parquet file that are Python objects at once


class ImageList(FileSource):
    """The files that a list names, in its order; rows may repeat.

    `.txt`: one path a line, of any bytes. `.csv`: a header with the column `path` and perhaps `label`.
    `.parquet`: the same columns. Paths are absolute or begin at the list's folder; whether the files
    are there shows when they are read. Labels of any kind are names, without the blanks around them that
    tables have after commas (a path keeps its own); the classes are in the order of their bytes. What is
    read is kept in the cache until the list changes.

    Raises:
        UserError: the list can't be read or is empty, a column is missing or there twice, a row has no
            path or no label, or pyarrow is missing.
    """

    def __init__(
        self, path: str, decoder: Decoder = Decoder(), key: str = "data.train", cache: str | None = None
    ) -> None:
        shown = f"{key}={printable(path)}"
        place = os.path.abspath(path)
        try:
            index = _index(place, shown, cache)
        except OSError as error:
            raise UserError(f"{shown} can't be read: {error.strerror or error}") from error
        super().__init__(str(path), os.path.dirname(place), decoder, index)

    def repeats(self) -> np.ndarray | None:
        """For each row the first one that names the same file."""
        return first_alike(self.identities())


def _index(path: str, shown: str, cache: str | None) -> Remembered:
    """From the cache where the list is unchanged, else read anew."""
    name, began, status = key_of(path, "list"), time.time_ns(), os.stat(path)
    stamps = np.array([stamp(status)], dtype=np.uint64)
    for index in kept(cache, name):
        same = np.array_equal(index.arrays["stamps"], stamps) and index.facts["bytes"] == status.st_size
        if same and index.facts["settled"]:
            mark_used(index)
            return index
    listed = _Listed(shown)
    ending = os.path.splitext(path)[1].lower()
    {".csv": _read_csv, ".parquet": _read_parquet}.get(ending, _read_text)(path, listed)
    arrays, facts = listed.packed()
    facts |= {"bytes": status.st_size, "settled": is_settled(stamps, began)}
    return keep(Remembered(arrays | {"stamps": stamps}, facts), cache, name)


class _Listed:
    """What a list says, gathered row by row in little memory."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.num_blank = 0
        self._packer = Packer()
        self._labels = array("q")  # numbers by first appearance
        self._numbers: dict[str, int] = {}

    def add(self, path: str | bytes | None, place: str) -> None:
        """Append a path; `place` is its line or row, for messages."""
        if not path:
            raise self.refused(f"{place} has no path")
        try:
            self._packer.add(os.fsencode(path))
        except ValueError as error:
            raise self.refused(f"{place}: {error}; save the list as UTF-8") from error

    def label(self, value: Any, place: str) -> None:
        """The label of the path just added: text, bytes or a number."""
        name = (os.fsdecode(value) if isinstance(value, bytes) else str(value)).strip()
        if value is None or value != value or not name:  # a number unequal to itself is NaN
            raise self.refused(f"{place} has no label; give every row one, or drop the column {LABEL}")
        self._labels.append(self._numbers.setdefault(name, len(self._numbers)))

    def packed(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Arrays and facts of a `FileSource`."""
        blank = f"{self.num_blank} blank line{'s' * (self.num_blank != 1)}" if self.num_blank else ""
        if not len(self._packer):
            raise self.refused(f"no image is named, saw {blank or 'nothing'}; give one path a line")
        arrays, names = self._packer.arrays(), sorted(self._numbers, key=os.fsencode)
        if names:
            rank = np.empty(len(names), dtype=np.int64)
            rank[[self._numbers[name] for name in names]] = np.arange(len(names))
            arrays["labels"] = rank[np.frombuffer(self._labels, dtype=np.int64)]
        return arrays, {"class_names": names or None, "passed_over": blank}

    def columns(self, found: list[str]) -> tuple[int, int | None]:
        """The places of path and label in a table."""
        for name in (PATH, LABEL):
            if found.count(name) > 1:
                raise self.refused(f"{found.count(name)} columns are named {name}; keep one of them")
        self._refuse_near(found, PATH)
        if PATH not in found:
            names = ", ".join(printable(name) for name in found) or "none"
            raise self.refused(f"a table needs the column {PATH}, found {names}")
        self._refuse_near(found, LABEL)
        return found.index(PATH), found.index(LABEL) if LABEL in found else None

    def _refuse_near(self, found: list[str], wanted: str) -> None:
        """Refuse a header that means a column but doesn't name it: without its labels, a list is another."""
        if wanted in found:
            return
        for name in found:
            if name.strip().lower() == wanted:
                raise self.refused(f"found the column {printable(name)}; did you mean {wanted}?")
            for separator, said in ((";", "semicolons"), ("\t", "tabs")):
                if separator in name and wanted in name.lower().split(separator):
                    raise self.refused(f"its columns are separated by {said}; save it with commas")

    def refused(self, why: str) -> UserError:
        return UserError(f"{self.shown}: {why}")


def _read_text(path: str, listed: _Listed) -> None:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and b"\r" in line.strip() and not line.endswith(b"\n"):
                raise listed.refused(
                    "its lines end by CR alone; save it with the line ends of Linux or Windows"
                )
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            line = line.removeprefix(BOM) if number == 1 else line
            if line.strip():
                listed.add(line, f"line {number}")
            else:
                listed.num_blank += 1


def _read_csv(path: str, listed: _Listed) -> None:
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file)
        try:
            place, label = listed.columns([name.strip() for name in next(reader, [])])
            for row in reader:
                at = f"line {reader.line_num}"
                if not row:
                    listed.num_blank += 1
                    continue
                listed.add(row[place] if place < len(row) else None, at)
                if label is not None:
                    listed.label(row[label] if label < len(row) else None, at)
        except csv.Error as error:
            raise listed.refused(f"line {reader.line_num} is no row of a table: {error}") from error


def _read_parquet(path: str, listed: _Listed) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise listed.refused("reading it needs pyarrow: pip install nestling[parquet]") from error
    try:
        with open(path, "rb") as file, parquet.ParquetFile(file) as table:
            schema = table.schema_arrow
            place, label = listed.columns(schema.names)
            _check_kinds(schema.field(place), None if label is None else schema.field(label), listed)
            wanted = [PATH] if label is None else [PATH, LABEL]
            row = 0
            for batch in table.iter_batches(BATCH, columns=wanted, use_threads=False):
                paths = _values(batch.column(PATH))
                labels = [] if label is None else _values(batch.column(LABEL))
                for offset, name in enumerate(paths):
                    row += 1
                    listed.add(name, f"row {row}")
                    if labels:
                        listed.label(labels[offset], f"row {row}")
    except UnicodeDecodeError as error:
        raise listed.refused("it holds text that is no UTF-8; store such names as binary") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise listed.refused(f"it is no sound parquet file: {' '.join(str(error).split())}") from error


def _values(column: "pyarrow.Array") -> list[Any]:
    """Python objects; bytes of a fixed size without the zeros that fill them up."""
    from pyarrow import types

    values: list[Any] = column.to_pylist()
    if types.is_fixed_size_binary(_kind(column.type)):
        return [None if value is None else value.rstrip(b"\0") for value in values]
    return values


def _check_kinds(path: "pyarrow.Field", label: "pyarrow.Field | None", listed: _Listed) -> None:
    """Paths are text or bytes; labels may also be whole or other numbers."""
    if not _is_text(path):
        raise listed.refused(f"the column {PATH} holds {path.type}; it must hold text or bytes")
    if label is not None and not _is_text(label) and not _is_number(label):
        raise listed.refused(f"the column {LABEL} holds {label.type}; it must hold text or numbers")


def _is_text(field: "pyarrow.Field") -> bool:
    from pyarrow import types

    kind = _kind(field.type)
    tests = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    known = (getattr(types, f"is_{test}", None) for test in tests)  # views are new in pyarrow 16
    return types.is_fixed_size_binary(kind) or any(test(kind) for test in known if test is not None)


def _is_number(field: "pyarrow.Field") -> bool:
    from pyarrow import types

    kind = _kind(field.type)
    return types.is_integer(kind) or types.is_boolean(kind) or types.is_floating(kind)


def _kind(column: "pyarrow.DataType") -> "pyarrow.DataType":
    """Of the values, where a column keeps each once."""
    from pyarrow import types

    return column.value_type if types.is_dictionary(column) else column
