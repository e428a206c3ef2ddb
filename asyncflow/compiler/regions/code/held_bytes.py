"""Bytes that the values of a region's function take, found once from its code, so that a run adds up little.

While the function is written, each line that makes, shares or drops a value is noted. `HeldBytes.places` then replays
the notes, loop bodies twice, and finds the lines where the function tells an account: the fullest point outside loops,
the start or the end of a loop, and wherever the function stops. The bytes of known shapes are numbers there. Values of
open shapes are asked for theirs, and the account looks into stores itself.

For ``while i < n: h = tanh(h * w)``, with arrays of 1 MiB, the end of an iteration finds 1 MiB, and 1 MiB more was held
within it: the product, or the next h beside the present one. A run tells both where the loop ends, and where it stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncflow.autodiff.stores.part_sums import ADD_PARTS
from asyncflow.autodiff.stores.row_gradients import ADD_ROWS
from asyncflow.autodiff.stores.saved_values import NEW_STORE, READ_SAVED
from asyncflow.autodiff.stores.store_gradients import ACCUMULATE, ELEMENT_GRADIENT, NO_GRADIENT
from asyncflow.compiler.placement.node_costs import spec_nbytes
from asyncflow.compiler.program.kernels.kernels import SAVES, is_small_spec
from asyncflow.control.stores import row_store, tensor_array
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Memory
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.manipulation import CONCAT
from asyncflow.ops.derivatives.shapes import ENSURE_SHAPE, SUM_TO
from asyncflow.state.variables.variable import ASSIGN, ASSIGN_ADD, ASSIGN_SUB, UPDATE, USER_UPDATE, VARIABLE_READ

_KEEPING = (ACCUMULATE, ADD_PARTS, ADD_ROWS)
"""Ops that put values into a store of gradients."""

VARIABLE_WRITES = (ASSIGN, ASSIGN_ADD, ASSIGN_SUB, UPDATE, USER_UPDATE)
"""Ops whose result a variable keeps, so that the result is tracked where it is made."""

_ELSEWHERE = (VARIABLE_READ, row_store.SLICE, tensor_array.READ, *VARIABLE_WRITES)
"""Ops whose results are in memory that counts where it was made."""

_MOSTLY_VIEWS = (ENSURE_SHAPE, SUM_TO)

_STORES = (NEW_STORE, NO_GRADIENT, tensor_array.TENSOR_ARRAY, row_store.ROW_STORE)
"""Ops that make stores whose values others may have, too; of any other, values count as the store's alone."""


class _Bytes(NamedTuple):
    """Bytes of known shapes, and an assumption for open ones."""

    closed: float = 0.0
    open: float = 0.0

    def plus(self, other: _Bytes) -> _Bytes:
        """Both."""
        return _Bytes(self.closed + other.closed, self.open + other.open)

    def less(self, other: _Bytes) -> _Bytes:
        """The difference."""
        return _Bytes(self.closed - other.closed, self.open - other.open)


_NOTHING = _Bytes()

_Happening = tuple[Callable[..., None], tuple[object, ...]]
"""A note: a method of the replay, and its arguments."""

