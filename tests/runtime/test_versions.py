"""New versions of variables: replaced values, refusals that change nothing, and the rest after a swap."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.calls import plans as plans_module
from tests.faults.kernels import until
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

    from asyncflow.graph.resource import Resource


class Gated:
    """A program that reads a variable before and after it waits, and a program that writes it there."""

    def __init__(self, shape: tuple[int, ...] = (2,)) -> None:
        self.gate = asyncio.Event()
        self.waits = 0

        @af.op(outputs=af.spec("float32", ()))
        async def wait() -> np.float32:
            self.waits += 1
            await self.gate.wait()
            return np.float32(0)

        with af.Graph() as self.graph:
            self.w = af.Variable(np.zeros(shape, np.float32), name="w")
            self.n = af.Variable(0, name="n")
            first = self.w.read() + 0
            with af.control_dependencies([first]):
                waited = wait()
            with af.control_dependencies([waited]):
                self.both = first + self.w.read()
                self.write = self.w.assign_add(np.ones(shape, np.float32))
                self.count = self.n.assign_add(1)
            self.twice = self.w.read() * 2
            self.value = af.placeholder("float32", ())
            self.fill = self.w.assign(af.broadcast_to(self.value, shape))
            self.once = [self.n.assign_add(1), self.write]

    async def begun(self, run: Any) -> asyncio.Task[Any]:
        """A run that has come to where it waits."""
        task = asyncio.ensure_future(run)
        seen = self.waits
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: self.waits > seen)
        return task


async def test_a_checkpoint_becomes_the_next_version(tmp_path: Path) -> None:
    """Another, larger graph may have written the checkpoint; prepared calls go on with the new values."""
    with af.Graph() as trained:
        w = af.Variable(np.full(2, 3, np.float32), name="w")
        af.Variable(np.ones(5), name="momentum").read()
        n = af.Variable(7, name="n")
        w.read(), n.read()
    async with af.Session(trained) as session:
        await session.save(tmp_path)
    program = Gated()
    async with af.Session(program.graph) as session:
        prepared = session.prepare(program.twice)
        assert (await prepared()).tolist() == [0, 0]
        early = await program.begun(session.run(program.both))
        assert sorted(await session.swap_variables(tmp_path)) == ["n", "w"]
        assert (await prepared()).tolist() == [6, 6]
        late = await program.begun(session.run(program.both))
        program.gate.set()
        assert (await early).tolist() == [0, 0]
        assert (await late).tolist() == [6, 6]
        assert await session.run(program.n) == 7


async def test_some_variables_of_a_checkpoint(tmp_path: Path) -> None:
    program = Gated()
    async with af.Session(program.graph) as session:
        program.gate.set()
        await session.save(tmp_path)
        await session.run([program.fill, program.count], {program.value: 1})
        assert await session.swap_variables(tmp_path, [program.w]) == ("w",)
        w, n = await session.run([program.w, program.n])
        assert (w.tolist(), n) == ([0, 0], 1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"w": np.zeros(3, np.float32)}, "tensor 'w': it is float32[3] there, and the variable is float32[2]"),
        ({"w": np.zeros(2), "n": 1}, "tensor 'w': it is float64[2] there, and the variable is float32[2]"),
        ({"n": 1, "v": 2}, "tensor 'v' is no variable's of the session"),
    ],
)
async def test_what_does_not_fit_changes_nothing(source: dict[Resource | str, Any], message: str) -> None:
    program = Gated()
    async with af.Session(program.graph) as session:
        with pytest.raises(af.CheckpointError, match=re.escape(f"nothing was replaced: {message}")):
            await session.swap_variables(source)
        assert (await session.run(program.twice)).tolist() == [0, 0]
        assert await session.run(program.n) == 0


async def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    """F49: a load that fails keeps the old version, for runs in flight and for later ones."""
    program = Gated()
    async with af.Session(program.graph) as session:
        file = await session.save(tmp_path) / "variables.safetensors"
        await session.run(program.fill, {program.value: 1})
        early = await program.begun(session.run(program.both))
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
        with pytest.raises(af.CheckpointError, match=r"(?s)nothing was replaced.*tensor 'w' is damaged"):
            await session.swap_variables(tmp_path)
        with pytest.raises(af.CheckpointError, match="is no checkpoint"):
            await session.swap_variables(tmp_path / "nowhere")
        program.gate.set()
        assert (await early).tolist() == [2, 2]
        assert (await session.run(program.twice)).tolist() == [2, 2]


async def test_a_checkpoint_has_to_have_all(tmp_path: Path) -> None:
    program = Gated()
    async with af.Session(program.graph) as session:
        await session.save(tmp_path, [program.n])
        with pytest.raises(af.CheckpointError, match="has no value of variable 'w', which the session has"):
            await session.swap_variables(tmp_path)


async def test_a_plan_that_cannot_be_compiled_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Gated()
    async with af.Session(program.graph) as session:
        await session.run(program.twice)

        def fail(*_: object, **__: object) -> None:
            raise af.PlacementError("no")

        with monkeypatch.context() as patched:
            patched.setattr(session._runs.versions, "_compile", fail)
            with pytest.raises(af.PlacementError):
                await session.swap_variables({"w": np.ones(2, np.float32)})
        assert (await session.run(program.twice)).tolist() == [0, 0]
        await session.swap_variables({"w": np.ones(2, np.float32)})
        assert (await session.run(program.twice)).tolist() == [2, 2]


async def test_what_a_run_writes_is_not_lost() -> None:
    """While a run may write a variable, that is not replaced; others are."""
    program = Gated()
    async with af.Session(program.graph) as session:
        training = await program.begun(session.run(program.write))
        with pytest.raises(af.CheckpointError, match="nothing was replaced: a run in flight writes 'w'"):
            await session.swap_variables({"w": np.full(2, 5, np.float32), "n": 1})
        await session.swap_variables({"n": 1})
        program.gate.set()
        assert (await training).tolist() == [1, 1]
        assert await session.run(program.n) == 1
        await session.swap_variables({"w": np.full(2, 5, np.float32)})
        await session.run(program.write)
        assert (await session.run(program.w)).tolist() == [6, 6]


async def test_a_container_is_seen_by_other_sessions() -> None:
    with af.Graph() as graph:
        w = af.Variable(1.0, name="w", container="weights")
        w.read()
    async with af.Session(graph) as session:
        with pytest.raises(af.CheckpointError, match="'weights:w' is in a container, where other sessions see it"):
            await session.swap_variables({w: 2.0})
    af.reset_container("weights")


async def test_the_memory_of_an_old_version_is_given_back_after_its_last_run() -> None:
    """F49: not before, as that run still reads it, and not by the garbage collector alone."""
    program = Gated((1000, 100))
    async with af.Session(program.graph) as session:
        for version in (1, 2):
            await session.swap_variables({"w": np.full((1000, 100), version, np.float32)})
        old = ref(session.state.lookup(program.w).value)
        runs = [await program.begun(session.run(program.both)) for _ in range(2)]
        await session.swap_variables({program.w: np.zeros((1000, 100), np.float32)})
        assert old() is not None
        runs[0].cancel()
        await asyncio.wait([runs[0]])
        assert old() is not None
        program.gate.set()
        assert (await runs[1])[0, 0] == 4
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: old() is None)
        assert not session._runs.versions.retired


async def test_swaps_beside_restore_and_save(tmp_path: Path) -> None:
    """Code that has looked at a variable before a flip finds the variable of after it."""
    program = Gated()
    async with af.Session(program.graph) as session:
        await session.run(program.fill, {program.value: 3})
        await session.save(tmp_path / "three")
        early = await program.begun(session.run(program.both))
        restoring = asyncio.ensure_future(session.restore(tmp_path / "three"))  # waits for the run
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: session._runs.in_flight.atomic.claims)
        await session.swap_variables({"w": np.full(2, 9, np.float32)})
        program.gate.set()
        assert (await early).tolist() == [6, 6]
        await restoring
        assert (await session.run(program.w)).tolist() == [3, 3]
        program.gate.clear()
        several = await program.begun(session.run(program.once))
        saving = asyncio.ensure_future(session.save(tmp_path / "cut"))
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: session._runs.in_flight.cuts.waiting)
        several.cancel()
        await asyncio.wait([several])
        await saving


async def test_a_swap_while_a_graph_is_compiled_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that was begun before the flip, and is done after it, has one version and no mixture."""
    monkeypatch.setattr(plans_module, "_compiles_soon", lambda _: False)
    program = Gated()
    async with af.Session(program.graph) as session:
        runs = [asyncio.ensure_future(session.run(program.twice)) for _ in range(3)]
        await asyncio.sleep(0)
        await session.swap_variables({"w": np.ones(2, np.float32)})
        assert {tuple(await run) for run in runs} <= {(0, 0), (2, 2)}
        assert (await session.run(program.twice)).tolist() == [2, 2]


