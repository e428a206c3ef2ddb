"""Write a trace to a file, in the format its suffix names."""

from __future__ import annotations

import errno
import gzip
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from asyncflow.errors import AsyncflowError
from asyncflow.profiler.chrome import render_chrome
from asyncflow.profiler.html import render_html
from asyncflow.runtime.trace import Trace


class TraceFormatError(AsyncflowError, ValueError):
    """A trace file whose suffix names no known format."""


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write ``trace`` to ``path``: the suffix chooses a Chrome/Perfetto trace or an HTML timeline.

    The file appears whole or not at all: a temporary file beside it is moved into place once everything is written,
    and an older file of that name survives any failure. Blocks for about 1 s per 100,000 firings; from a running event
    loop call it through `asyncio.to_thread`.

    Args:
        trace: what the runs recorded.
        path: ends in ``.json`` or ``.json.gz`` (Perfetto, chrome://tracing), or ``.html`` (any browser, offline).

    Raises:
        TraceFormatError: any other suffix; nothing is written.
        OSError: the file cannot be written: no such directory, no permission, disk full.
    """
    target = Path(path)
    render, compressed = _format_of(target)
    with _replacing(target) as raw:
        if compressed:
            # No name and no time in the header: equal traces make equal files.
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as packed:
                for text in render(trace):
                    packed.write(text.encode())
        else:
            for text in render(trace):
                raw.write(text.encode())


def check_destination(path: str | os.PathLike[str]) -> None:
    """Raise now what `save` would raise later about this path: before a long run, not after it.

    Raises:
        TraceFormatError: the suffix names no known format.
        FileNotFoundError: no such directory.
    """
    target = Path(path)
    _format_of(target)
    _check_directory(target)


def _check_directory(path: Path) -> None:
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "cannot save the trace: its directory does not exist", str(path))


def _format_of(path: Path) -> tuple[Callable[[Trace], Iterator[str]], bool]:
    """How to render the file, and whether to compress it."""
    name = path.name.lower()
    if name.endswith(".json"):
        return render_chrome, False
    if name.endswith(".json.gz"):
        return render_chrome, True
    if name.endswith(".html"):
        return render_html, False
    ending = repr(path.suffix) if path.suffix else "no suffix"
    raise TraceFormatError(
        f"a trace is saved as .json, .json.gz or .html, and {os.fspath(path)!r} ends in {ending}: "
        "name it .json or .json.gz to open it in Perfetto, .html to open it in a browser"
    )


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
