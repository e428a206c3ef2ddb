"""`Session.save` and `Session.restore`: saved and restored states, and refusals that change nothing."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import threading
import weakref
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.checkpoint import checkpoints
from asyncflow.checkpoint.manifest import read_manifest
from asyncflow.checkpoint.writer import write_checkpoint
from tests.conftest import small_cards
from tests.faults.kernels import until
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


class Model:
    """Two variables that one run changes together."""

    def __init__(self, *, first: str = "w", shape: tuple[int, ...] = (3,), dtype: str = "float32") -> None:
        with af.Graph() as self.graph:
            self.w = af.Variable(np.zeros(shape), name=first, dtype=dtype)
            self.n = af.Variable(0, name="n")
            self.step = [self.w.assign_add(af.ones(shape, dtype=dtype)), self.n.assign_add(1)]
            self.noise = af.random.normal((2,))

    async def values(self, session: af.Session) -> tuple[list[float], int]:
        w, n = await session.run([self.w, self.n])
        return w.tolist(), int(n)


@asynccontextmanager
async def saved(root: Path, steps: int = 2) -> AsyncIterator[tuple[Model, af.Session]]:
    """A model after some steps, which were saved, and one step more."""
    model = Model()
    async with af.Session(model.graph) as session:
        for _ in range(steps):
            await session.run(model.step)
        await session.save(root)
        await session.run(model.step)
        yield model, session


async def test_values_and_random_numbers_come_back(tmp_path: Path) -> None:
    model = Model()
    async with af.Session(model.graph) as session:
        await session.run(model.step)
        path = await session.save(tmp_path / "run", step=12)
        assert path == tmp_path / "run" / "step-12"
        noise = [await session.run(model.noise) for _ in range(3)]
        await session.run(model.step)
        restored = await session.restore(tmp_path / "run")
        assert restored == af.Restored(path, 12, ("n", "w"))
        assert await model.values(session) == ([1.0, 1.0, 1.0], 1)
    model = Model()
    async with af.Session(model.graph, restore=path) as session:
        assert [x.tolist() for x in noise] == [(await session.run(model.noise)).tolist() for _ in range(3)]
        assert await model.values(session) == ([1.0, 1.0, 1.0], 1)


async def test_a_variable_that_nothing_has_run_yet_is_saved(tmp_path: Path) -> None:
    model = Model()
    async with af.Session(model.graph) as session:
        await session.save(tmp_path)
        assert read_manifest(tmp_path / "step-0").states.keys() == {"w", "n"}


async def test_a_graph_that_grows_while_a_save_looks_for_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, walk, walks = Model(), af.Graph.walk, 0

    def growing(graph: af.Graph) -> list[af.Node]:
        nonlocal walks
        walks += 1
        nodes = walk(graph)
        if walks == 1:
            with graph:
                af.Variable(1.0, name="late").read()
        return nodes

    async with af.Session(model.graph) as session:
        monkeypatch.setattr(af.Graph, "walk", growing)
        await session.save(tmp_path)
    assert read_manifest(tmp_path / "step-0").states.keys() == {"w", "n", "late"}


async def test_a_variable_without_a_value_stays_without_one(tmp_path: Path) -> None:
    with af.Graph() as graph:
        v = af.Variable(af.spec("float32", (None,)), name="v")
        read, write = v.read(), v.assign(af.ones((2,), dtype="float32"))
    async with af.Session(graph) as session:
        await session.save(tmp_path)
        await session.run(write)
        await session.restore(tmp_path)
        with pytest.raises(af.KernelError, match="'v' is read before it has a value"):
            await session.run(read)
        await session.run(write)
        await session.save(tmp_path)
        await session.restore(tmp_path / "step-1")
        assert (await session.run(read)).tolist() == [1.0, 1.0]


async def test_some_variables_alone(tmp_path: Path) -> None:
    async with saved(tmp_path / "all") as (model, session):
        await session.save(tmp_path / "some", [model.w])
        before = await session.run(model.noise)
        await session.run(model.step)
        await session.restore(tmp_path / "some", [model.w])
        assert await model.values(session) == ([3.0] * 3, 4)
        assert (await session.run(model.noise)).tolist() != before.tolist()  # counters are not some variables'
        with pytest.raises(af.CheckpointError, match="has no tensor 'n', which the session has"):
            await session.restore(tmp_path / "some")
        await session.run(model.step)
        restored = await session.restore(tmp_path / "all", [model.w])
        assert (restored.names, restored.skipped) == (("w",), ())
        assert await model.values(session) == ([2.0] * 3, 5)
        for variables in (model.w, [model.w, "n"], "w"):
            with pytest.raises(TypeError, match="variables is a list of variables"):
                await session.save(tmp_path, variables)  # type: ignore[arg-type]


async def test_values_of_a_save_are_freed_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing keeps the GIL, and by the end of a save a session that trains has replaced every value that it wrote."""
    freed: list[str] = []
    began, replaced = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def written(root: Path, step: int | None, content: Any, *args: Any) -> Path:
        weakref.finalize(content.states["w"][1][""], lambda: freed.append(threading.current_thread().name))
        loop.call_soon_threadsafe(began.set)
        assert replaced.wait(PATIENCE_S)
        return write_checkpoint(root, step, content, *args)

    monkeypatch.setattr(checkpoints, "write_checkpoint", written)
    model = Model()
    async with af.Session(model.graph) as session:
        await session.run(model.step)
        saving = asyncio.create_task(session.save(tmp_path))
        await began.wait()
        await session.run(model.step)
        replaced.set()
        await saving
    assert freed == ["asyncflow:written"]