_GROUPS = ("saved", "begun", "looked at")
"""Kinds of stores, as `ToldAccount.tell` takes them."""


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory of values, or a store.

    Attributes:
        nbytes: its size; of a store, the values saved in the replay.
        spec: of a value whose shape is open; None for any other.
        is_store: a store, whose bytes the account counts.
        of_stores: it has stores, which count by themselves.
        is_empty: a store to which nothing was written yet.
        has_all: values read from it stay in it.
        names: variables of the function that hold it.
        is_kept: a store or variable holds it, and it counts there.
        is_mixed: a branch gives it, and the other one what counts elsewhere.
        first: of a store of saved values: where the first one is, as the others.
        others: of such a store.
    """

    nbytes: _Bytes = _NOTHING
    spec: Spec | None = None
    is_store: bool = False
    names: dict[str, None] = field(default_factory=dict)
    is_kept: bool = False
    is_mixed: bool = False
    of_stores: bool = False
    is_empty: bool = False
    has_all: bool = False
    first: str = ""
    others: str = ""

    def saves(self, where: str) -> None:
        """Note that a store of saved values gets another value, which is `where`."""
        self.first, self.others = (self.first, where) if self.first else (where, where)

    @property
    def group(self) -> str:
        """Arguments by which the account is told of a store."""
        if self.of_stores or self.is_empty:
            return ""
        if not self.first or "mixed" in (self.first, self.others):
            return "looked at"
        if self.others == "own":
            return "saved"
        return "begun" if self.first == "own" or self.others == "copy" != self.first else ""


class HeldPlace(NamedTuple):
    """A place where an account is told, behind `line` of the source.

    Attributes:
        held: expression for the bytes of values there.
        ahead: expression for how many more there were at most since the last place.
        stores: names of stores, by their `group`.
        how: the method of the account.
    """

    line: int
    depth: int
    held: str
    ahead: str
    stores: Mapping[str, Sequence[str]]
    how: str = "tell"

    def after(self, first: HeldPlace, is_later: str) -> HeldPlace:
        """Return the place for the first iteration of a loop, and for those where an expression holds."""
        held, ahead = (
            late if late == early else f"({late} if {is_later} else {early})"
            for late, early in ((self.held, first.held), (self.ahead, first.ahead))
        )
        return self._replace(held=held, ahead=ahead)

    @property
    def most(self) -> str:
        """An expression for the peak number of bytes held."""
        return " + ".join(each for each in (self.held, self.ahead) if each != "0")

    def text(self) -> str:
        """The line."""
        groups = ["(" + "".join(f"{name}, " for name in self.stores.get(group, ())) + ")" for group in _GROUPS]
        while groups and groups[-1] == "()":
            groups.pop()
        return f"{self.how}({', '.join(('holding', self.held, self.ahead, *groups))})"

    @property
    def is_empty(self) -> bool:
        """True if no countable value is held."""
        return self.held == self.ahead == "0" and not self.stores


class HeldBytes:
    """The notes of one region."""

    def __init__(self) -> None:
        self._notes: list[_Happening] = []
        self._outer: list[list[_Happening]] = []
        self._begin({}, 0)

    # -- notes ---------------------------------------------------------------------------------------------------

    def made(
        self, node: Node, inputs: Sequence[str | None], targets: Sequence[str], slot: str | None, line: int, depth: int
    ) -> None:
        """Note that a line has computed a node, in a buffer of its own or in that of `slot`."""
        if any(x.shape != () or x.dtype == VARIANT for x in (*node.inputs, *node.outputs)):
            self._note(self._make, node, inputs, targets, slot, line, depth)

    def named(self, names: Sequence[str], sources: Sequence[str]) -> None:
        """Note that variables have the values of others."""
        self._note(self._name, tuple(names), tuple(sources))

    def took_turns(self, slot: str, variable: str) -> None:
        """Note that, behind the first iteration, a slot has the buffer of a loop variable."""
        self._note(self._turn, slot, variable)

    def dropped(self, names: Iterable[str]) -> None:
        """Note that variables have let go."""
        self._note(self._drop, tuple(names))

    def stops(self, line: int, depth: int) -> None:
        """Note that the function may stop behind the line."""
        self._note(self._tell, line, depth, "stop")

    def opens(self) -> None:
        """Begin a part, which ends with `closes_loop`, `closes_branch` or `leaves_out`."""
        self._outer.append(self._notes)
        self._notes = []

    def closes_loop(self, variables: Sequence[str], counter: str, start: int, end: int, depth: int) -> None:
        """End the body of a loop, with its predicate; `start` and `end` are the lines before and behind it."""
        body, self._notes = self._notes, self._outer.pop()
        self._note(self._loop, body, frozenset(variables), counter, start, end, depth)

    def closes_branch(self, outputs: Sequence[str]) -> None:
        """End a branch whose `outputs` stay."""
        branch, self._notes = self._notes, self._outer.pop()
        self._note(self._branch, branch, frozenset(outputs))

    def leaves_out(self) -> None:
        """End what a loop does last, in place of other lines."""
        self._notes = self._outer.pop()

    def _note(self, happens: Callable[..., None], *args: object) -> None:
        self._notes.append((happens, args))

    # -- the replay ----------------------------------------------------------------------------------------------

    def places(self, inputs: Mapping[str, Spec]) -> list[HeldPlace]:
        """Return the places where a function of these inputs tells its account, in the order of lines."""
        self._begin(inputs, 0)
        self._play(self._notes)
        if self._fullest:  # replay, now that the fullest line is known
            self._begin(inputs, self._fullest)
            self._play(self._notes)
        return sorted((each for each in self._found.values() if not each.is_empty), key=lambda each: each.line)

    def _begin(self, inputs: Mapping[str, Spec], capture: int) -> None:
        self._inputs = inputs
        self._names: dict[str, _Buffer] = {}
        self._unsure: set[str] = set()  # names that may be unbound, or None
        self._assigned: set[str] = set()  # names assigned in the innermost loop
        self._open: dict[_Buffer, None] = {}
        self._stores: dict[_Buffer, None] = {}
        self._held = 0.0
        self._total = self._most = self._gone = _NOTHING
        self._fullest, self._capture = 0, capture
        self._loops = 0
        self._is_second = self._has_grown = self._has_shrunk = False
        # Of the outermost loop: its counter, the line where an iteration ends, and whether this is a later iteration.
        self._counter, self._end, self._is_later = "", 0, False
        self._found: dict[tuple[int, str], HeldPlace] = {}
        self._early: dict[tuple[int, str], HeldPlace] = {}

    def _play(self, notes: Iterable[_Happening]) -> None:
        for happens, args in notes:
            happens(*args)

    def _make(
        self, node: Node, inputs: Sequence[str | None], targets: Sequence[str], slot: str | None, line: int, depth: int
    ) -> None:
        given = [None if name is None else self._names.get(name) for name in inputs]
        store = next((each for each in given if each is not None and each.is_store), None)
        if node.op is ASSIGN:
            self._keep(given[0])
        elif node.op in VARIABLE_WRITES:  # the old value lives until the new one exists
            self._grow(_new_buffer(node.outputs[0].spec).nbytes, goes=True)
        elif store is not None and any(x.dtype == VARIANT for x in node.outputs):
            self._write(node, store, given)
        for target, output in zip(targets, node.outputs, strict=True):
            buffer = self._buffer_of(node, output, given, store, slot)
            self._give(target, buffer)
            if slot is not None and buffer is not None:
                self._give(slot, buffer, is_sure=False)
        if sum(self._total) > sum(self._most):
            self._most = self._total
            if not self._loops:
                self._fullest = line
        self._total, self._gone = self._total.less(self._gone), _NOTHING
        if line == self._capture and not self._loops:
            self._tell(line, depth, "fullest")

    def _buffer_of(
        self, node: Node, output: Tensor, given: Sequence[_Buffer | None], store: _Buffer | None, slot: str | None
    ) -> _Buffer | None:
        """Return where a result is; None if it counts elsewhere, or is a number."""
        is_read = node.op in (READ_SAVED, ELEMENT_GRADIENT)
        self._has_shrunk |= is_read and bool(node.attrs.get("is_last"))
        if output.dtype == VARIANT:
            if is_read and store is not None:
                return _Buffer(is_store=True, first=store.first, others=store.others)
            return store or _Buffer(is_store=True, has_all=node.op not in _STORES, is_empty=node.op in _STORES)
        if node.op.traits.memory in (Memory.VIEW, Memory.WHOLE_VIEW) or node.op in _MOSTLY_VIEWS:
            return given[0]
        if output.shape == () or node.op in _ELSEWHERE or (store is not None and store.has_all):
            return None
        if slot is not None and (found := self._names.get(slot)) is not None:
            return found
        buffer = _new_buffer(output.spec)
        if buffer.spec is not None and node.op is CONCAT:  # else the estimate would be no larger than one part
            parts = [_NOTHING if each is None else each.nbytes for each in given]
            buffer.nbytes = _Bytes(open=max(buffer.nbytes.open, sum(map(sum, parts))))
        made = tensor_array.array_node(node.inputs[0]) if node.op is tensor_array.STACK else None
        if is_read:
            if store is None or store.others != "own" or not node.attrs.get("is_last"):
                return None
            store.nbytes = store.nbytes.less(buffer.nbytes)  # the store gives up the same memory
        elif made is None or made.attrs["dynamic_size"]:
            # A copy of the elements, which the array then drops.
            self._grow(buffer.nbytes, goes=made is not None and made.attrs["clear_after_read"])
        elif not made.attrs["clear_after_read"]:  # else the result takes over the array's memory
            return None
        return buffer

    def _write(self, node: Node, store: _Buffer, given: Sequence[_Buffer | None]) -> None:
        """Put values into a store."""
        self._has_grown, store.is_empty = True, False
        if node.op in SAVES:
            value, is_number = given[2], node.inputs[2].shape == () and node.inputs[2].dtype != VARIANT
            if value is None or is_number:
                store.saves("elsewhere")
                return
            if value.is_store:
                store.of_stores, store.first, store.others = True, value.first, value.others
            else:
                is_part = sum(value.nbytes) != sum(_new_buffer(node.inputs[2].spec).nbytes)
                store.saves("mixed" if value.is_mixed or is_part else "copy" if value.is_kept else "own")
            if not value.is_kept:
                self._keep(value)
                store.nbytes = store.nbytes.plus(value.nbytes)
        elif node.op is tensor_array.WRITE:
            made = tensor_array.array_node(node.inputs[0])
            if made is not None and made.attrs["dynamic_size"]:  # else the value is copied into the array's block
                self._keep(given[2])
        elif node.op in _KEEPING:
            for each in given:
                if each is not store:
                    self._keep(each)

    def _grow(self, nbytes: _Bytes, *, goes: bool) -> None:
        self._total = self._total.plus(nbytes)
        if goes:
            self._gone = self._gone.plus(nbytes)

    def _keep(self, buffer: _Buffer | None) -> None:
        """Leave a buffer to a store or variable, where it counts."""
        if buffer is not None and not buffer.is_kept:
            self._uncount(buffer)
            buffer.is_kept = True

    def _name(self, names: Sequence[str], sources: Sequence[str]) -> None:
        found = [(self._names.get(source), source not in self._unsure) for source in sources]
        for name, (buffer, is_sure) in zip(names, found, strict=True):
            self._give(name, buffer, is_sure=is_sure)

    def _turn(self, slot: str, variable: str) -> None:
        self._give(slot, self._names.get(variable) if self._is_second else None, is_sure=False)

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._give(name, None)

    def _give(self, name: str, buffer: _Buffer | None, *, is_sure: bool = True) -> None:
        """Give a variable a buffer, or None for an uncounted value; its old buffer may become free."""
        (self._unsure.discard if is_sure else self._unsure.add)(name)
        self._assigned.add(name)
        old = self._names.get(name)
        if old is buffer:
            return
        if buffer is not None:
            if not buffer.names and not buffer.is_kept:
                self._count(buffer)
            buffer.names[name] = None
            self._names[name] = buffer
        if old is not None:
            del old.names[name]
            if buffer is None:
                del self._names[name]
            if not old.names and not old.is_kept:
                self._uncount(old)
                self._total = self._total.less(old.nbytes)

    def _count(self, buffer: _Buffer) -> None:
        if buffer.is_store:
            self._stores[buffer] = None
        elif buffer.spec is not None:
            self._open[buffer] = None
        else:
            self._held += buffer.nbytes.closed

    def _uncount(self, buffer: _Buffer) -> None:
        """Take a buffer off, which names alone no longer hold."""
        if buffer.is_store:
            self._stores.pop(buffer, None)
        elif buffer.spec is not None:
            self._open.pop(buffer, None)
        elif buffer.names or not buffer.is_kept:
            self._held -= buffer.nbytes.closed

    def _loop(
        self,
        body: Sequence[_Happening],
        variables: frozenset[str],
        counter: str,
        start: int,
        end: int,
        depth: int,
    ) -> None:
        most, was_second = self._most, self._is_second
        has_grown, has_shrunk, self._has_grown, self._has_shrunk = self._has_grown, self._has_shrunk, False, False
        outside, self._assigned = self._assigned, set()
        at_start = self._told(start, depth, _NOTHING)
        began = fullest = self._total
        self._loops += 1
        for self._is_second in (False, True):
            if self._loops == 1:
                self._counter, self._end, self._is_later = counter, end - 1, self._is_second
            self._most = self._total
            self._play(body)
            fullest = max(fullest, self._most, key=sum)
            self._unsure |= self._assigned - variables
        self._loops -= 1
        if self._has_shrunk:  # saved values are dropped, so the first iterations hold most
            self._found[start, "start"] = at_start._replace(ahead=self._ahead(fullest.less(began)))
        if self._has_grown or not self._loops:
            self._tell(end, depth, "end")
        self._has_grown |= has_grown
        self._has_shrunk |= has_shrunk
        self._is_second = was_second
        self._assigned |= outside
        self._most = max(most, self._most, key=sum)

    def _branch(self, branch: Sequence[_Happening], outputs: frozenset[str]) -> None:
        other = {name: self._names.get(name) for name in outputs}
        self._unsure |= outputs  # names that only the other branch has bound
        outside, self._assigned = self._assigned, set()
        self._play(branch)
        self._drop(self._assigned - outputs)
        self._assigned |= outside
        for name, buffer in other.items():
            made = self._names.get(name)
            if made is None and buffer is not None:  # made by the other branch only
                self._give(name, buffer)
            if made is not buffer and (made is None or buffer is None or buffer.names):
                for each in (made, buffer):
                    if each is not None:
                        each.is_mixed = True

    def _tell(self, line: int, depth: int, why: str) -> None:
        # Outside loops, the peak is told at the fullest line, not at stops.
        ahead = _NOTHING if why == "stop" and not self._loops else self._most.less(self._total)
        how = "pause" if why == "stop" else "tell_often" if self._loops else "tell"
        told = self._told(line, depth, ahead)._replace(how=how)
        if self._loops and not self._is_later:
            self._early[line, why] = told
        elif self._loops:
            # At its end line, the counter already includes the iteration.
            is_later = f"{self._counter} > 1" if line == self._end else self._counter
            told = told.after(self._early[line, why], is_later)
        self._found[line, why] = told

    def _told(self, line: int, depth: int, ahead: _Bytes) -> HeldPlace:
        held = [str(round(self._held))] if self._held >= 1 else []
        held.extend(f"{name}.nbytes" for name in map(self._sure_name, self._open) if name)
        stores: dict[str, list[str]] = {}
        for each in self._stores:
            if each.group and (name := self._sure_name(each)):
                stores.setdefault(each.group, []).append(name)
        return HeldPlace(line, depth, " + ".join(held) or "0", self._ahead(ahead), stores)

    def _ahead(self, ahead: _Bytes) -> str:
        """Return an expression; values of open shapes keep the assumed ratio to a value that is alive."""
        text = str(max(0, round(ahead.closed)))
        if ahead.open < 1:
            return text
        there = {name: buffer.spec for buffer in self._open if buffer.spec and (name := self._sure_name(buffer))}
        there |= {name: spec for name, spec in self._inputs.items() if not is_static(spec.shape)}
        if not there:
            return str(max(0, round(sum(ahead))))
        name, spec = next(iter(there.items()))
        return f"{text} + int({ahead.open / spec_nbytes(spec):.6g} * {name}.nbytes)"

    def _sure_name(self, buffer: _Buffer) -> str | None:
        return next((name for name in reversed(buffer.names) if name not in self._unsure), None)


def _new_buffer(spec: Spec) -> _Buffer:
    if is_static(spec.shape):
        return _Buffer(_NOTHING if is_small_spec(spec) else _Bytes(closed=spec_nbytes(spec)))
    return _Buffer(_Bytes(open=spec_nbytes(spec)), spec)
