"""Programs whose control flow is written by hand: loops and branches of `af.raw`, and random programs made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

import numpy as np

import asyncflow as af

Tensors: TypeAlias = list[af.Tensor]


@dataclass
class Loop:
    """A loop to be written: ``with`` its variables and what every iteration sees, in a frame of its own."""

    frame: str
    window: int = 32
    marks: bool = True
    """True if its predicate stands behind a loop_cond."""
    until: bool = False
    """True if it goes on as long as the predicate does not hold."""

    def enter(self, value: Any) -> af.Tensor:
        """Return a value that is in every iteration."""
        return af.raw.enter(value, self.frame, constant=True, parallel_iterations=self.window)

    def write(
        self,
        go_on: Callable[[Tensors], af.Tensor],
        body: Callable[[Tensors], Sequence[Any]],
        initial: Sequence[Any],
        constants: Sequence[af.Tensor] = (),
    ) -> Tensors:
        """Write the loop and return its results; its body gets the variables, and `constants` as they are on its
        device.
        """
        entered = [af.raw.enter(value, self.frame, parallel_iterations=self.window) for value in initial]
        merged = [af.raw.merge(value)[0] for value in entered]
        pred = af.logical_not(go_on(merged)) if self.until else go_on(merged)
        if self.marks:
            pred = af.raw.loop_cond(pred)
        sides = [af.raw.switch(value, pred) for value in (*merged, *constants)]
        left, stays = ([pair[side != self.until] for pair in sides] for side in (False, True))
        for value, following in zip(merged, body(stays), strict=True):
            af.raw.add_back_edge(value, af.raw.next_iteration(following))
        return [af.raw.exit(value) for value in left[: len(merged)]]


def branch(
    pred: af.Tensor,
    then: Callable[[Tensors], Tensors],
    otherwise: Callable[[Tensors], Tensors],
    values: Sequence[af.Tensor],
) -> Tensors:
    """The results of the branch that is taken, each given its side of `values`."""
    sides = [af.raw.switch(value, pred) for value in values]
    taken = then([true_side for _, true_side in sides])
    other = otherwise([false_side for false_side, _ in sides])
    return [af.raw.merge(*pair)[0] for pair in zip(taken, other, strict=True)]


# -- random programs -------------------------------------------------------------------------------------------------

Statement: TypeAlias = tuple[Any, ...]

OPERATIONS = ("add", "subtract", "minimum", "maximum")
NUMBERS = 4
"""0, 1, 2 and 3, which loops count with: constants are not there in frames."""


@dataclass(frozen=True)
class Program:
    """Statements over a few vectors of integers."""

    values: list[Any]
    statements: list[Statement]

    def numbers(self) -> list[Any]:
        """Return NumPy's results."""
        state = list(self.values)
        _interpret(self.statements, state)
        return state


def random_program(random: Random, *, n_values: int = 4, depth: int = 3) -> Program:
    """A program; no two of it are alike."""
    values = [np.array([random.randrange(-9, 9) for _ in range(2)]) for _ in range(n_values)]
    return Program(values, _statements(random, n_values, depth))


def _statements(random: Random, n_values: int, depth: int) -> list[Statement]:
    made: list[Statement] = []
    for _ in range(random.randint(1, 3)):
        a, b, c = (random.randrange(n_values) for _ in range(3))
        kind = random.randrange(4) if depth else 0
        if kind < 2:
            made.append(("operation", random.choice(OPERATIONS), a, b, c))
        elif kind == 2:
            style = random.randrange(4)
            made.append(("branch", a, b, *(_statements(random, n_values, depth - 1) for _ in range(2)), style))
        else:
            inside = _statements(random, n_values, depth - 1)
            made.append(("loop", random.randrange(NUMBERS), inside, random.choice((1, 2, 32)), random.randrange(6)))
    return made


