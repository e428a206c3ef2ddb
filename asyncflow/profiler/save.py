"""Write a trace to a file, in the format its suffix names."""

from __future__ import annotations

import errno
import gzip
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from asyncflow.errors import AsyncflowError
from asyncflow.foreign_names import install
from asyncflow.profiler.chrome import render_chrome
from asyncflow.profiler.html import render_html
from asyncflow.profiler.picture import ColorBy, can_plot, render_picture
from asyncflow.runtime.watch.trace import Trace

FORMATS = (".json", ".json.gz", ".html", ".png", ".svg")


class TraceFormatError(AsyncflowError, ValueError):
    """A trace file with a suffix of no known format, or of a format whose package is not installed."""


def save(trace: Trace, path: str | os.PathLike[str], *, color_by: ColorBy = "auto") -> None:
    """Write ``trace`` to ``path``: the suffix chooses a Chrome/Perfetto trace, an HTML timeline or a picture.

    The file appears whole or not at all: a temporary file beside it is moved into place once everything is written,
    and an older file of that name survives any failure. Blocks for about 1 s per 100,000 firings; from a running event
    loop call it through `asyncio.to_thread`.

    Args:
        trace: what the runs recorded.
        path: ends in ``.json`` or ``.json.gz`` (Perfetto, chrome://tracing), ``.html`` (any browser, offline), or
            ``.png`` or ``.svg`` (a picture, for which matplotlib has to be installed).
        color_by: what the colours of a picture stand for: ``"op"``, ``"node"``, ``"iteration"``, or ``"auto"`` for the
            iteration if there is a loop and the op otherwise. The other formats leave that to their viewer.

    Raises:
        TraceFormatError: any other suffix, or a picture without matplotlib; nothing is written.
        ValueError: another `color_by`.
        OSError: the file cannot be written: no such directory, no permission, disk full.
    """
    target = Path(path)
    suffix = _format_of(target)
    with _replacing(target) as raw:
        if suffix in (".png", ".svg"):
            raw.write(render_picture(trace, "png" if suffix == ".png" else "svg", color_by=color_by))
        elif suffix == ".json.gz":
            # No name and no time in the header: equal traces make equal files.
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as packed:
                _write_text(render_chrome(trace), packed)
        else:
            _write_text(render_html(trace) if suffix == ".html" else render_chrome(trace), raw)


def check_destination(path: str | os.PathLike[str]) -> None:
    """Raise the errors that `save` would raise for this path: before a long run, not after it.

    Raises:
        TraceFormatError: the suffix names no known format, or a picture without matplotlib.
        FileNotFoundError: no such directory.
    """
    target = Path(path)
    _format_of(target)
    _check_directory(target)


def _check_directory(path: Path) -> None:
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "cannot save the trace: its directory does not exist", str(path))


def _format_of(path: Path) -> str:
    """The suffix that names the format, such as ``.json.gz``."""
    name = path.name.lower()
    suffix = next((suffix for suffix in FORMATS if name.endswith(suffix)), None)
    if suffix is None:
        ending = repr(path.suffix) if path.suffix else "no suffix"
        raise TraceFormatError(
            f"a trace is saved as {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, and {os.fspath(path)!r} ends in "
            f"{ending}: name it .json or .json.gz to open it in Perfetto, .html to open it in a browser, and .png or "
            ".svg for a picture"
        )
    if suffix in (".png", ".svg") and not can_plot():
        raise TraceFormatError(
            f"{os.fspath(path)!r} is a picture, which matplotlib draws, and that is not installed: "
            f"{install('plot')}; a .html timeline needs nothing"
        )
    return suffix


def _write_text(pieces: Iterable[str], file: IO[bytes] | gzip.GzipFile) -> None:
    for text in pieces:
        file.write(text.encode())


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of ``path`` when the block ends, and vanishes when it raises."""
    # Writing through a symbolic link must change the file behind it, not the link.
    target = path.resolve()
    _check_directory(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    # Not `tempfile`: its files are private to the user, and a trace is there to be passed on.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