async def test_variables_of_one_name_are_refused(tmp_path: Path) -> None:
    with af.Graph() as graph:
        for _ in range(2):
            af.Variable(1, name="same").read()
        variables = [node.attrs["variable"] for node in graph.nodes]
    async with af.Session(graph) as session:
        with pytest.raises(af.CheckpointError, match="a variable and a variable of the session are named 'same'"):
            await session.save(tmp_path)
        await session.save(tmp_path, variables[:1])


async def test_variables_in_containers(tmp_path: Path) -> None:
    v = af.Variable(1, name="v", container="checkpoints")
    own = af.Variable(2, name="v")
    try:
        with af.Graph() as graph:
            step = [v.assign_add(10), own.assign_add(10)]
        async with af.Session(graph) as session, af.Session(graph) as other:
            await session.run(step)
            await session.save(tmp_path)
            assert read_manifest(tmp_path / "step-0").states.keys() == {"v", "checkpoints:v"}
            await session.run(step)
            await session.restore(tmp_path)
            assert await session.run([v, own]) == [11, 12]
            assert await other.run([v, own]) == [11, 2]
    finally:
        af.reset_container("checkpoints")


# -- functions, which nobody knows before they run -------------------------------------------------------------------


async def test_variables_of_functions_begin_with_saved_values(tmp_path: Path) -> None:
    def functions() -> list[Any]:
        v, w = af.Variable(0, name="v"), af.Variable(0.0, name="w")
        return [af.function(lambda: v.assign_add(1)), af.function(lambda: w.assign_add(1.0))]

    first, second = functions()
    async with af.Session() as session:
        await first()
        await second()
        await session.save(tmp_path)
    first, second = functions()
    async with af.Session(restore=tmp_path) as session:
        assert await first() == 2
        await session.save(tmp_path)  # with the value of w, which no run has asked for yet
    first, second = functions()
    async with af.Session(restore=tmp_path) as session:
        assert (await first(), await second()) == (3, 2.0)
    other = af.Variable(np.zeros(3), name="w")
    async with af.Session(restore=tmp_path) as session:
        for _ in range(2):
            with pytest.raises(
                af.CheckpointError, match=r"'w' it is float64\[\] there, and the variable is float64\[3\]"
            ):
                await session.run(other)


# -- what is refused -------------------------------------------------------------------------------------------------