def _interpret(statements: Sequence[Statement], state: list[Any]) -> None:
    for kind, *rest in statements:
        if kind == "operation":
            name, target, a, b = rest
            state[target] = getattr(np, name)(state[a], state[b])
        elif kind == "branch":
            a, b, then, otherwise, _ = rest
            _interpret(then if state[a].sum() < state[b].sum() else otherwise, state)
        else:
            for _ in range(rest[0]):
                _interpret(rest[1], state)


@dataclass
class Writer:
    """Writes a program down by hand, in the current graph.

    Attributes:
        state: the vectors as they are now, in the frame and branch that is being written.
        numbers: `NUMBERS` there.
    """

    state: Tensors
    numbers: Tensors
    frames: list[str] = field(default_factory=list)

    def write(self, statements: Sequence[Statement]) -> None:
        for kind, *rest in statements:
            getattr(self, f"_write_{kind}")(*rest)

    def _write_operation(self, name: str, target: int, a: int, b: int) -> None:
        self.state[target] = getattr(af, name)(self.state[a], self.state[b])

    def _inside(self, values: Tensors, statements: Sequence[Statement]) -> Writer:
        n_values = len(self.state)
        writer = Writer(values[:n_values], values[n_values:], self.frames)
        writer.write(statements)
        return writer

    def _write_branch(self, a: int, b: int, then: list[Statement], otherwise: list[Statement], style: int) -> None:
        pred = af.sum(self.state[a]) < af.sum(self.state[b])
        if style == 0:
            values = [*self.state, *self.numbers]
            self.state = af.cond(
                pred, lambda: self._inside(values, then).state, lambda: self._inside(values, otherwise).state
            )
            return
        results = branch(
            pred,
            lambda values: self._inside(values, then).state,
            lambda values: self._inside(values, otherwise).state,
            [*self.state, *self.numbers],
        )
        self.state = results

    def _write_loop(self, trips: int, statements: list[Statement], window: int, style: int) -> None:
        if style > 3:
            self._write_structured(trips, statements, window)
            return
        loop = Loop(f"frame_{len(self.frames)}", window, marks=style % 2 == 0, until=style > 1)
        self.frames.append(loop.frame)
        numbers = [loop.enter(number) for number in self.numbers]
        changed = sorted(_changed(statements))
        kept = {place: loop.enter(self.state[place]) for place in range(len(self.state)) if place not in changed}

        def body(variables: Tensors) -> Tensors:
            places = [*changed, *kept]
            inside = dict(zip(places, variables[1:], strict=False))
            gated = variables[1 + len(places) :]
            done = self._inside([*(inside[place] for place in range(len(self.state))), *gated], statements)
            return [variables[0] + gated[1], *(done.state[place] for place in changed)]

        initial = [self.numbers[0], *(self.state[place] for place in changed)]
        constants = [*kept.values(), *numbers]
        _, *left = loop.write(lambda variables: variables[0] < numbers[trips], body, initial, constants)
        for place, value in zip(changed, left, strict=True):
            self.state[place] = value

    def _write_structured(self, trips: int, statements: list[Statement], window: int) -> None:
        numbers = self.numbers

        def body(i: af.Tensor, *variables: af.Tensor) -> Tensors:
            return [i + numbers[1], *self._inside([*variables, *numbers], statements).state]

        initial = (numbers[0], *self.state)
        _, *self.state = af.while_loop(lambda i, *_: i < numbers[trips], body, initial, parallel_iterations=window)


def _changed(statements: Sequence[Statement]) -> set[int]:
    """The vectors that statements change."""
    found: set[int] = set()
    for kind, *rest in statements:
        if kind == "operation":
            found.add(rest[1])
        else:
            for part in rest:
                found |= _changed(part) if isinstance(part, list) else set()
    return found


def write(program: Program) -> tuple[Tensors, dict[af.Tensor, Any]]:
    """Write the program into the current graph; return its results and its feeds."""
    feeds = {af.placeholder("int64", (2,)): value for value in program.values}
    writer = Writer(list(feeds), [af.constant(number) for number in range(NUMBERS)])
    writer.write(program.statements)
    return [value * 1 for value in writer.state], feeds
