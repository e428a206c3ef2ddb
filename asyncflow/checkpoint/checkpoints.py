"""`Checkpoints`: what a session saves and restores, and when; see `Session.save`.

To save, references to all values of one moment are taken (`SessionRuns.at_rest`), which delays no run: values never
change. Values on devices are copied to the host in the background, and a thread writes them.

To restore, everything is read and checked before the first value changes, and all change at once, between runs.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Protocol, TypeAlias, TypeVar, cast

import numpy as np

from asyncflow.checkpoint.directory import find_step
from asyncflow.checkpoint.manifest import NAME, Manifest, RandomState, read_manifest
from asyncflow.checkpoint.reader import Arrays, empty_buffers, read_arrays
from asyncflow.checkpoint.writer import Content, SaveStopped, write_checkpoint
from asyncflow.devices.machine.heap import process_heap
from asyncflow.errors import CheckpointError, DeviceLostError, brief, warn_user
from asyncflow.graph.graph import Graph
from asyncflow.graph.resource import Resource, resources_of
from asyncflow.state.capture import Capture, CheckpointedState, check_capture
from asyncflow.state.containers import StateStore, state_key
from asyncflow.state.variables.held import HeldValue
from asyncflow.state.variables.variable_state import VariableState
from asyncflow.streams.beside import background, call_beside
from asyncflow.values import Array, Value

T = TypeVar("T")

States: TypeAlias = "Mapping[str, tuple[Hashable, CheckpointedState]]"
"""States by name, each with the key that distinguishes it."""

_UNNAMED = re.compile(r"tensor 'variable_\d+'")
_SHOWN = 5
"""Maximum number of faults listed in an error."""
_TURN_S = 0.5e-3
"""Seconds of work on the event loop before other tasks get a turn."""


class SessionRuns(Protocol):
    """A session, as far as saving and restoring have to do with its runs and devices."""

    random: RandomState
    """The counters that random numbers are made from."""

    async def at_rest(self, act: Callable[[], T], *, in_order: bool = False) -> T:
        """Call `act` at a moment when no run is between two of its writes, and return its result."""

    async def alone(self, states: frozenset[Hashable], act: Callable[[], None]) -> None:
        """Calls `act` when no run that touches `states` is in flight; later ones wait."""

    def is_on_host(self, key: Hashable, value: Array | HeldValue) -> bool:
        """Return True if the value is on the host already."""

    async def to_host(self, name: str, key: Hashable, value: Array | HeldValue) -> Array:
        """A value of a state, on the host."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The outcome of `Session.restore`.

    Attributes:
        path: the directory of the step.
        step: its number.
        names: of the variables that have values of it now.
        skipped: states left unchanged, each with the reason, a sentence each; empty unless ``strict=False``.
    """

    path: Path
    step: int
    names: tuple[str, ...]
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """The states of one moment, by reference.

    Attributes:
        states: kinds and captures by name.
        keys: the key that distinguishes each state.
        random: counters of random numbers; None if only some variables are saved.
    """

    states: dict[str, tuple[str, Capture]]
    keys: Mapping[str, Hashable]
    random: RandomState | None


@dataclass(frozen=True, slots=True)
class NewVersion:
    """A state with a new value, which is to take the place of one in use.

    Attributes:
        name: of the variable.
        key: the key that distinguishes the state.
        old: the state in use.
        new: of the same variable.
    """

    name: str
    key: Hashable
    old: VariableState
    new: VariableState


@dataclass(slots=True)
class _Comparison:
    """The states of a checkpoint that the session has or will have, and faults of the others."""

    manifest: Manifest
    path: Path
    awaits: bool
    faults: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=list)


class Checkpoints:
    """Saves and restores the state of one session."""

    def __init__(self, graph: Graph | None, state: StateStore, runs: SessionRuns) -> None:
        self._graph = graph
        self._state = state
        self._runs = runs
        self._resources: tuple[int, list[Resource]] = -1, []
        self._digest: tuple[int, str] = -1, ""
        self._writing = asyncio.Lock()

    # -- saving --------------------------------------------------------------------------------------------------

    async def cut(self, variables: Sequence[Resource] | None = None, *, in_order: bool = False) -> SessionSnapshot:
        """Return all states of one moment, or the states of `variables`.

        Raises:
            CheckpointError: two of them have one name.
        """
        # States are found over several turns of the event loop, but captured in one: versions may be swapped between.
        flips = self._state.flips
        found = await self._find_states(variables)

        def take() -> SessionSnapshot:
            latest = found if self._state.flips == flips else self._states(variables)
            states: dict[str, tuple[str, Capture]] = {
                name: (state.kind, state.capture()) for name, (_, state) in latest.items()
            }
            if variables is None:
                states |= self._state.awaited
            return SessionSnapshot(states, keys, None if variables is not None else self._runs.random)

        keys = {name: key for name, (key, _) in found.items()}
        return await self._runs.at_rest(take, in_order=in_order)

    async def write(self, root: Path, cut: SessionSnapshot, step: int | None, keep: int | None) -> Path:
        """Write a cut as a step under `root`, and delete all but the latest `keep`; None for all.

        The cut is empty afterwards: its values are freed on the thread that writes, as freeing 1 GB keeps the GIL.

        Cancellation: the thread leaves nothing behind, unless it is done already.

        Raises:
            CheckpointError: it cannot be written, or a device that has some of it is lost.
        """
        content = Content(await self._on_host(cut), cut.random, None if self._graph is None else self._graph_digest)
        cut.states.clear()
        stopped = threading.Event()

        def check() -> None:
            if stopped.is_set():
                raise SaveStopped

        async with self._writing:  # otherwise two saves would write the same step
            try:
                return await call_beside(_written, root, step, content, keep, check)
            finally:
                stopped.set()  # after a cancellation the thread goes on, and checks this between two writes

    async def _on_host(self, cut: SessionSnapshot) -> dict[str, tuple[str, Mapping[str, Array]]]:
        async def bring(name: str, kind: str, capture: Capture) -> tuple[str, Mapping[str, Array]]:
            if not isinstance(capture, Mapping):
                return kind, await call_beside(capture.arrays)
            key = cut.keys.get(name)
            return kind, {part: await self._runs.to_host(name, key, value) for part, value in capture.items()}

        there: dict[str, tuple[str, Mapping[str, Array]]] = {}
        tasks: dict[str, asyncio.Task[tuple[str, Mapping[str, Array]]]] = {}
        try:
            with background:
                async with asyncio.TaskGroup() as group:
                    async for name, (kind, capture) in _in_turns(cut.states.items()):
                        key = cut.keys.get(name)
                        if isinstance(capture, Mapping) and all(
                            self._runs.is_on_host(key, value) for value in capture.values()
                        ):
                            there[name] = kind, cast("Mapping[str, Array]", capture)
                        else:
                            tasks[name] = group.create_task(bring(name, kind, capture))
        except ExceptionGroup as errors:  # not `except*`: some versions of Python raise its errors in a group
            lost = next((error for error in errors.exceptions if isinstance(error, DeviceLostError)), None)
            if lost is None:
                raise
            raise CheckpointError(
                f"nothing was saved: the value of a variable was on a device that is lost: {lost}"
            ) from lost
        return there | {name: task.result() for name, task in tasks.items()}

    # -- restoring -----------------------------------------------------------------------------------------------

    async def start(self, path: Path) -> Restored:
        """Restore a session at its start, and keep values of states that are unknown until then; see `_awaits`."""
        return await self.restore(path, None, True, starts=True)

    async def restore(
        self, path: Path, variables: Sequence[Resource] | None, strict: bool, *, starts: bool = False
    ) -> Restored:
        """Restore as `Session.restore` promises; a session that `starts` may also keep values for later."""
        flips = self._state.flips
        found = await self._find_states(variables)
        read = partial(self._read, found, starts, variables is None)
        # Read and compare everything before changing the session: a fault leaves it unchanged.
        step, (compared, arrays), _ = await _of_latest(path, read)
        manifest = compared.manifest
        with background:
            new = [name async for name, parts in _in_turns(arrays.items()) if _fits(compared, name, parts, found)]
            # A variable of another shape changes the graph as well: report the shape first, as it is more specific.
            compared.faults += await self._graph_fault(manifest, step)
        if strict:
            _refuse(compared, _NO_GRAPH if self._graph is None and variables is None else "")

        old: list[Capture] = []

        def put() -> None:
            latest = found if self._state.flips == flips else self._states(variables)
            with background:
                old.extend(latest[name][1].capture() for name in new)
                for name in new:
                    latest[name][1].restore(arrays[name])
            for name in arrays.keys() - found.keys():
                self._state.awaited[name] = manifest.states[name].kind, arrays[name]
            if variables is None and manifest.random is not None:
                self._runs.random = manifest.random

        await self._runs.alone(frozenset(key for key, _ in found.values()), put)
        await call_beside(process_heap.drop, old)  # freeing large values keeps the GIL: not on the event loop
        if compared.faults:
            warn_user(f"restored from {step}, but not all: {_listed(compared.faults)}")
        return Restored(step, manifest.step, tuple(new), tuple(compared.faults))

    async def _read(
        self, found: States, starts: bool, extra_is_fault: bool, step: Path
    ) -> tuple[tuple[_Comparison, Arrays], list[str]]:
        """Read the states of a step that there are here, too, and find out where the two differ."""
        with background:
            manifest = await call_beside(read_manifest, step)
            compared = _Comparison(manifest, step, starts and await self._awaits(manifest))
            self._compare(compared, found, extra_is_fault=extra_is_fault)
            buffers = {key: array async for key, array in _in_turns(empty_buffers(manifest, compared.known))}
            arrays, damaged = await call_beside(read_arrays, step, manifest, compared.known, buffers)
            compared.faults += damaged
        return (compared, arrays), compared.faults

    async def _awaits(self, manifest: Manifest) -> bool:
        """Return True if a starting session keeps the values of unknown states for later.

        A checkpoint of the same graph can hold variables without a reading node: `swap_variables` makes them known.
        """
        if self._graph is None:
            return True
        return manifest.graph is not None and await call_beside(self._graph_digest) == manifest.graph

    async def _graph_fault(self, manifest: Manifest, step: Path) -> list[str]:
        """Return a fault if the graph is another one than that of the checkpoint."""
        if self._graph is None or manifest.graph is None:
            return []
        digest = await call_beside(self._graph_digest)
        if digest == manifest.graph:
            return []
        digests = f"its digest is {manifest.graph[:12]}, this one's {digest[:12]}"
        return [f"{step / NAME}: was saved with another graph ({digests})"]

    def _compare(self, compared: _Comparison, found: States, *, extra_is_fault: bool) -> None:
        """Find out which states there are on both sides."""
        manifest, file = compared.manifest, compared.path / NAME
        for name in sorted(found.keys() - manifest.states.keys()):
            compared.faults.append(f"{file}: has no tensor {name!r}, which the session has")
        for name, record in manifest.states.items():
            if name in found or compared.awaits:
                compared.known.append(name)
            elif extra_is_fault:
                compared.faults.append(f"{compared.path / record.file}: tensor {name!r} is not in the session")

    # -- new versions --------------------------------------------------------------------------------------------

    async def new_versions(
        self, source: Path | Mapping[Resource | str, Value], variables: Sequence[Resource] | None
    ) -> list[NewVersion]:
        """Return states with new values of variables, beside the states in use; see `Session.swap_variables`."""
        if isinstance(source, Path):
            states = await self._find_states(variables)
            found = {x: each for x, each in states.items() if isinstance(each[1], VariableState)}
            step, arrays, faults = await _of_latest(source, partial(_states_of, found.keys()))
            place = f"{step}: "
        else:
            resources = [key for key in source if isinstance(key, Resource)]
            found = {**await self._find_states(None), **await self._find_states(resources)}
            place, faults = "", []
            arrays = await call_beside(_copied, source)
            found = {x: each for x, each in found.items() if x in arrays}
        given = {name: parts for name, parts in arrays.items() if parts}
        damaged = bool(faults)
        faults += [f"{place}tensor {name!r} is no variable's of the session" for name in arrays.keys() - found.keys()]
        versions = []
        for name, (key, state) in found.items():
            if not isinstance(state, VariableState):
                faults.append(f"{place}{name!r} is a {state.kind}, and only variables have versions")
            elif ":" in name:
                faults.append(
                    f"{name!r} is in a container, where other sessions see it, too: restore it, or assign to it"
                )
            elif name in given:
                try:
                    state.check_arrays(given[name])
                except CheckpointError as error:
                    faults.append(f"{place}tensor {name!r}: {error}")
                versions.append(NewVersion(name, key, state, state.successor(given[name])))
            elif not damaged:
                faults.append(f"{place}has no value of variable {name!r}, which the session has")
        if faults:
            raise CheckpointError(f"nothing was replaced: {_listed(faults)}")
        return versions

    # -- variables and other states to save ----------------------------------------------------------------------

    async def _find_states(self, variables: Sequence[Resource] | None) -> States:
        """As `_states`: of thousands the event loop finds some in a turn."""
        if variables is None:
            await call_beside(self._of_graph)
        with background:
            return dict([state async for state in _in_turns(self._each_state(variables))])

    def _states(self, variables: Sequence[Resource] | None) -> States:
        """The states to save or restore, by name, with what tells each from others."""
        return dict(self._each_state(variables))

    def _each_state(
        self, variables: Sequence[Resource] | None
    ) -> Iterator[tuple[str, tuple[Hashable, CheckpointedState]]]:
        """The states to save or restore, some of them twice.

        Raises:
            TypeError: `variables` is no sequence of variables.
            CheckpointError: two of them have one name.
        """
        found: dict[str, CheckpointedState] = {}
        is_kept: dict[type, bool] = {}  # cached: checking an object against a protocol takes 10 µs
        asked = self._of_graph() if variables is None else _as_resources(variables)
        # `lookup` creates the states of variables that no run has used.
        named = ((state_key(x), x.effect_key, self._state.lookup(x)) for x in asked)
        for name, key, state in named if variables is not None else chain(named, self._state.named()):
            kind = type(state)
            if kind not in is_kept:
                is_kept[kind] = isinstance(state, CheckpointedState)
            if not is_kept[kind]:
                continue
            kept = cast("CheckpointedState", state)
            if found.setdefault(name, kept) is not kept:
                kinds = f"a {found[name].kind} and a {kept.kind}"
                raise CheckpointError(
                    f"{kinds} of the session are named {name!r}, and a checkpoint knows them by their names; give each "
                    "its own name="
                )
            yield name, (key, kept)

    def _of_graph(self) -> list[Resource]:
        graph = self._graph
        version, resources = self._resources
        if graph is not None and version != graph.version:
            version = graph.version  # read before the walk, which may run on a thread while the graph grows
            resources = list(dict.fromkeys(resource for node in graph.walk() for resource in resources_of(node)))
            self._resources = version, resources
        return resources

    def _graph_digest(self) -> str:
        """A digest of the names, operations, types and edges of the session's graph; a large one takes a while."""
        graph = self._graph
        assert graph is not None
        version, digest = self._digest
        if version != graph.version:
            version = graph.version  # before the walk, as above
            hashed = blake2b(digest_size=20)
            for node in graph.walk():
                edges = ",".join(x.name for x in node.inputs), ",".join(x.name for x in node.control_inputs)
                specs = ",".join(str(x.spec) for x in node.outputs)
                hashed.update(f"{node.name} {node.op.name} {edges} {specs}\n".encode("utf-8", "surrogatepass"))
            digest = hashed.hexdigest()
            self._digest = version, digest
        return digest