async def test_a_variable_that_no_node_reads_yet_is_restored_at_the_start(tmp_path: Path) -> None:
    model = Model()
    unread = af.Variable(np.zeros(2, np.float32), name="unread")
    async with af.Session(model.graph) as session:
        await session.swap_variables({unread: np.array([1, 2], np.float32)})
        await session.save(tmp_path)
    async with af.Session(model.graph, restore=tmp_path) as session:
        await session.save(tmp_path / "again")  # the value is kept although the session does not know the variable
    async with af.Session(model.graph, restore=tmp_path / "again") as session:
        with model.graph:
            value = unread.read()
        assert (await session.run(value)).tolist() == [1, 2]


async def test_another_program(tmp_path: Path) -> None:
    """Fault F55: F55: every difference is named, with its file, and nothing changes."""
    async with saved(tmp_path):
        pass
    file = tmp_path / "step-0" / "variables.safetensors"
    cases = {
        Model(first="v"): [rf"has no tensor 'v'.*\n.*{file}: tensor 'w' is not in the session", "another graph"],
        Model(shape=(4,)): [rf"{file}: tensor 'w': it is float32\[3\] there, and the variable is float32\[4\]"],
        Model(dtype="float64"): [rf"{file}: tensor 'w': it is float32\[3\] there, and the variable is float64\[3\]"],
    }
    for model, messages in cases.items():
        async with af.Session(model.graph) as session:
            await session.run(model.step)
            before = await model.values(session)
            with pytest.raises(af.CheckpointError) as raised:
                await session.restore(tmp_path)
            for message in messages:
                assert re.search(message, str(raised.value)), str(raised.value)
            assert "another graph" not in str(raised.value).splitlines()[0], "what differs in it says more"
            assert await model.values(session) == before
            await session.save(tmp_path / "other")  # it goes on
    with pytest.raises(af.CheckpointError, match="nothing was restored"):
        async with af.Session(Model(shape=(4,)).graph, restore=tmp_path):
            pytest.fail("the session was entered")


async def test_variables_without_names_of_their_own(tmp_path: Path) -> None:
    async with af.Session() as session:
        await session.save(tmp_path, [af.Variable(1)])
        with pytest.raises(af.CheckpointError, match=r"names such as 'variable_2' depend .* give variables names"):
            await session.restore(tmp_path, [af.Variable(1)])


async def test_a_graph_that_computes_something_else(tmp_path: Path) -> None:
    """Fault F55: F55."""
    async with saved(tmp_path):
        pass
    model = Model()
    with model.graph:
        model.w.read() * 2
    async with af.Session(model.graph) as session:
        with pytest.raises(af.CheckpointError, match=r"manifest.json: was saved with another graph \(its digest is "):
            await session.restore(tmp_path)
        assert await model.values(session) == ([0.0] * 3, 0)
        with pytest.warns(UserWarning, match="another graph"):
            restored = await session.restore(tmp_path, strict=False)
        assert len(restored.skipped) == 1
        assert await model.values(session) == ([2.0] * 3, 2)


async def test_a_damaged_byte_changes_nothing(tmp_path: Path) -> None:
    """Fault F55: F55: a byte of one array is enough for none to change; strict=False takes the others, and says so."""
    async with saved(tmp_path) as (model, session):
        file = tmp_path / "step-0" / "variables.safetensors"
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 64
        file.write_bytes(raw)
        with pytest.raises(af.CheckpointError, match=rf"nothing was restored: {file}: tensor 'w' is damaged"):
            await session.restore(tmp_path)
        assert await model.values(session) == ([3.0] * 3, 3)
        with pytest.warns(UserWarning, match=rf"restored from .*step-0, but not all: {file}: tensor 'w' is damaged"):
            restored = await session.restore(tmp_path, strict=False)
        assert restored.names == ("n",)
        assert "tensor 'w' is damaged" in restored.skipped[0]
        assert await model.values(session) == ([3.0] * 3, 2)
        (tmp_path / "step-0" / "manifest.json").write_text("{}")
        with pytest.raises(af.CheckpointError, match=r"manifest\.json: is damaged"):
            await session.restore(tmp_path, strict=False)