async def test_a_plan_whose_run_was_cancelled_meanwhile_has_the_new_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that was compiled beside goes on for later runs, and is kept; so it is renewed like plans that have
    run.
    """
    monkeypatch.setattr(plans_module, "_compiles_soon", lambda _: False)
    program = Gated()
    async with af.Session(program.graph) as session:
        run = asyncio.ensure_future(session.run(program.twice))
        await asyncio.sleep(0)
        run.cancel()
        await asyncio.wait([run])
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: session.statistics().plans == 1)
        await session.swap_variables({"w": np.ones(2, np.float32)})
        assert (await session.run(program.twice)).tolist() == [2, 2]


async def test_others_go_on_while_plans_are_compiled() -> None:
    """A session that has many plans holds the event loop for one of them at a time; plans that come meanwhile count."""
    program = Gated()
    with program.graph:
        many = [program.w.read() * k for k in range(20)]
    async with af.Session(program.graph) as session:
        for fetch in many[:-1]:
            await session.run(fetch)
        swapping = asyncio.ensure_future(session.swap_variables({"w": np.ones(2, np.float32)}))
        passes, late = 0, None
        while not swapping.done():
            await asyncio.sleep(0)
            passes += 1
            if passes == 5:
                late = asyncio.ensure_future(session.run(many[-1]))
        assert passes >= 19
        assert late is not None
        assert (await late)[0] in (0, 19)
        for k, fetch in enumerate(many):
            assert (await session.run(fetch)).tolist() == [k, k]


async def test_new_kinds_of_runs_do_not_keep_a_swap_from_happening(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new kind comes whenever a plan was compiled; the last ones are compiled before any other coroutine goes on."""
    program = Gated()
    with program.graph:
        many = [program.w.read() * k for k in range(60)]
    async with af.Session(program.graph) as session:
        compiled, came = session._plans.compiled, 0

        async def compiled_and_another(request: Any, compile: Any) -> Any:
            nonlocal came
            came += 1
            await session.run(many[came])
            return await compiled(request, compile)

        await session.run(many[0])
        monkeypatch.setattr(session._plans, "compiled", compiled_and_another)
        await session.swap_variables({"w": np.ones(2, np.float32)})
        assert came < 10
        for k in range(came + 1):
            assert (await session.run(many[k])).tolist() == [k, k]


