"""The files that features are written to, block by block: never is the whole matrix in memory, but faiss's.

Shapes used below: n rows, b rows of a block, D features of a vector.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.extraction.forward import GRID
from nestling.ssl.run.disk import replaced

TENSOR = "features"  # the name in safetensors, and the column in parquet
FACTS = "nestling"  # the metadata's key under which provenance lies as JSON
SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16"}
BLOCK_BYTES = 2**26  # read at once


@dataclass(frozen=True)
class Column:
    """The rows of one pooling on their way into files.

    `blocks` starts anew at every call and gives the images of some rows, as the dataset numbers them, and
    the rows; `path` and `label` say what belongs to an image; `facts` are its provenance.
    """

    pooling: str
    shape: tuple[int, ...]  # (n, …)
    dtype: np.dtype
    blocks: Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
    path: Callable[[int], str]
    label: Callable[[int], str | None]
    facts: dict[str, Any]

    def num_bytes(self, file_format: str) -> int:
        """What a file of it takes, but for a header, and for the paths in parquet."""
        width = 4 if file_format in ("parquet", "faiss") else self.dtype.itemsize
        return width * math.prod(self.shape)


def file_name(pooling: str, file_format: str) -> str:
    """As in last4_cls.npy: a colon is no part of a name everywhere."""
    return f"{pooling.replace(':', '_')}.{file_format}"


def holds(file_format: str, pooling: str) -> bool:
    """Whether a format takes rows of that pooling: those for vectors take no grid."""
    return pooling != GRID or file_format in ("npy", "safetensors")


def refuse_formats(formats: Sequence[str], poolings: Sequence[str]) -> None:
    """Raise UserError where a pooling would be written to no file, or a package for a format is missing."""
    for pooling in poolings:
        if not any(holds(file_format, pooling) for file_format in formats):
            raise UserError(
                f"formats={list(formats)} hold{'s' * (len(formats) == 1)} no pooling={pooling}; "
                "add npy or safetensors"
            )
    if "parquet" in formats and find_spec("pyarrow") is None:
        raise UserError("formats=parquet needs pyarrow: run `pip install 'nestling[parquet]'`")


def write(file_format: str, column: Column, path: Path) -> None:
    """Write a file, whole or not at all.

    Raises:
        UserError: it can't be written.
    """
    with replaced(path) as draft:
        WRITERS[file_format](column, draft)


def _write_npy(column: Column, draft: Path) -> None:
    header = {"descr": column.dtype.str, "fortran_order": False, "shape": column.shape}
    with draft.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for _, rows in column.blocks():
            file.write(rows.data)


def _write_safetensors(column: Column, draft: Path) -> None:
    """The layout that safetensors documents: the header's length, the header, the numbers."""
    tensor = {
        "dtype": SAFETENSORS_NAMES[column.dtype.name],
        "shape": column.shape,
        "data_offsets": [0, column.num_bytes("safetensors")],
    }
    header = json.dumps({"__metadata__": {FACTS: json.dumps(column.facts)}, TENSOR: tensor}).encode()
    header += b" " * (-len(header) % 8)
    with draft.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, rows in column.blocks():
            file.write(rows.data)


def _write_parquet(column: Column, draft: Path) -> None:
    """Columns path, label and features, a row group per block."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.list_(pa.float32(), column.shape[1])
    fields = [("path", pa.string()), ("label", pa.string()), (TENSOR, kind)]
    schema = pa.schema(fields, metadata={FACTS: json.dumps(column.facts)})
    with draft.open("wb") as file, pq.ParquetWriter(file, schema) as writer:
        for images, rows in column.blocks():
            if not len(rows):
                continue
            numbers = pa.array(rows.astype(np.float32, copy=False).reshape(-1))
            labels = [column.label(image) for image in images.tolist()]
            writer.write_table(
                pa.table(
                    {
                        "path": [_as_utf8(column.path(image)) for image in images.tolist()],
                        "label": [None if label is None else _as_utf8(label) for label in labels],
                        TENSOR: pa.FixedSizeListArray.from_arrays(numbers, column.shape[1]),
                    },
                    schema=schema,
                )
            )


def _as_utf8(name: str) -> str:
    """A name as parquet holds it: bytes that are no UTF-8 become \\xff and the like."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _write_faiss(column: Column, draft: Path) -> None:
    """IndexFlatIP over vectors of length one: inner products are cosines, an id is a row."""
    faiss: Any = import_module("faiss")  # late: it brings an OpenMP of its own

    index = faiss.IndexFlatIP(column.shape[1])
    for _, rows in column.blocks():
        index.add(unit(rows))
    with draft.open("wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))


def unit(rows: np.ndarray) -> np.ndarray:
    """A float32 copy with rows of length one; a zero row stays zero.

    Shape:
        (b, D) -> (b, D)
    """
    copy = np.array(rows, np.float32, order="C")
    copy /= np.maximum(np.linalg.norm(copy, axis=1, keepdims=True), np.float32(1e-30))
    return copy


WRITERS: dict[str, Callable[[Column, Path], None]] = {
    "npy": _write_npy,
    "safetensors": _write_safetensors,
    "parquet": _write_parquet,
    "faiss": _write_faiss,
}


def vectors(path: Path, file_format: str) -> Iterator[np.ndarray]:
    """The vectors in a file, block by block, in the order of the rows; those of faiss have length one.

    Shape:
        each (b, D)
    """
    yield from READERS[file_format](path)


def _read_npy(path: Path) -> Iterator[np.ndarray]:
    rows = np.load(path, mmap_mode="r")
    step = _rows_at_once(rows.shape[1])
    for start in range(0, len(rows), step):
        yield np.asarray(rows[start : start + step])


def _read_safetensors(path: Path) -> Iterator[np.ndarray]:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        rows = file.get_slice(TENSOR)
        count, width = rows.get_shape()
        step = _rows_at_once(width)
        for start in range(0, count, step):
            yield rows[start : min(start + step, count)]  # beyond the end is an error


def _read_parquet(path: Path) -> Iterator[np.ndarray]:
    import pyarrow.parquet as pq

    with path.open("rb") as stream, pq.ParquetFile(stream) as file:
        width = file.schema_arrow.field(TENSOR).type.list_size
        for batch in file.iter_batches(_rows_at_once(width), columns=[TENSOR]):
            yield batch.column(0).flatten().to_numpy().reshape(-1, width)


def _read_faiss(path: Path) -> Iterator[np.ndarray]:
    faiss: Any = import_module("faiss")  # late: it brings an OpenMP of its own

    with path.open("rb") as file:
        index = faiss.read_index(faiss.PyCallbackIOReader(file.read))
    step = _rows_at_once(index.d)
    for start in range(0, index.ntotal, step):
        yield index.reconstruct_n(start, min(step, index.ntotal - start))


def _rows_at_once(width: int) -> int:
    return max(1, BLOCK_BYTES // (4 * width))


READERS: dict[str, Callable[[Path], Iterator[np.ndarray]]] = {
    "npy": _read_npy,
    "safetensors": _read_safetensors,
    "parquet": _read_parquet,
    "faiss": _read_faiss,
}
