from __future__ import annotations

from functools import partial
from random import Random
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncflow.graph.op import KernelContext, find_op
from asyncflow.ops import draws
from asyncflow.ops.draws import Drawing, RowContexts

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]

F8 = np.dtype("f8")


@pytest.mark.parametrize("layout", ["=i44x6Q", "=i52x5Q8x", "=i4x6Q200x"])
def test_a_start_in_place_is_that_of_a_fresh_generator(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where NumPy's generator lies otherwise in memory than we know it, its own way is taken."""
    monkeypatch.setattr(draws, "_STATE", Struct(layout))
    monkeypatch.setattr(draws, "_idle", [])
    made = draws._Restarted()
    assert isinstance(made.restart, partial) == (layout == "=i44x6Q"), np.__version__
    chance = Random(layout)
    for _ in range(100):
        words = np.array([chance.choice((0, 1, 2**64 - 1, chance.randrange(2**64))) for _ in range(6)], np.uint64)
        made.restart(*words.tolist())
        fresh = np.random.Generator(np.random.Philox(key=words[:2], counter=words[2:]))
        assert made.rng.integers(2**20, dtype=np.int32) == fresh.integers(2**20, dtype=np.int32)
        assert made.rng.random(5).tolist() == fresh.random(5).tolist()
        assert made.bits.state["has_uint32"] == fresh.bit_generator.state["has_uint32"]


KERNELS: dict[str, tuple[dict[str, Any], Callable[[np.random.Generator], list[Any]]]] = {
    "random_normal": ({"shape": (2, 3), "dtype": np.dtype("f4")}, lambda rng: []),
    "random_uniform": ({"shape": (), "dtype": np.dtype("f2")}, lambda rng: []),
    "random_truncated_normal": ({"shape": (5,), "dtype": F8}, lambda rng: []),
    "random_bernoulli": ({}, lambda rng: [rng.random((4,))]),
    "random_categorical": ({"axis": -1}, lambda rng: [rng.normal(size=(3, 5))]),
    "random_integers": ({"shape": (3,), "dtype": np.dtype("i4")}, lambda rng: [np.array(-3), rng.integers(1, 9)]),
    "random_gamma": ({"shape": (4,), "dtype": F8}, lambda rng: [rng.random((4,)) + 1]),
    "random_poisson": ({"shape": (), "dtype": np.dtype("i8")}, lambda rng: [rng.random()]),
    "random_choice": ({"shape": (2,), "replace": True, "weighted": False}, lambda rng: [rng.normal(size=(6, 2))]),
    "random_permutation": ({"axis": 0}, lambda rng: [rng.normal(size=(6, 2))]),
}


def kernel_of(name: str, **attrs: Any) -> Drawing[Any]:
    make = find_op(name).kernel
    assert make is not None
    found = make(np, seed=2**63 + 5, **attrs)
    assert isinstance(found, Drawing)
    return found


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_rows_draw_what_their_firings_do(name: str, depth: int) -> None:
    """To the bit, and whoever is beside them; each with a seed, a run, a tag and inputs of its own."""
    attrs, make = KERNELS[name]
    rng, draw = np.random.default_rng(depth), kernel_of(name, **attrs)
    seeds, runs, tags = rng.integers(-9, 9, 5), rng.integers(0, 2**40, 5), rng.integers(0, 99, (5, depth))
    rows = [make(rng) for _ in range(5)]
    single = [
        draw(KernelContext(int(seeds[k]), int(runs[k]), tuple(tags[k].tolist())), *map(np.asarray, rows[k]))
        for k in range(5)
    ]
    for some in ([0, 1, 2, 3, 4], [3, 1], [2]):
        inputs = [np.stack([rows[k][place] for k in some]) for place in range(len(rows[0]))]
        contexts = RowContexts(seeds[some], runs[some], tags[some])
        found = draw.of_rows(lambda told=contexts: told, inputs, [True] * len(inputs))  # type: ignore[misc]
        assert found is not None
        for each, k in zip(found, some, strict=True):
            assert np.asarray(each).dtype == np.asarray(single[k]).dtype
            assert np.array_equal(each, single[k])


@pytest.mark.parametrize("name", ["random_bernoulli", "random_categorical", "random_gamma"])
def test_inputs_may_be_the_same_for_all_rows(name: str) -> None:
    attrs, make = KERNELS[name]
    draw, inputs = kernel_of(name, **attrs), make(np.random.default_rng(1))
    found = draw.of_rows(lambda: RowContexts(7, 3, np.arange(4)[:, None]), inputs, [False])
    assert found is not None
    for k, each in enumerate(found):
        assert np.array_equal(each, draw(KernelContext(7, 3, (k,)), *inputs))


def test_sizes_of_each_row_are_drawn_row_by_row() -> None:
    draw = kernel_of("random_normal", shape=(None,), dtype=F8)
    found = draw.of_rows(lambda: RowContexts(1, 1, np.arange(2)[:, None]), [np.array([2, 3])], [True])
    assert isinstance(found, list)
    assert [np.asarray(each).shape for each in found] == [(2,), (3,)]


def test_categories_of_any_axis_and_their_errors() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 5, 2))
    first, last = (kernel_of("random_categorical", axis=axis) for axis in (0, -2))
    contexts = RowContexts(1, 2, np.arange(3)[:, None])
    for k in range(3):
        for draw in (first, last):
            found: Any = draw.of_rows(lambda: contexts, [logits], [True])
            assert np.array_equal(found[k], draw(KernelContext(1, 2, (k,)), logits[k]))
    logits[1, :, 0] = np.nan
    with pytest.raises(ValueError, match="the largest logit along the axis is finite; got nan"):
        first.of_rows(lambda: contexts, [logits], [True])


def test_noise_of_a_zero_is_finite() -> None:
    """A category that is never drawn is not, whatever number comes."""
    zeros = lambda rng, out: out.fill(0.0)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncflow.ops.random.random._uniforms", lambda rng, out: (zeros(rng, out), out)[1])
        draw = kernel_of("random_categorical", axis=-1)
        assert draw(KernelContext(1, 1, ()), np.array([-np.inf, 0.0, -np.inf])) == 1
