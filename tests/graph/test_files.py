"""Graphs in files: they come back whole and run, and nothing in a file does harm."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.graph.files import FORMAT
from tests.conftest import OpenSession
from tests.semantics.programs import stateful_program

HEAD = f"{FORMAT}\ngraph effects=ordered seed=none\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.graph"


def loaded(path: Path, text: str | bytes) -> af.Graph:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return af.load_graph(path)


# -- there and back ---------------------------------------------------------------------------------------------------


async def test_a_training_step_comes_back_and_gives_the_same_bits(open_session: OpenSession, path: Path) -> None:
    with af.Graph(seed=3) as graph:
        x = af.placeholder("float32", (None, 3), name="x")
        w = af.Variable(np.arange(6, dtype=np.float32).reshape(3, 2), name="w")
        steps = af.Variable(af.spec("int64", ()), name="steps")
        noise = af.random.normal((3, 2)) * 0.1
        _, total = af.while_loop(lambda i, _: i < 3, lambda i, s: (i + 1, s + af.sum((x @ w) ** 2)), (0, np.float32(0)))
        (gradient,) = af.gradients(total, [w])
        step = w.update(lambda old, by, noise: old - 0.01 * (by + af.astype(noise, "float32")), gradient, noise)
        af.cond(total > 1, lambda: steps.assign(3), lambda: steps.assign(4))
    af.save_graph(graph, path)
    again = af.load_graph(path)
    assert af.print_graph(again) == af.print_graph(graph)
    assert [variable.name for variable in again.resources] == ["w", "steps"] and again.resources[0] is not w
    found = []
    for each in (graph, again):
        async with open_session(each, seed=7) as session:
            names = [total.name, step.name, "cond"]
            found.append(await session.run(names[:2], {"x": np.ones((2, 3), np.float32)}))
            found[-1] += await session.run(list(each.resources)[:1])
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("effects", ["ordered", "unordered"])
def test_random_programs_may_do_the_same_when_they_come_back(path: Path, effects: str) -> None:
    for seed in range(5):
        graph, fetches, _ = stateful_program(Random(seed), "ordered" if effects == "ordered" else "unordered")
        af.save_graph(graph, path)
        again = af.load_graph(path)
        both = [
            {
                (tuple(map(int, o.fetches)), tuple((v.name, int(x)) for v, x in o.variables.items()))
                for o in af.explore(each, [fetch.name for fetch in fetches], max_states=300).outcomes
            }
            for each in (graph, again)
        ]
        assert both[0] == both[1] and both[0]


def test_variables_come_back_as_they_were_declared(path: Path) -> None:
    with af.Graph() as graph:
        declared = [
            af.Variable(np.zeros((2, 0)), name="empty"),
            af.Variable("text", name="text", container="shared"),
            af.Variable([1.5], name='odd "name"', shape=(None,), dtype="bfloat16"),
            af.Variable(af.spec("complex64", None), name="unset"),
        ]
        for variable in declared:
            variable.read()
    af.save_graph(graph, path)
    again = af.load_graph(path).resources
    assert [repr(variable) for variable in again] == [repr(variable) for variable in declared]
    for old, new in zip(declared, again, strict=True):
        assert isinstance(new, af.Variable) and new.spec == old.spec and new.container == old.container
        assert (new.initial is None) == (old.initial is None)
        assert old.initial is None or np.array_equal(np.asarray(new.initial), old.initial)


def test_resources_and_ops_may_be_given(path: Path) -> None:
    @af.op(outputs=af.spec("int64", ()))
    def twice(x: np.int64) -> np.int64:
        return x * 2

    with af.Graph() as graph:
        v, table = af.Variable(1, name="v"), af.Table(4, af.spec("int64", ()), name="seen")
        table.append(twice(v))
    af.save_graph(graph, path)
    with pytest.raises(af.GraphError, match=r":\d, column 10: no resource is given for @seen \(Table\('seen'\)\)"):
        af.load_graph(path)
    with pytest.raises(af.GraphError, match=r":\d+, column 1: no op is named 'twice'"):
        af.load_graph(path, resources={"seen": table})
    again = af.load_graph(path, resources={"seen": table, "v": v}, ops={"twice": twice})
    assert set(again.resources) == {v, table}
    again = af.load_graph(path, resources={"seen": table}, ops={"twice": twice.op})
    assert again.resources[-1] is table
    with pytest.raises(af.GraphError, match=r"a\.graph has no resource named 'w' to be given; it has 'v', 'seen'"):
        af.load_graph(path, resources={"seen": table, "w": v}, ops={"twice": twice})
    with pytest.raises(af.GraphError, match=r"ops are functions with @af\.op, .* 'twice' is <built-in function len>"):
        af.load_graph(path, resources={"seen": table}, ops={"twice": len})  # type: ignore[dict-item]


def test_what_cannot_be_saved_is_named(path: Path) -> None:
    with pytest.raises(af.GraphError, match=r"save_graph takes an af\.Graph; got str 'graph'"):
        af.save_graph("graph", path)  # type: ignore[arg-type]
    nowhere = path.parent / "nowhere" / "a.graph"
    with pytest.raises(FileNotFoundError) as caught:
        af.save_graph(af.Graph(), nowhere)
    assert caught.value.filename == str(nowhere)
    path.mkdir()
    with pytest.raises(OSError, match=r"'[^']*a\.graph'$"):
        af.save_graph(af.Graph(), path)
    assert list(path.parent.iterdir()) == [path]


def test_a_file_is_there_whole_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with af.Graph() as graph:
        af.constant(1)
    af.save_graph(graph, path)
    before = path.read_text()
    with graph:
        af.constant(2)

    def full(self: Path, *args: object, **kwargs: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            af.save_graph(graph, path)
    assert path.read_text() == before and list(path.parent.iterdir()) == [path]
    with graph:
        af.op(outputs=af.spec("int64", ()))(lambda x, k: x)(af.constant(1), k=object())
    with pytest.raises(af.GraphError, match="has no text form"):
        af.save_graph(graph, path)
    assert path.read_text() == before and list(path.parent.iterdir()) == [path]


# -- files from elsewhere ---------------------------------------------------------------------------------------------


class Trap:
    """Something that a pickle would call."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.abort, ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps(Trap()), r":1: a graph is UTF-8 text; byte 0x80 is invalid"),
        (b"", "is no graph that save_graph wrote: its first line is not '# asyncflow graph, format 1'"),
        (b"graph effects=ordered seed=none\n", "is no graph that save_graph wrote"),
        (b"# asyncflow graph, format 2\n", "has format 2, of a later version; this one reads format 1"),
        (HEAD + "%a = add(" + "(" * 1_000_000, r":3, column 10: expected '\)'"),
        (HEAD + "%a = constant() {value=" + "[" * 1_000_000, r":3, .* nested deeper than 128 levels"),
        (HEAD + "%a=no_op():()\n" * 200_000, r"has 200000 nodes, more than max_nodes=100000"),
        (HEAD + "%a#\n=no_op():()\n" * 200_000, r"has 200000 nodes, more than max_nodes=100000"),
        (HEAD + "%a = no_op() : ()\n%a = no_op() : ()", r":4, column 1: two nodes are named 'a'"),
        (HEAD + "%a = exec() : ()", r":3, column 1: no op is named 'exec'"),
        (HEAD + '%a = "os.system"() : ()', r":3, column 1: no op is named 'os.system'"),
        (HEAD + "%a = no_op() {__class__=1} : ()", r":3, column 15: expected an attr's name, found '__class__'"),
        (HEAD + "%a = no_op() {extra=1} : ()", r":3, column 1: no_op does not take"),
        (HEAD + "%a = no_op() {extra=@f} : ()", r":3, column 21: resource @f is not declared at the top"),
        (HEAD + "%a = constant() {value=array(float32[9999999999], 1.0)} : ?", r":3, column 24: the data do not make"),
        (HEAD + '%a = constant() {value=array(float32[9999999999], base64 "AAAA")} : ?', "the data do not make"),
        (HEAD + "%a = placeholder() {spec=float32[nan]} : float32[]", r":3, column 34: expected an extent"),
        (HEAD + "%a = placeholder() {spec=nan} : float32[]", r":3, column 1: placeholder"),
        (HEAD + "resource @v = Trap {a=1}", r":3, column 10: no kind of resource is named 'Trap'; .*Variable"),
        (HEAD + "resource @v = Variable {a=1}", r":3, column 10: this is no Variable: KeyError"),
        (HEAD + 'resource @v = "../../etc/passwd"', r":3, column 10: no resource is given for @v \(../../etc/passwd\)"),
        (
            HEAD + 'resource @v = Variable {container=none, initial=array(int64[], 1), name="v", spec=float32[]}',
            r":3, column 10: a variable of float32\[\] has an initial value of int64",
        ),
        (
            HEAD + 'resource @v = Variable {container=3, initial=none, name="v", spec=float32[]}',
            r":3, column 10: a variable has a container, an initial value, a name and a spec",
        ),
        (
            HEAD + 'resource @v = Variable {container=none, initial=3, name="v", spec=float32[]}',
            r":3, column 10: a variable has a spec, and an array or none as its initial value",
        ),
    ],
)  # fmt: skip
def test_files_that_are_no_graphs_are_refused(path: Path, data: str | bytes, message: str) -> None:
    """Fault F57: with the file and the line, and before it costs anything."""
    with pytest.raises(af.GraphError, match=message) as raised:
        loaded(path, data)
    assert str(raised.value).startswith(str(path))