@pytest.mark.parametrize(
    "in_task", [asyncio.gather, asyncio.create_task, lambda call: asyncio.wait_for(call, PATIENCE_S)]
)
async def test_a_warning_of_restore_names_the_line_of_the_call_also_in_a_task(tmp_path: Path, in_task: Any) -> None:
    """A task's call stack has no line of the user's."""
    async with saved(tmp_path):
        pass
    async with af.Session(Model().graph) as session:
        (tmp_path / "step-0" / "variables.safetensors").write_bytes(b"")
        call, line = session.restore(tmp_path, strict=False), current_line()
        with pytest.warns(UserWarning, match="but not all") as warned:
            await in_task(call)
    assert [(each.filename, each.lineno) for each in warned] == [(__file__, line)]


def current_line() -> int:
    """The number of the line that calls this."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


async def test_more_faults_than_an_error_lists(tmp_path: Path) -> None:
    with af.Graph() as graph:
        for k in range(9):
            af.Variable(k, name=f"v{k}").read()
    async with af.Session(graph) as session:
        await session.save(tmp_path)
    async with af.Session(Model().graph) as session:
        with pytest.raises(
            af.CheckpointError, match=r"and 7 more\n  restore\(\.\.\., strict=False\) restores the values that fit"
        ):
            await session.restore(tmp_path)


async def test_another_kind_of_state(tmp_path: Path) -> None:
    with af.Graph() as graph:
        af.Table(3, af.spec("int64", ()), name="n").size()
    async with af.Session(graph) as session:
        await session.save(tmp_path)
    with af.Graph() as graph:
        af.Variable(0, name="n").read()
    async with af.Session(graph) as session:
        with pytest.raises(af.CheckpointError, match=r"tables.safetensors: tensor 'n': it is a table there and a vari"):
            await session.restore(tmp_path)


@pytest.mark.parametrize("path", ["", 3, None])
async def test_paths_that_are_none(path: Any) -> None:
    async with af.Session() as session:
        for call in (session.save, session.restore):
            with pytest.raises((TypeError, ValueError), match="the path of a checkpoint is"):
                await call(path)
    if path is not None:
        with pytest.raises((TypeError, ValueError), match="the path of a checkpoint is"):
            af.Session(restore=path)


@pytest.mark.parametrize("step", [-1, True, 1.0, "1"])
async def test_steps_that_are_none(step: Any, tmp_path: Path) -> None:
    async with af.Session() as session:
        with pytest.raises((TypeError, ValueError), match="step is"):
            await session.save(tmp_path, step=step)
    assert os.listdir(tmp_path) == []


async def test_a_session_that_restores_is_entered_first(tmp_path: Path) -> None:
    async with saved(tmp_path) as (model, _):
        session = af.Session(model.graph, restore=tmp_path)
        with pytest.raises(RuntimeError, match="a session with restore= is entered with `async with` first"):
            await session.run(model.n)
        async with session:
            assert await session.run(model.n) == 2
        with pytest.raises(af.SessionClosedError):
            await session.save(tmp_path)


async def test_a_session_without_a_graph_is_told_how_values_get_in(tmp_path: Path) -> None:
    async with saved(tmp_path) as (model, with_graph), af.Session() as session:
        message = r"tensor 'n' is not in the session(.|\n)*has no graph.* af.Session\(graph\), .*\(restore=path\)"
        with pytest.raises(af.CheckpointError, match=message):
            await session.restore(tmp_path)
        for known in (session, with_graph):  # these are what the user asked for
            with pytest.raises(af.CheckpointError, match="has no tensor 'new', which the session has") as caught:
                await known.restore(tmp_path, [model.w, af.Variable(0, name="new")])
            assert "has no graph" not in str(caught.value)
            assert (await known.restore(tmp_path, [model.w])).names == ("w",)


async def test_nothing_to_begin_with(tmp_path: Path) -> None:
    with pytest.raises(af.CheckpointError, match=r"is no checkpoint: there is no such directory"):
        async with af.Session(restore=tmp_path / "nowhere"):
            pytest.fail("the session was entered")


# -- while runs are in flight ----------------------------------------------------------------------------------------


class Gate:
    """An operation that a run waits in."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.opened = asyncio.Event()

        @af.op(outputs=af.spec("float32", ()))
        async def gate(x: np.ndarray) -> np.ndarray:
            self.entered.set()
            await self.opened.wait()
            return x

        self.op = gate


