"""Saving: the suffix chooses, and the file is there whole or not at all."""

from __future__ import annotations

import gzip
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncflow.errors import AsyncflowError
from asyncflow.profiler import TraceFormatError, save
from asyncflow.profiler.chrome import render_chrome
from asyncflow.profiler.html import render_html
from asyncflow.profiler.save import check_destination
from asyncflow.runtime.watch.trace import Firing, Trace


@contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """No file may grow past ``nbytes``: the kernel fails the write, as it does when the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_json_is_the_chrome_trace(trace: Trace, tmp_path: Path) -> None:
    save(trace, tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text(encoding="utf-8") == "".join(render_chrome(trace))


def test_gz_is_the_same_compressed_and_reproducible(trace: Trace, tmp_path: Path) -> None:
    save(trace, str(tmp_path / "a.json.gz"))
    save(trace, str(tmp_path / "b.JSON.GZ"))
    packed = (tmp_path / "a.json.gz").read_bytes()
    assert gzip.decompress(packed).decode() == "".join(render_chrome(trace))
    assert packed == (tmp_path / "b.JSON.GZ").read_bytes()


def test_html_is_the_timeline(trace: Trace, tmp_path: Path) -> None:
    save(trace, tmp_path / "trace.html")
    assert (tmp_path / "trace.html").read_text(encoding="utf-8") == "".join(render_html(trace))


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG\r\n"), ("b.PNG", b"\x89PNG\r\n"), ("c.svg", b"<?xml")])
def test_a_picture_is_in_the_format_its_suffix_names(trace: Trace, tmp_path: Path, name: str, magic: bytes) -> None:
    save(trace, tmp_path / name, color_by="op")
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["trace.png", "trace.svg"])
def test_without_matplotlib_a_picture_is_refused_before_a_long_run(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for refuse in (lambda: check_destination(tmp_path / name), lambda: save(trace, tmp_path / name)):
        with pytest.raises(TraceFormatError, match=r"asyncflow-runtime\[plot\]"):
            refuse()
    assert not list(tmp_path.iterdir())
    save(trace, tmp_path / "trace.html")


def test_an_unknown_colouring_is_refused_and_leaves_no_file(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'auto', 'op', 'node' or 'iteration'; got 'colour'"):
        save(trace, tmp_path / "trace.svg", color_by="colour")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["trace.txt", "trace", "trace.gz", ".json.bak"])
def test_another_suffix_is_refused_before_anything_is_written(trace: Trace, tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceFormatError, match=r"\.json, \.json\.gz, \.html, \.png or \.svg.*" + name) as caught:
        save(trace, tmp_path / name)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AsyncflowError)
    assert not list(tmp_path.iterdir())


def test_a_failed_replace_leaves_the_old_file(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "trace.json"
    target.write_text("old")

    def refuse(source: object, destination: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError, match="no"):
        save(trace, target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "trace.html"])
def test_a_full_disk_leaves_no_half_file(tmp_path: Path, name: str) -> None:
    one = Firing(0, "node", "op", "", "cpu:0", "inline", 0, 1, 2, "", "ok", "")
    trace = Trace(firings=[one._replace(started_ns=k * k, ended_ns=k * k + 1) for k in range(3_000)])
    target = tmp_path / name
    target.write_text("old")
    with full_disk(4_096), pytest.raises(OSError, match="File too large"):
        save(trace, target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_an_existing_file_is_replaced(trace: Trace, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    target.write_text("old" * 10_000)
    save(trace, target)
    assert json.loads(target.read_text())["otherData"]["dropped"] == 3
    assert list(tmp_path.iterdir()) == [target]


def test_a_symbolic_link_stays_one(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    save(trace, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").stat().st_size > 0


def test_the_file_is_as_readable_as_any_other(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    save(trace, tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_missing_directory_is_named(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"its directory does not exist.*nowhere"):
        save(trace, tmp_path / "nowhere" / "trace.json")