def test_a_path_that_is_no_file_is_not_waited_for(path: Path) -> None:
    """Fault F57: pipes, folders, devices without an end, and files that are too large."""
    os.mkfifo(path)
    for place in (path, path.parent, Path("/dev/zero")):
        with pytest.raises(af.GraphError, match="is no file with a graph in it"):
            af.load_graph(place)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room, and would take all memory
    with pytest.raises(af.GraphError, match="has more than max_nbytes=33554432 bytes"):
        af.load_graph(path)
    with pytest.raises(FileNotFoundError):
        af.load_graph(path.parent / "none")


def test_nothing_in_a_file_is_imported_or_opened(path: Path) -> None:
    """Fault F57: once the file is open, its content leads nowhere."""
    with af.Graph() as graph:
        af.while_loop(lambda i: i < 3, lambda i: af.Variable(1, name="v").assign_add(1) * 0 + i + 1, (0,))
    af.save_graph(graph, path)
    opened, is_watched = list[object](), True
    doors = ("import", "exec", "compile", "open", "os", "subprocess", "pickle")

    def audit(event: str, args: tuple[object, ...]) -> None:
        if is_watched and event.partition(".")[0] in doors:
            opened.append(args[0])

    sys.addaudithook(audit)
    af.load_graph(path)
    is_watched = False
    assert [each for each in opened if not isinstance(each, int)] == [str(path)], "a number is a file that is open"


