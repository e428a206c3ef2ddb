"""Files of arrays in the safetensors format: a header of JSON, then the bytes of all arrays, one behind another.

The format is written and read here, and not by its library. That library holds the GIL while it reads or writes: a file
of 128 MB stops the event loop for up to 177 ms. It maps files into memory, so a file truncated meanwhile kills the
process. Its version 0.8 writes non-contiguous arrays wrong. It reads the files written here.

A header is known before the file is read: what the manifest says of the arrays makes it, to the byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from asyncflow.errors import CheckpointError
from asyncflow.graph.values.dtypes import as_dtype, string
from asyncflow.graph.values.spec import Spec
from asyncflow.values import Array

_CODES = {
    **{f"{kind}{bits}": f"{code}{bits}" for kind, code in (("int", "I"), ("uint", "U")) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bool": "BOOL",
    "bfloat16": "BF16",
    "complex64": "C64",
}
"""The format's names of dtypes; complex128 and strings have none."""
_LENGTH_BYTES = 8
_ALIGNMENT: Final = 64
"""Alignment in bytes of a file's first array.

Arrays aligned in the file as in memory are copied a tenth faster.
"""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """An array of a checkpoint, as the manifest describes it.

    Attributes:
        name: in its file.
        dtype: the name of its dtype.
        shape: its extents.
        nbytes: how many bytes of the file it takes.
        crc32: the checksum of those (`asyncflow.checkpoint.checksum`).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    crc32: int

    @property
    def spec(self) -> Spec:
        """Dtype and shape of the array.

        Raises:
            DTypeError: there is no such dtype, or not without another package.
        """
        return Spec(as_dtype(self.dtype), self.shape)

    def stored(self) -> tuple[str, list[int]]:
        """The dtype and shape that the file says it has."""
        if self.dtype == "string":
            return "U8", [self.nbytes]
        if self.dtype == "complex128":
            return "F64", [*self.shape, 2]
        return _CODES[self.dtype], list(self.shape)

    def has_sense(self) -> bool:
        """Return True if such an array can exist."""
        if self.dtype == "string":
            return self.nbytes >= 0
        is_known = self.dtype == "complex128" or self.dtype in _CODES
        return is_known and self.nbytes == math.prod(self.shape) * _itemsize(self)


def laid_out(records: Iterable[TensorRecord]) -> list[TensorRecord]:
    """Return the records in the order of the file: by alignment, as programs that map such files need it."""
    return sorted(records, key=lambda record: (-_itemsize(record), record.name))


def _itemsize(record: TensorRecord) -> int:
    return {"string": 1, "bool": 1, "bfloat16": 2}.get(record.dtype) or np.dtype(record.dtype).itemsize


def header(records: Iterable[TensorRecord]) -> bytes:
    """The head of a file, before the arrays, which follow in the order of `records`, the first one aligned."""
    entries, begin = {}, 0
    for record in records:
        dtype, shape = record.stored()
        entries[record.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + record.nbytes]}
        begin += record.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def as_bytes(array: Array) -> Array:
    """The bytes of an array or scalar as files have them: in C order, copied only if they are not; strings as JSON."""
    if array.dtype == string:
        text = json.dumps(np.asarray(array).ravel().tolist(), ensure_ascii=False)
        return np.frombuffer(text.encode(), np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def from_strings(raw: Array, record: TensorRecord) -> Array:
    """Return the array of strings with these bytes.

    Raises:
        CheckpointError: the bytes hold no such array.
    """
    items = json.loads(bytes(raw).decode())
    if not isinstance(items, list) or len(items) != math.prod(record.shape):
        raise CheckpointError(f"tensor {record.name!r} has other strings than its shape {list(record.shape)} says")
    return np.array(items, string).reshape(record.shape)