async def test_a_writer_that_begins_while_values_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers are looked for again right before the flip; a writer that was asked for before, and begins later, is of
    the new version.
    """
    program = Gated()
    async with af.Session(program.graph) as session:
        await session.run(program.twice)
        compiled, training = session._plans.compiled, []

        async def later(*args: Any) -> Any:
            training.append(await program.begun(session.run(program.write)))
            return await compiled(*args)

        with monkeypatch.context() as patched:
            patched.setattr(session._plans, "compiled", later)
            with pytest.raises(af.CheckpointError, match="a run in flight writes 'w'"):
                await session.swap_variables({"w": np.full(2, 5, np.float32)})
        program.gate.set()
        for task in training:
            await task
        assert (await session.run(program.twice)).tolist() == [2 * len(training)] * 2
        asked = session.run(program.write)
        await session.swap_variables({"w": np.full(2, 5, np.float32)})
        await asked
        assert (await session.run(program.twice)).tolist() == [12, 12]


async def test_what_runs_share_is_compiled_beside_the_old_version_and_not_by_the_next_request() -> None:
    """So the first request of a version takes as long as others do, and as many plans are kept after any number."""
    with af.Graph() as graph:
        w, x = af.Variable(np.float64(0), name="w"), af.placeholder("float64", ())
        y = af.batched(lambda x: x + w, cost="none")(x)
        pooled = af.while_loop(lambda i, _: i < 3, lambda i, z: (i + 1, z + w), (0, x), pool=af.Pool(4))[1]
        trees = af.InputGraph.placeholder()
        cell = af.vertex_function(state=af.spec("float64", ()), children=2)(lambda v: v.scatter(v.gather(0) + w))
        shared = af.vertex_map(cell, trees, share=True).roots
        feeds = {x: 1.0, **trees.feeds(af.InputGraph.from_nested((0, 1))[0])}
    compiled: list[str] = []
    async with af.Session(graph, dump=lambda name, _: compiled.append(name)) as session:
        plans = 0
        for version in range(3):
            for runs in (1, 2):
                found = await asyncio.gather(*(session.run([y, pooled, shared], feeds) for _ in range(runs)))
                assert found == [[1 + version, 1 + 3 * version, [2 * version]]] * runs
            assert bool(compiled) == (version == 0)
            plans = plans or session.statistics().plans
            assert session.statistics().plans == plans
            await session.swap_variables({w: np.float64(version + 1)})
            assert compiled
            compiled.clear()