def _written(root: Path, step: int | None, content: Content, keep: int | None, check: Callable[[], None]) -> Path:
    """Write a checkpoint, and free what no variable has any more."""
    try:
        return write_checkpoint(root, step, content, keep, check)
    finally:
        old = [array for _, parts in content.states.values() for array in parts.values()]
        content.states.clear()
        process_heap.drop(old)


async def _in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items: there may be thousands, and other tasks of the event loop have turns in between."""
    since = perf_counter()
    for item in items:
        if perf_counter() - since > _TURN_S:
            await asyncio.sleep(0)
            since = perf_counter()
        yield item


def _copied(source: Mapping[Resource | str, Value]) -> dict[str, dict[str, Array]]:
    """Return read-only copies of arrays, by the names of states."""
    copies = {}
    for key, value in source.items():
        array = np.array(value)
        array.flags.writeable = False
        copies[state_key(key) if isinstance(key, Resource) else key] = {"": array}
    return copies


def _as_resources(variables: Sequence[Resource]) -> Sequence[Resource]:
    if isinstance(variables, Resource | str) or not isinstance(variables, Sequence):
        raise TypeError(f"variables is a list of variables, or None for all; got {brief(variables)}")
    for each in variables:
        if not isinstance(each, Resource):
            raise TypeError(f"variables is a list of variables; one of them is {brief(each)}")
    return variables


async def _states_of(wanted: Collection[str], step: Path) -> tuple[Arrays, list[str]]:
    manifest = await call_beside(read_manifest, step)
    names = wanted & manifest.states.keys()
    buffers = {key: array async for key, array in _in_turns(empty_buffers(manifest, names))}
    return await call_beside(read_arrays, step, manifest, names, buffers)


async def _of_latest(path: Path, read: Callable[[Path], Awaitable[tuple[T, list[str]]]]) -> tuple[Path, T, list[str]]:
    """Read the step that `path` stands for; begin again if that one is deleted meanwhile and another takes its place.

    A saver deletes old steps once it has published a new one, which is then the latest.

    Args:
        path: a step, or a directory of steps.
        read: returns the values read from a step, and the faults found.
    """
    while True:
        step = await call_beside(find_step, path)
        try:
            found, faults = await read(step)
        except CheckpointError:
            if await call_beside(_is_latest, step, path):
                raise
            continue
        if not faults or await call_beside(_is_latest, step, path):
            return step, found, faults


def _is_latest(step: Path, path: Path) -> bool:
    """Return whether `path` still stands for a step; False if another one has to be read in its place."""
    try:
        return find_step(path) == step
    except CheckpointError:
        return True


def _fits(compared: _Comparison, name: str, arrays: Mapping[str, Array], found: States) -> bool:
    """Return True if arrays may be a state of the session; record a fault if not."""
    if name not in found:
        return False  # no state to compare with yet
    record = compared.manifest.states[name]
    try:
        check_capture(found[name][1], record.kind, arrays)
    except CheckpointError as error:
        compared.faults.append(f"{compared.path / record.file}: tensor {name!r}: {error}")
        return False
    return True


_NO_GRAPH = (
    "\n  the session has no graph, and knows only the variables of its runs: open it with af.Session(graph), or "
    "begin it with af.Session(restore=path), which keeps values for later variables"
)


def _refuse(compared: _Comparison, no_graph: str) -> None:
    if compared.faults:
        hint = no_graph if len(compared.known) < len(compared.manifest.states) else ""
        if any(_UNNAMED.search(fault) for fault in compared.faults):
            hint += "\n  names such as 'variable_2' depend on what else a process has made: give variables names"
        raise CheckpointError(
            f"nothing was restored: {_listed(compared.faults)}{hint}\n  restore(..., strict=False) restores the "
            "values that fit, and lists the others"
        )


def _listed(faults: Sequence[str]) -> str:
    more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return "\n  ".join(faults[:_SHOWN]) + more
