"""Behaviour 24: `case` and `switch_case`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from tests.conformance.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    Run = Callable[..., Coroutine[Any, Any, Any]]

    Pair = tuple[af.Tensor, Callable[[], af.Tensor]]


class Arms:
    """Branches that give ``10 * position + x`` and note that they ran."""

    def __init__(self, count: int, x: af.Tensor) -> None:
        self.journal = Journal()
        self.built: list[int] = []
        self.branches = [self._arm(position, x) for position in range(count)]
        self.default = self._arm(count, x)

    def _arm(self, position: int, x: af.Tensor) -> Callable[[], af.Tensor]:
        def arm() -> af.Tensor:
            self.built.append(position)
            with af.control_dependencies([self.journal.note("arm", position)]):
                return x + 10 * position

        return arm

    def pairs(self, flags: af.Tensor) -> Sequence[Pair]:
        """The branches with the elements of `flags` as predicates."""
        return list(zip(af.unstack(flags), self.branches, strict=True))

    @property
    def ran(self) -> list[int]:
        """Return the arms that ran."""
        return self.journal.values("arm")


@pytest.fixture
def x(graph: af.Graph) -> af.Tensor:
    return af.placeholder("int64", (), name="x")


# -- case --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "taken"),
    [("TFF", 0), ("FTF", 1), ("FFT", 2), ("TTT", 0), ("FTT", 1), ("FFF", 3)],
)
async def test_the_first_true_predicate_wins(x: af.Tensor, run: Run, flags: str, taken: int) -> None:
    """Behaviour 24: the default if there is none; the effects of exactly one arm are visible afterwards."""
    arms, preds = Arms(3, x), af.placeholder("bool", (3,))
    picked = af.case(arms.pairs(preds), default=arms.default)
    assert arms.built == [0, 1, 2, 3]
    assert await run(picked, {x: 5, preds: np.array([flag == "T" for flag in flags])}) == 10 * taken + 5
    assert arms.ran == [taken]


@pytest.mark.parametrize(("flags", "taken"), [("TF", 0), ("FT", 1), ("FF", 2)])
async def test_an_exclusive_case(x: af.Tensor, run: Run, flags: str, taken: int) -> None:
    """Behaviour 24: at most one predicate may hold."""
    arms, preds = Arms(2, x), af.placeholder("bool", (2,))
    picked = af.case(arms.pairs(preds), default=arms.default, exclusive=True)
    assert await run(picked, {x: 5, preds: np.array([flag == "T" for flag in flags])}) == 10 * taken + 5


async def test_an_exclusive_case_with_two_true_fails(x: af.Tensor, run: Run) -> None:
    """Behaviour 24: in the run, naming both, and no arm runs."""
    arms, preds = Arms(3, x), af.placeholder("bool", (3,))
    picked = af.case(arms.pairs(preds), default=arms.default, exclusive=True)
    with pytest.raises(af.KernelError, match="predicates 0 and 2 of 3 hold") as caught:
        await run(picked, {x: 5, preds: np.array([True, False, True])})
    assert arms.ran == [] and isinstance(caught.value.__cause__, ValueError)
    assert "test_case.py" in str(caught.value)


async def test_a_case_without_default_where_no_predicate_holds_fails(x: af.Tensor, run: Run) -> None:
    """Behaviour 24: and no arm runs."""
    arms, preds = Arms(2, x), af.placeholder("bool", (2,))
    picked = af.case(arms.pairs(preds))
    with pytest.raises(af.KernelError, match="none of the 2 predicates holds"):
        await run(picked, {x: 5, preds: np.array([False, False])})
    assert arms.ran == []


@pytest.mark.parametrize("holds", [False, True])
async def test_a_case_of_one_pair(x: af.Tensor, run: Run, holds: bool) -> None:
    """Behaviour 24."""
    arms, pred = Arms(1, x), af.placeholder("bool", ())
    picked = af.case([(pred, arms.branches[0])])
    if holds:
        assert await run(picked, {x: 5, pred: True}) == 5
    else:
        with pytest.raises(af.KernelError, match="none of the 1 predicates holds"):
            await run(picked, {x: 5, pred: False})
    assert arms.ran == [0] * holds


# -- switch_case -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
async def test_an_index_picks_its_branch(x: af.Tensor, run: Run, count: int) -> None:
    """Behaviour 24: below 0 and from N on, the last one; the effects of exactly one are visible."""
    arms, index = Arms(count, x), af.placeholder("int32", ())
    picked = af.switch_case(index, arms.branches)
    assert arms.built == list(range(count))
    for value in (-(2**31), -1, *range(count), count, 2**31 - 1):
        taken = value if 0 <= value < count else count - 1
        arms.journal.entries.clear()
        assert await run(picked, {x: 5, index: value}) == 10 * taken + 5
        assert arms.ran == [taken]


async def test_an_index_out_of_range_takes_the_default(x: af.Tensor, run: Run) -> None:
    """Behaviour 24."""
    arms, index = Arms(2, x), af.placeholder("int64", ())
    picked = af.switch_case(index, arms.branches, default=arms.default)
    for value, taken in {0: 0, 1: 1, 2: 2, -1: 2, 99: 2}.items():
        assert await run(picked, {x: 5, index: value}) == 10 * taken + 5


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint64"])
async def test_an_index_of_any_integer_dtype(x: af.Tensor, run: Run, dtype: str) -> None:
    """Behaviour 24: also at the end of its range."""
    arms, index = Arms(3, x), af.placeholder(dtype, ())
    picked = af.switch_case(index, arms.branches)
    for value in (0, 1, 2, np.iinfo(dtype).max):
        assert await run(picked, {x: 0, index: np.dtype(dtype).type(value)}) == 10 * min(int(value), 2)


async def test_a_case_in_a_loop(graph: af.Graph, run: Run) -> None:
    """Behaviour 24: each iteration takes its own arm, and the arms' effects keep their order."""
    journal = Journal()

    def arm(label: str, amount: int, total: af.Tensor) -> Callable[[], af.Tensor]:
        def build() -> af.Tensor:
            with af.control_dependencies([journal.note(label)]):
                return total + amount

        return build

    def body(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        arms = [arm("A", 1, total), arm("B", 10, total), arm("C", 100, total)]
        return i + 1, af.switch_case(i % 3, arms)

    assert await run(af.while_loop(lambda i, total: i < 7, body, (0, 0))) == (7, 223)
    assert "".join(journal.entries) == "ABCABCA"


# -- both --------------------------------------------------------------------------------------------------------


async def test_arms_keep_their_nest(x: af.Tensor, run: Run) -> None:
    """Behaviour 24."""
    index = af.placeholder("int64", ())
    picked = af.switch_case(index, [lambda k=k: {"k": (x * k, [k])} for k in range(3)])  # type: ignore[misc]
    assert await run(picked, {x: 5, index: 2}) == {"k": (10, [2])}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("way", ["switch_case", "case", "cond", "loop", "inner"])
async def test_one_entry_means_what_two_mean(graph: af.Graph, run: Run, way: str, count: int) -> None:
    """Behaviour 90: effects that no result depends on run too, whether a branch returns a value, a node or nothing."""
    index, journal = af.placeholder("int64", (), name="index"), Journal()

    def choose(label: str, result: Callable[[af.Node], Any]) -> Any:
        def arm() -> Any:
            journal.note(label)
            return result(journal.note(label + "!"))

        arms: list[Callable[[], Any]] = [arm, lambda: result(journal.note("never"))][:count]
        if way == "case":
            return af.case([(index < 1, arms[0])], default=arms[1] if count > 1 else None)
        if way == "cond":  # whose predicate compilers may know
            return af.cond(True if count == 1 else index < 1, arm, lambda: result(journal.note("never")))
        if way == "loop":
            return af.while_loop(lambda i: i < index + 1, lambda i: (af.switch_case(i, arms), i + 1)[1:], (0,))
        if way == "inner":
            never = [lambda: result(journal.note("never"))] * 2
            return af.cond(index < 1, lambda: af.switch_case(index, arms), lambda: af.switch_case(index, never))
        return af.switch_case(index, arms)

    kinds: dict[str, Callable[[af.Node], Any]] = {
        "value": lambda node: index + 7,
        "nest": lambda node: [7 * index, node],
        "nothing": lambda node: None,
    }
    for label, result in kinds.items():
        chosen = choose(label, result)
        journal.entries.clear()
        found = await run(chosen, {index: 0})
        nothing = True if way == "inner" else None  # a node that is a result of a branch
        expected = (1,) if way == "loop" else {"value": 7, "nest": [0, True], "nothing": nothing}[label]
        assert found == expected
        assert journal.entries == [label, label + "!"]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda x: af.case([]), af.GraphError, "case takes at least one pair"),
        (lambda x: af.switch_case(x, []), af.GraphError, "switch_case needs at least one branch"),
        (lambda x: af.switch_case(x > 0, [lambda: x]), af.DTypeError, "index of switch_case is an integer scalar"),
        (lambda x: af.switch_case(af.stack([x, x]), [lambda: x]), af.ShapeError, "is an integer scalar"),
        (lambda x: af.case([(x, lambda: x)]), af.DTypeError, "a predicate is a boolean scalar"),
        (lambda x: af.switch_case(x, [lambda: x, lambda: x, lambda: x > 0]), af.DTypeError, "branch 2"),
        (lambda x: af.switch_case(x, [lambda: x, lambda: (x, x), lambda: x]), af.GraphError, "branches 0 and 1"),
        (lambda x: af.case([(x > 0, lambda: x)], default=lambda: {"a": x}), af.GraphError, "branches 0 and 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    x: af.Tensor, build: Callable[[af.Tensor], object], error: type[af.GraphError], message: str
) -> None:
    """Behaviour 24: while the graph is built, counting the branches."""
    with pytest.raises(error, match=message):
        build(x)