async def test_a_cut_is_before_or_after_a_run_that_writes_several(tmp_path: Path) -> None:
    """Behaviour 79: one half of a run is never saved, and readers and runs of one write hold nothing up."""
    gate = Gate()
    with af.Graph() as graph:
        a, b, c = (af.Variable(np.float32(0), name=name) for name in "abc")
        first = a.assign_add(np.float32(1))
        with af.control_dependencies([first]):
            second = b.assign_add(gate.op(np.float32(1)))
        alone = c.assign_add(gate.op(np.float32(1)))
    async with asyncio.timeout(PATIENCE_S), af.Session(graph) as session:
        single = asyncio.create_task(session.run(alone))
        await gate.entered.wait()
        await session.save(tmp_path)  # at once: a run that writes one variable is never half way
        gate.entered.clear()
        several = asyncio.create_task(session.run([first, second]))
        await gate.entered.wait()
        assert await session.run(a) == 1.0
        saving = asyncio.create_task(session.save(tmp_path))
        for _ in range(20):
            await session.run(c)  # others go on
        assert not saving.done()
        gate.opened.set()
        await asyncio.gather(single, several, saving)
        for step, expected in ((0, [0.0, 0.0]), (1, [1.0, 1.0])):
            await session.restore(tmp_path / f"step-{step}")
            assert await session.run([a, b]) == expected


async def test_a_restore_is_before_or_after_a_run(tmp_path: Path) -> None:
    """Fault F49: F49: a run in flight ends with the values that it began with, and a later one has the new ones."""
    gate = Gate()
    with af.Graph() as graph:
        a, b = (af.Variable(np.float32(0), name=name) for name in "ab")
        before = a.read()
        between = gate.op(before)
        with af.control_dependencies([between]):
            pair = [between, b.read()]
        ones, fives = ([v.assign(np.float32(x)) for v in (a, b)] for x in (1, 5))
    async with asyncio.timeout(PATIENCE_S), af.Session(graph) as session:
        await session.run(ones)
        await session.save(tmp_path)
        await session.run(fives)
        reading = asyncio.create_task(session.run(pair))
        await gate.entered.wait()
        restoring = asyncio.create_task(session.restore(tmp_path))
        await until(lambda: session._runs.in_flight.atomic.claims)
        later = asyncio.create_task(session.run(pair))
        gate.opened.set()
        assert await reading == [5.0, 5.0]
        await restoring
        assert await later == [1.0, 1.0]


async def test_saving_inside_a_run(tmp_path: Path) -> None:
    """A run that writes several variables would wait for itself; a run that only starts other runs may save between
    them.
    """
    sessions: list[af.Session] = []

    @af.op(stateful=True, outputs=())
    async def save() -> tuple[()]:
        await sessions[0].save(tmp_path)
        return ()

    model = Model()
    with model.graph:
        saves = save()
    async with af.Session(model.graph) as session:
        sessions.append(session)
        with pytest.raises(af.KernelError, match=r"put saver\.maybe_save\(step\) into the graph"):
            await session.run([*model.step, saves])
        await session.run(saves)
        await session.run(model.step)
    assert os.listdir(tmp_path) == ["step-0"]


async def test_a_save_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    gate = Gate()
    model = Model()
    with model.graph:
        waits = [*model.step, gate.op(np.float32(1))]
    async with asyncio.timeout(PATIENCE_S), af.Session(model.graph) as session:
        run = asyncio.create_task(session.run(waits))
        await gate.entered.wait()
        saving = asyncio.create_task(session.save(tmp_path))
        await asyncio.sleep(0)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        assert not session._runs.in_flight.cuts.waiting
        gate.opened.set()
        await run
        assert os.listdir(tmp_path) == []
        await session.save(tmp_path)


