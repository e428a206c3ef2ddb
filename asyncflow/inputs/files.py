"""Inputs that read files: lines of text, arrays, and records of bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from asyncflow.errors import GraphError
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import string
from asyncflow.graph.values.shapes import is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.inputs.input import Input, new_input
from asyncflow.inputs.stages import Element, Stacked, as_value
from asyncflow.values import Array, Nest

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"

LENGTH_BYTES = 8
"""Of the little-endian unsigned integer in front of each record."""


BYTES = Spec(np.dtype("uint8"), (None,))


def _files(paths: Paths) -> list[Path]:
    is_one = isinstance(paths, str | os.PathLike)
    files: list[object] = [paths] if is_one or not isinstance(paths, Iterable) else list(paths)
    if not files:
        raise GraphError("there is no file to read: paths is empty")
    found = [Path(each) for each in files if isinstance(each, str | os.PathLike)]
    if len(found) < len(files):
        raise GraphError(f"paths is the path of a file, or several; got {paths!r}")
    return found


def read_lines(paths: Paths, *, encoding: str = "utf-8", prefetch: int = 4, name: str = "lines") -> Input:
    """Reads text files line by line, one file after the other: strings, without what ends the line.

    Args:
        paths: a file, or several.
        encoding: of the text; a line that is not in it fails the run that would take it.
        prefetch: how many elements are read before they are asked for, 1 or more.
        name: for messages and nodes.

    Raises:
        GraphError: there is no such encoding, or no path.
    """
    files = _files(paths)
    try:
        "".encode(encoding)
    except (LookupError, TypeError, ValueError) as error:
        raise GraphError(f"read_lines(encoding={encoding!r}): {error}; give one of Python's, such as 'utf-8'") from None

    def lines() -> Generator[Element]:
        for path in files:
            # Python decodes many lines at once. With `surrogateescape`, a malformed line does not cost the lines before
            # it.
            with path.open(encoding=encoding, errors="surrogateescape") as file:
                number = 0
                try:
                    for line in file:
                        number += 1
                        if not line.isascii():
                            line.encode()  # raises for surrogates, which valid text never has
                        yield (line.removesuffix("\n"),)
                except UnicodeError as error:
                    raise _not_text(path, number, encoding, error) from None

    return new_input(lines, Spec(string, ()), prefetch=prefetch, name=name)


def _not_text(path: Path, number: int, encoding: str, error: UnicodeError) -> ValueError:
    if isinstance(error, UnicodeEncodeError):
        column, byte = error.start, ord(error.object[error.start]) & 0xFF
        what = f"line {number} is no {encoding} text: byte 0x{byte:02x} behind {column} characters"
    else:
        what = f"no {encoding} text comes after line {number}: {error}"
    return ValueError(f"{path}: {what}; give the encoding= that it is in")


def read_arrays(paths: Paths, spec: Nest, *, prefetch: int = 4, name: str = "arrays") -> Input:
    """Reads files of arrays; each item along the first axis is an element.

    A file is in memory as a whole while its items are read. ``.npy`` has one array; ``.npz`` and ``.safetensors``
    (which needs the package of that name) have several by name, of one length. Files are plain data: objects in them
    are refused.

    Args:
        paths: a file, or several; the suffix says of which kind.
        spec: of an element: a `Spec` for ``.npy``, a dict of them by name for the others, which may have more arrays.
        prefetch: how many elements are read before they are asked for, 1 or more.
        name: for messages and nodes.
    """
    files = _files(paths)
    for path in files:
        if path.suffix not in _LOADERS:
            raise GraphError(f"arrays are read from {', '.join(_LOADERS)}; got {str(path)!r}")
        if (path.suffix == ".npy") is isinstance(spec, dict):
            expected = "a Spec" if path.suffix == ".npy" else "a dict by name"
            raise GraphError(f"the spec of {str(path)!r} is {expected}; got {spec!r}")
    leaves, structure = nest.flatten(spec)
    names = [""] if structure.kind is None else list(map(str, structure.keys))

    def source() -> Generator[Element | Stacked]:
        for path in files:
            loaded = _load(path)
            missing = [each for each in names if each not in loaded]
            if missing:
                raise ValueError(f"{path} has no array {', '.join(missing)}; it has {', '.join(loaded)}")
            arrays = [loaded[each] for each in names]
            lengths = {array.shape[:1] for array in arrays}
            if len(lengths) != 1 or () in lengths:
                shapes = [array.shape for array in arrays]
                raise ValueError(f"arrays of {path} have a first axis each, of one length; got shapes {shapes}")
            labels = [f"array {each!r} of {path}" if each else f"the array of {path}" for each in names]
            rows = Stacked(tuple(map(np.ascontiguousarray, arrays)))
            for row in rows[:1]:  # all others have the same dtypes and shapes
                for value, leaf, label in zip(row, leaves, labels, strict=True):
                    as_value(value, leaf, label)
            if all(is_static(x.shape) and x.dtype == array.dtype for x, array in zip(leaves, arrays, strict=True)):
                yield rows
            else:
                yield from rows

    return new_input(source, spec, prefetch=prefetch, name=name)


def _load(path: Path) -> dict[str, Array]:
    try:
        return _LOADERS[path.suffix](path)
    except (OSError, ImportError):
        raise
    except Exception as error:  # libraries raise their own errors for damaged files
        raise ValueError(f"{path} cannot be read: {error}") from error


def _load_npz(path: Path) -> dict[str, Array]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def _load_safetensors(path: Path) -> dict[str, Array]:
    try:
        from safetensors.numpy import load
    except ImportError as error:
        raise ImportError(f"{path}: install the package safetensors to read such files") from error
    loaded: dict[str, Array] = load(path.read_bytes())
    return loaded


_LOADERS: dict[str, Callable[[Path], dict[str, Array]]] = {
    ".npy": lambda path: {"": np.load(path, allow_pickle=False)},
    ".npz": _load_npz,
    ".safetensors": _load_safetensors,
}


def read_records(paths: Paths, spec: Spec = BYTES, *, prefetch: int = 4, name: str = "records") -> Input:
    """Read files of records: each record is its length, 8 bytes little-endian, followed by that number of bytes.

    Args:
        paths: a file, or several.
        spec: of a record: a number dtype, and a shape with at most one open extent. Numbers are little-endian.
        prefetch: how many elements are read before they are asked for, 1 or more.
        name: for messages and nodes.

    Raises:
        GraphError: a record cannot be like that.
    """
    files = _files(paths)
    shape = spec.shape
    if spec.dtype.kind not in "biufc" or shape is None or shape.count(None) > 1:
        raise GraphError(f"a record is numbers, with at most one open extent; got {spec}")
    extents = [-1 if extent is None else extent for extent in shape]

    def records() -> Generator[Element]:
        for path in files:
            with path.open("rb") as file:
                end = os.fstat(file.fileno()).st_size
                while head := file.read(LENGTH_BYTES):
                    at = file.tell()
                    length = int.from_bytes(head, "little")
                    if len(head) < LENGTH_BYTES or length > end - at:
                        raise ValueError(f"{path} ends inside of a record, at byte {at - len(head)}")
                    data = np.frombuffer(file.read(length), np.uint8)
                    try:
                        record = data.view(spec.dtype.newbyteorder("<")).reshape(extents)
                    except ValueError as error:
                        raise ValueError(f"{path}: {length} bytes at byte {at} are no {spec}") from error
                    yield (as_value(record.astype(spec.dtype, copy=False), spec, f"a record of {path}"),)

    return new_input(records, spec, prefetch=prefetch, name=name)
