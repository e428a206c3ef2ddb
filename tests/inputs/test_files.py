"""Files as inputs: lines, arrays and records, and damaged files."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


async def everything(given: af.Input, found: list[Any] | None = None) -> list[Any]:
    """All elements, taken by a session of their own, and put in `found`."""
    with af.Graph() as graph:
        element = given.next()
    found = [] if found is None else found
    async with af.Session(graph) as session:
        try:
            while True:
                found.append(await session.run(element))
        except af.EndOfInput:
            return found


async def test_lines_of_several_files(tmp_path: Path) -> None:
    one, two, empty = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    one.write_bytes("a\r\n\nö\n".encode())
    two.write_text("no end")
    empty.write_text("")
    assert await everything(af.read_lines([one, empty, str(two)])) == ["a", "", "ö", "no end"]
    assert await everything(af.read_lines(empty)) == []


async def test_lines_that_cannot_be_read(tmp_path: Path) -> None:
    latin = tmp_path / "latin"
    latin.write_bytes(b"fine\n" * 3000 + b"u\xff\n")
    found: list[Any] = []
    with pytest.raises(af.KernelError, match=r"latin: line 3001 is no utf-8 text: byte 0xff behind 1 char.*encoding="):
        await everything(af.read_lines(latin), found)
    assert found == ["fine"] * 3000
    with pytest.raises(af.KernelError, match=r"latin: no utf-16 text comes after line 0: .*"):
        await everything(af.read_lines(latin, encoding="utf-16"))
    assert (await everything(af.read_lines(latin, encoding="latin-1").batch(3001)))[0][-1] == "uÿ"
    with pytest.raises(af.KernelError, match=r"No such file.*\n *node *lines/next \(input_next\)"):
        await everything(af.read_lines(tmp_path / "none"))


async def test_arrays_of_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(6).reshape(3, 2))
    np.save(tmp_path / "b.npy", np.asfortranarray(np.arange(4).reshape(2, 2)))
    found = await everything(af.read_arrays([tmp_path / "a.npy", tmp_path / "b.npy"], af.spec("int64", (2,))))
    assert [each.tolist() for each in found] == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    np.savez(tmp_path / "c.npz", x=np.ones((2, 3)), y=np.array([1, 2]), z=np.ones(1))
    spec = {"y": af.spec("int64", ()), "x": af.spec("float64", (None,))}
    rows = await everything(af.read_arrays(tmp_path / "c.npz", spec))
    assert [(row["y"], row["x"].tolist()) for row in rows] == [(1, [1, 1, 1]), (2, [1, 1, 1])]


async def test_safetensors_need_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"two")
    given = af.read_arrays(path, {"x": af.spec("int64", ())})
    monkeypatch.setitem(sys.modules, "safetensors", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(af.KernelError, match="install the package safetensors"):
        await everything(given)

    def load(data: bytes) -> dict[str, Any]:
        assert data == b"two"
        return {"x": np.arange(2)}

    monkeypatch.setitem(sys.modules, "safetensors.numpy", SimpleNamespace(load=load))
    assert await everything(given) == [{"x": 0}, {"x": 1}]


def write(path: Path, *records: bytes) -> Path:
    path.write_bytes(b"".join(len(record).to_bytes(8, "little") + record for record in records))
    return path


async def test_records_of_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / "1", b"abc", b""), write(tmp_path / "2", b"d")]
    assert [bytes(each) for each in await everything(af.read_records(paths))] == [b"abc", b"", b"d"]
    pairs = write(tmp_path / "3", np.arange(4, dtype="<f4").tobytes(), np.arange(2, dtype="<f4").tobytes())
    found = await everything(af.read_records(pairs, af.spec("float32", (None, 2))))
    assert [each.tolist() for each in found] == [[[0, 1], [2, 3]], [[0, 1]]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: af.read_records(cut(write(p / "r", b"abc", b"defg"), 2)), "r ends inside of a record, at byte 11"),
        (lambda p: af.read_records(cut(write(p / "r", b"abc"), 6)), "ends inside of a record, at byte 0"),
        (
            lambda p: af.read_records(write(p / "r", b"abc"), af.spec("int16", (None,))),
            r"3 bytes at byte 8 are no int16",
        ),
        (
            lambda p: af.read_records(write(p / "r", b"abc"), af.spec("int8", (2,))),
            r"3 bytes at byte 8 are no int8\[2\]",
        ),
        (
            lambda p: af.read_arrays(saved(p, np.ones(3)), af.spec("int64", ())),
            r"a.npy is declared as int64\[\].*float64",
        ),
        (lambda p: af.read_arrays(saved(p, np.ones((3, 2))), af.spec("float64", (3,))), r"came as float64\[2\]"),
        (lambda p: af.read_arrays(saved(p, np.float64(1)), af.spec("float64", ())), "a first axis each"),
        (lambda p: af.read_arrays(saved(p, np.array([{}])), af.spec("float64", ())), "allow_pickle=False"),
        (lambda p: af.read_arrays(named(p), {"z": af.spec("int64", ())}), "has no array z; it has x, y"),
        (lambda p: af.read_arrays(named(p), {k: af.spec("float64", ()) for k in "xy"}), "a first axis each"),
        (lambda p: af.read_arrays(cut(saved(p, np.ones(9)), 30), af.spec("float64", ())), "a.npy cannot be read"),
    ],
)
async def test_damaged_files_name_the_fault(tmp_path: Path, damage: Any, message: str) -> None:
    with pytest.raises(af.KernelError, match=message):
        await everything(damage(tmp_path))


def cut(path: Path, count: int) -> Path:
    path.write_bytes(path.read_bytes()[:-count])
    return path


def saved(folder: Path, array: Any) -> Path:
    np.save(folder / "a.npy", array)
    return folder / "a.npy"


def named(folder: Path) -> Path:
    np.savez(folder / "b.npz", x=np.ones(2), y=np.ones(3))
    return folder / "b.npz"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: af.read_lines([]), "paths is empty"),
        (lambda: af.read_lines("x", prefetch=0), "prefetch=0"),
        (lambda: af.read_lines("x", encoding="utf-88"), "encoding='utf-88'.: unknown encoding: utf-88; give one"),
        (lambda: af.read_lines("x", encoding="hex"), "is not a text encoding"),
        (lambda: af.read_lines("x", encoding=8), "encoding=8"),  # type: ignore[arg-type]
        (lambda: af.read_lines("x", name="a:b"), "name='a:b'.*no ':' in it"),
        (lambda: af.read_arrays("x.txt", af.spec("int64", ())), ".npy, .npz, .safetensors; got 'x.txt'"),
        (lambda: af.read_arrays("x.npy", {"x": af.spec("int64", ())}), "the spec of 'x.npy' is a Spec"),
        (lambda: af.read_arrays("x.npz", af.spec("int64", ())), "is a dict by name; got Spec"),
        (lambda: af.read_arrays("x.npy", 3), "described by af.spec.*got 3"),
        (lambda: af.read_records("x", af.spec("int64", (None, None))), "at most one open extent"),
        (lambda: af.read_records("x", af.spec("string", ())), "a record is numbers"),
        (lambda: af.read_lines("x").batch(0), "1 element or more; got size=0"),
        (lambda: af.read_records("x").batch(2, pad=0).batch(2).repeat(0), "once or more; got times=0"),
        (lambda: af.read_lines("x").repeat().repeat(2), "repeated already"),
        (lambda: af.read_lines("x").shuffle(0), "holds 1 element or more"),
        (lambda: af.read_lines("x").shuffle(2, seed=-1), "not negative"),
    ],
)
def test_refuses_what_cannot_be(build: Callable[[], object], message: str) -> None:
    with pytest.raises(af.GraphError, match=message):
        build()