@pytest.mark.parametrize(
    ("verb", "where", "what"),
    [
        ("save", checkpoints.Checkpoints, "_each_state"),
        ("restore", checkpoints.Checkpoints, "_each_state"),
        ("restore", checkpoints, "empty_buffers"),
    ],
)
async def test_others_have_turns_while_states_are_found_and_memory_for_values_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, where: Any, what: str
) -> None:
    turns, seen = 0, []
    each_of = getattr(where, what)

    def slowly(*args: Any) -> Iterator[Any]:
        for each in each_of(*args):
            seen.append(turns)
            yield each

    async def beat() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with saved(tmp_path) as (_, session):
        beating = asyncio.create_task(beat())
        monkeypatch.setattr(where, what, slowly)
        monkeypatch.setattr(checkpoints, "_TURN_S", 0.0)
        await getattr(session, verb)(tmp_path)
        beating.cancel()
    assert len(seen) > 1 and sorted(set(seen)) == seen


async def test_two_saves_at_once_are_two_steps(tmp_path: Path) -> None:
    async with saved(tmp_path) as (_, session):
        paths = await asyncio.gather(*(session.save(tmp_path) for _ in range(3)))
        assert sorted(path.name for path in paths) == ["step-1", "step-2", "step-3"]


async def test_random_numbers_go_on_where_they_were_in_the_middle_of_a_session(tmp_path: Path) -> None:
    model = Model()
    async with af.Session(model.graph) as session:
        await session.save(tmp_path)
        first = [(await session.run(model.noise)).tolist() for _ in range(3)]
        await session.restore(tmp_path)
        assert [(await session.run(model.noise)).tolist() for _ in range(3)] == first
        assert session.statistics().completed == 6


async def test_training_goes_on_when_a_save_fails(tmp_path: Path) -> None:
    """Fault F54: F54."""
    async with saved(tmp_path / "run") as (model, session):
        (tmp_path / "file").write_text("")
        with pytest.raises(af.CheckpointError, match="file"):
            await session.save(tmp_path / "file" / "run")
        await session.run(model.step)
        assert await model.values(session) == ([4.0] * 3, 4)


# -- devices ---------------------------------------------------------------------------------------------------------


async def test_values_in_the_memory_of_cards(tmp_path: Path) -> None:
    with small_cards(0):
        with af.Graph() as graph:
            with af.device("cuda:1"):
                v = af.Variable(np.zeros((64, 3), np.float32), name="v")
                step = v.assign_add(np.ones((64, 3), np.float32))
        async with af.Session(graph, devices=["cuda:0", "cuda:1"]) as session:
            await session.run(step)
            await session.save(tmp_path)
            await session.run(step)
            await session.restore(tmp_path)
            np.testing.assert_array_equal(await session.run(step), np.full((64, 3), 2, np.float32))
            await session.save(tmp_path)
        async with af.Session(graph, restore=tmp_path) as session:  # on a CPU
            np.testing.assert_array_equal(await session.run(v), np.full((64, 3), 2, np.float32))


# -- tables and inputs -----------------------------------------------------------------------------------------------


async def test_tables_and_inputs_are_kept_beside_variables(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"{k}\n" for k in range(9)))
    with af.Graph() as graph:
        table = af.Table(5, af.spec("float32", (2,)), name="memory")
        words = af.read_lines([lines], name="words")
        word = words.next()
        step = [word, table.append(np.ones((2,), np.float32)), table.size()]
        rows = table.gather(np.arange(5))
        overwrite = table.write(0, np.full((2,), 7, np.float32))
    async with af.Session(graph) as session:
        await session.run(step)
        await session.run(step)
        saving = asyncio.create_task(session.save(tmp_path / "run"))
        while not (tmp_path / "run").exists():  # the cut is taken
            await session.run(overwrite)
        path = await saving
        assert sorted(os.listdir(path)) == ["inputs.safetensors", "manifest.json", "tables.safetensors"]
        await session.run([step, overwrite])
        await session.restore(path)
        assert await session.run(word) == "2"
    async with af.Session(graph, restore=path) as session:
        found, _, size = await session.run(step)
        assert (found, int(size)) == ("2", 3)
        assert (await session.run(rows)).tolist()[1:] == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    with af.Graph() as other:
        af.Table(6, af.spec("float32", (2,)), name="memory").size()
        af.read_lines([lines], name="words").next()
    async with af.Session(other) as session:
        with pytest.raises(af.CheckpointError, match=r"tables.safetensors: tensor 'memory': table 'memory' has 6 rows"):
            await session.restore(path)