def _sample() -> str:
    with af.Graph(seed=1) as graph:
        v = af.Variable([1.0, 2.0], name="v")
        x = af.placeholder("float64", (None,), name="x")
        af.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + v.assign_add(af.sum(x))), (0, np.zeros(2)))
        af.cond(af.sum(x) > 0, lambda: af.reshape(x, (1, -1)), lambda: af.reshape(x, (-1, 1)))
    return f"{FORMAT}\n{af.print_graph(graph, with_resources=True)}"


TOKENS = (b"9" * 12, b"-1", b"nan", b"inf", b"variant", b"string[...]", b"@v", b"%x", b"()", b"?", b"0x" + b"f" * 40)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_files_load_or_are_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Fault F57: bytes changed, cut out, doubled or replaced: a sound graph, or an error with the file's name."""
    damaged = bytearray(_sample().encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(damaged) - 1))
        end = data.draw(st.integers(start, min(len(damaged), start + 60)))
        damaged[start:end] = data.draw(
            st.sampled_from((b"", bytes(damaged[start:end]) * 2, *TOKENS)) | st.binary(min_size=1, max_size=1)
        )
    path = tmp_path_factory.getbasetemp() / "damaged.graph"
    path.write_bytes(damaged)
    refused = ""
    try:
        graph = af.load_graph(path)
    except af.GraphError as error:
        refused = str(error)
    else:
        af.verify(graph)
    assert refused.startswith((str(path), "node ")) or not refused
