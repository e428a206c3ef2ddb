"""Chains: elementwise ops that feed one another, also through views, as one kernel computes them.

A chain knows nothing of kernels. `asyncflow.compiler.program.kernels.kernel_text` writes their text, and `fused` is the
op that runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from asyncflow.graph.ir import Attrs
from asyncflow.graph.op import Memory, Op
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.manipulation import CONCAT
from asyncflow.ops.axes import normalize_axes
from asyncflow.ops.layers.nn import LOG_SOFTMAX, SOFTMAX
from asyncflow.ops.reductions.statistical import MAX, MEAN, MIN, SUM

Lengths: TypeAlias = tuple[int, ...]
"""A shape of which all is known."""


REDUCTIONS = frozenset({SUM, MEAN, MAX, MIN})
"""The reductions that a chain may end with."""

SCALINGS = frozenset({SOFTMAX, LOG_SOFTMAX})
"""Ops that a chain may end with, and whose every element takes the whole row."""

ENDS_OF_ROWS = REDUCTIONS | SCALINGS


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """An op of a chain.

    Attributes:
        op: which.
        attrs: its node's.
        operands: numbers of the values it takes; see `Chain`.
        spec: of its output.
        name: its node's, for people.
    """

    op: Op
    attrs: Attrs
    operands: tuple[int, ...]
    spec: Spec
    name: str

    @property
    def is_view(self) -> bool:
        """True if it looks at its operand otherwise, and computes nothing."""
        return not callable(self.op.cuda) and self.op.traits.memory in (Memory.VIEW, Memory.WHOLE_VIEW)

    @property
    def joins(self) -> bool:
        """True if it puts its operands beside one another."""
        return self.op is CONCAT

    @property
    def scales(self) -> bool:
        """True if each element of its output takes a whole row of its operand."""
        return self.op in SCALINGS

    @property
    def reduces(self) -> bool:
        """True if it makes one element of each row of its operand, or scales the row."""
        return self.op in ENDS_OF_ROWS

    @property
    def ends(self) -> bool:
        """True if no member can use its output: a kernel has no element of it before it has computed others."""
        return self.joins or self.reduces


@dataclass(frozen=True, slots=True)
class Read:
    """A value that a kernel loads: an input, as views of the chain look at it.

    Attributes:
        source: number of the input.
        steps: numbers of the members through whose operands the input is looked at, from it on: a view, or an
            elementwise op, to whose shape its operands are broadcast.
    """

    source: int
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """A value that a kernel stores.

    Attributes:
        value: its number.
        output: the place among the chain's outputs of the array to write to.
        piece: the place of the value among the operands of the member that joins them into that output.
    """

    value: int
    output: int
    piece: int = 0


@dataclass(frozen=True, eq=False)
class Chain:
    """Elementwise ops that feed one another. Values are numbered: first the inputs, then each member's output.

    Attributes:
        inputs: specs of the inputs from outside.
        members: in an order in which they can run.
        outputs: numbers of the values used outside, all of them members' outputs. Members that join or reduce their
            operands are the last, and all among the outputs; the reductions are over equally many last axes.
    """

    inputs: tuple[Spec, ...]
    members: tuple[Member, ...]
    outputs: tuple[int, ...]

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Specs of all values."""
        return (*self.inputs, *(member.spec for member in self.members))

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each output, the inputs it depends on, which determine its shape."""
        found: list[frozenset[int]] = [frozenset((index,)) for index in range(len(self.inputs))]
        for member in self.members:
            found.append(frozenset().union(*(found[operand] for operand in member.operands)))
        return tuple(tuple(sorted(found[output])) for output in self.outputs)

    @cached_property
    def has_views(self) -> bool:
        """True if a member is a view."""
        return any(member.is_view for member in self.members)

    @cached_property
    def stores(self) -> tuple[Stored, ...]:
        """The values to store, in the order of the outputs."""
        found: list[Stored] = []
        for index, output in enumerate(self.outputs):
            member = self.member(output)
            pieces = () if member.reduces else member.operands if member.joins else (output,)
            found += [Stored(value, index, piece) for piece, value in enumerate(pieces)]
        return tuple(found)

    @cached_property
    def reduced(self) -> tuple[Stored, ...]:
        """The values that are reduced, in the order of the outputs."""
        members = [(index, self.member(output)) for index, output in enumerate(self.outputs)]
        return tuple([Stored(member.operands[0], index) for index, member in members if member.reduces])

    @cached_property
    def n_reduced(self) -> int:
        """Number of last axes that the reductions are over; 0 without any."""
        if not self.reduced:
            return 0
        value, output = self.reduced[0].value, self.outputs[self.reduced[0].output]
        return len(normalize_axes(self.member(output).attrs["axis"], len(self.specs[value].shape or ())))

    @cached_property
    def has_ends(self) -> bool:
        """True if a member joins or reduces its operands."""
        return any(member.ends for member in self.members)

    def joined(self, output: int) -> Member | None:
        """The member that joins its operands into this output; None if no member does."""
        member = self.member(self.outputs[output])
        return member if member.joins else None

    def member(self, number: int) -> Member:
        """The member whose output is this value."""
        return self.members[number - len(self.inputs)]

    def __repr__(self) -> str:
        return f"Chain({', '.join(member.op.name for member in self.members)})"
