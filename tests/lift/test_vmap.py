"""`vmap`: axes, nesting, gradients outside and inside, and common mistakes of newcomers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af

RNG = np.random.default_rng(5)
A, B = RNG.normal(size=(4, 3)), RNG.normal(size=(3, 4, 2))


async def _value(build: Any) -> Any:
    with af.Graph() as graph:
        built = build()
    async with af.Session(graph) as session:
        return await session.run(built)


@pytest.mark.parametrize(
    ("in_axes", "out_axes", "expected"),
    [
        ((0, 1), 0, np.einsum("ni,inj->nj", A, B)),
        ((0, -2), 1, np.einsum("ni,inj->jn", A, B)),
        ([1, 0], 0, np.einsum("ik,kij->kj", A, B)),
    ],
)
async def test_rows_stand_along_any_axis(in_axes: Any, out_axes: int, expected: Any) -> None:
    found = await _value(lambda: af.vmap(lambda a, b: a @ b, in_axes, out_axes)(af.constant(A), af.constant(B)))
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("rows", [3, 0])
async def test_products_over_an_extent_of_0_are_zeros(rows: int, known: bool) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float64", (rows, 2, 0) if known else (None, None, None))
        y = af.vmap(lambda row: row @ af.ones((0, 4)))(x)
        fetches = [y, af.gradients(y, x)]
    async with af.Session(graph) as session:
        product, slope = await session.run(fetches, {x: np.zeros((rows, 2, 0))})
    np.testing.assert_array_equal(product, np.zeros((rows, 2, 4)))
    assert slope.shape == (rows, 2, 0)


async def test_numbers_of_rows_that_differ_in_the_run_are_told() -> None:
    with af.Graph() as graph:
        x, y = af.placeholder("float64", (None, 2)), af.placeholder("float64", (None, 2))
        total = af.vmap(lambda a, b: a + b)(x, y)
    async with af.Session(graph) as session:
        with pytest.raises(
            af.KernelError, match=r"size 3; got 4 rows: .* vmap .* go over values of one number of rows"
        ):
            await session.run(total, {x: np.ones((3, 2)), y: np.ones((4, 2))})


async def test_axes_of_nests_and_values_that_are_the_same_for_all() -> None:
    def fn(given: Any, scale: Any) -> Any:
        return {"sum": af.sum(given["a"]) * scale, "both": given["a"] + given["c"]}

    found = await _value(
        lambda: af.vmap(fn, in_axes=({"a": 0, "c": None}, None), out_axes={"sum": 0, "both": 1})(
            {"a": af.constant(A), "c": af.constant(A[0])}, 2.0
        )
    )
    np.testing.assert_allclose(found["sum"], A.sum(1) * 2)
    np.testing.assert_allclose(found["both"], (A + A[0]).T)


async def test_it_nests_three_deep_with_closures() -> None:
    def build() -> Any:
        a, w = af.constant(A), af.constant(A[0])

        def outer(x: Any) -> Any:
            def middle(y: Any) -> Any:
                return af.vmap(lambda z: af.sin(x * y) * z + af.sum(w * x))(w)

            return af.vmap(middle)(a[0])

        return af.vmap(outer)(af.constant(A[:, 0]))

    x, y, z = np.meshgrid(A[:, 0], A[0], A[0], indexing="ij")
    np.testing.assert_allclose(await _value(build), np.sin(x * y) * z + A[0].sum() * x)


async def test_gradients_go_through_it_and_stand_in_it() -> None:
    def build() -> Any:
        a, w = af.constant(A), af.constant(RNG.normal(size=3))

        def loss(row: Any) -> Any:
            return af.cond(row[0] > 0.0, lambda: af.sum(af.tanh(row * w)), lambda: af.sum(row * row * w))

        per_row = af.vmap(lambda row: af.gradients(loss(row), [row, w]))(a)
        whole = af.gradients(af.sum(af.vmap(loss)(a)), [a, w])
        second = af.gradients(af.sum(per_row[0] ** 2), [a])[0]
        looped = af.map_fn(lambda row: af.gradients(loss(row), [row, w]), a, lift=False)
        return per_row, whole, second, af.gradients(af.sum(looped[0] ** 2), [a])[0]

    (by_row, by_w), (whole_rows, whole_w), second, looped = await _value(build)
    np.testing.assert_allclose(by_row, whole_rows)
    np.testing.assert_allclose(by_w.sum(0), whole_w)
    np.testing.assert_allclose(second, looped)


@pytest.mark.parametrize(
    ("fn", "in_axes", "message"),
    [
        (lambda a, b: a, (0, None, 0), "does not fit"),
        (lambda a, b: a, None, "no argument has rows; in_axes is None for all of them"),
        (lambda a, b: a, 0, "needs one number of rows; .* has 4, .* has 3"),
        (lambda a, b: a, (0, "x"), "must be an int known while the graph is built"),
        (lambda a: a, (0, None), "fn of vmap"),
    ],
)
def test_what_does_not_fit_is_said(fn: Any, in_axes: Any, message: str) -> None:
    with af.Graph(), pytest.raises(af.GraphError, match=message):
        af.vmap(fn, in_axes)(af.constant(A), af.constant(B))


def test_a_rank_that_is_not_known_is_said() -> None:
    with af.Graph(), pytest.raises(af.ShapeError, match=r"vmap needs to know the rank .* argument\[0\], .* is unknown"):
        af.vmap(lambda row: row)(af.placeholder("float32"))


def test_a_wrong_function_is_refused_before_it_is_called() -> None:
    with pytest.raises(af.GraphError, match="vmap: fn is a function of rows; got 3"):
        af.vmap(3)  # type: ignore[arg-type]


async def test_axes_in_a_dict_go_by_key() -> None:
    def build() -> Any:
        rows = {"a": af.constant(A[:3]), "b": af.constant(A[:3])}
        either: list[Any] = [{"a": 0, "b": 1}, {"b": 1, "a": 0}]
        return [af.vmap(lambda row: row, (axes,), {"b": 0, "a": 1})(rows) for axes in either]

    for found in await _value(build):
        np.testing.assert_array_equal(found["a"], A[:3].T)
        np.testing.assert_array_equal(found["b"], A[:3].T)


def test_axes_of_other_keys_are_refused() -> None:
    with af.Graph(), pytest.raises(af.GraphError, match=r"in_axes=\{'b': 0\} does not fit a dict with keys 'a'"):
        af.vmap(lambda row: row, [{"b": 0}])({"a": af.constant(A)})


def test_arrays_and_stores_have_no_rows() -> None:
    array = lambda row: af.TensorArray("float64", 1).write(0, row)  # noqa: E731
    with af.Graph():
        with pytest.raises(af.DTypeError, match=r"result.* of vmap is a TensorArray or RowStore.*what stack\(\) gives"):
            af.vmap(array)(af.constant(A))
        for given in (af.TensorArray("float64", 1), af.RowStore("float64"), 1.0):
            with pytest.raises(af.ShapeError, match=r"argument\[0\].* has no axis 0 for rows.*say None for it"):
                af.vmap(lambda row: row)(given)


def test_lift_is_one_of_three() -> None:
    with af.Graph(), pytest.raises(af.GraphError, match="lift is \"auto\", True or False; got 'never'"):
        af.map_fn(lambda row: row, af.constant(A), lift="never")  # type: ignore[arg-type]


def test_what_cannot_be_computed_for_rows_is_named_with_its_line() -> None:
    with af.Graph():
        counted = af.Variable(0.0, name="counted")
        with pytest.raises(af.GraphError, match=r"vmap: .*test_vmap.py:\d+.*; af.map_fn makes a loop over rows of it"):
            af.vmap(lambda row: counted.assign_add(af.sum(row)))(af.constant(A))
        with pytest.raises(af.GraphError, match=r"nonzero.* its result is known only in the run, for each row"):
            af.vmap(lambda row: af.sum(af.nonzero(row > 0.0)[0]))(af.constant(A))


@pytest.mark.parametrize("elements", [0, 3])
async def test_a_branch_of_no_rows_gives_rows_of_its_shape(elements: int) -> None:
    """The shape of a row may be known before the run or not."""
    with af.Graph() as graph:
        x = af.placeholder("float64", (None, None))
        same = af.vmap(lambda row: af.cond(af.sum(row) > 0.0, lambda: row, lambda: -row))(x)
    async with af.Session(graph) as session:
        assert (await session.run(same, {x: np.zeros((0, elements))})).shape == (0, elements)


async def test_what_rows_cannot_share_is_a_loop() -> None:
    """Strings that go different ways, and values that grow by as much as each row says."""

    def growing(row: Any) -> Any:
        step = lambda i, x: (i + 1, af.concat([x, x[:1]]))  # noqa: E731
        return af.sum(af.while_loop(lambda i, x: i < row, step, (0, af.ones(1)), shape_invariants=((), (None,)))[1])

    def build() -> Any:
        words = af.constant([["a", "b"], ["c", "c"]])
        parted = af.map_fn(lambda row: af.cond(row[0] == row[1], lambda: row[0], lambda: row[1]), words)
        return parted, af.map_fn(growing, af.constant([3, 0, 1]))

    words, sums = await _value(build)
    assert words.tolist() == ["b", "c"]
    assert sums.tolist() == [4.0, 1.0, 2.0]


async def test_rows_of_branches_are_not_broadcast() -> None:
    with af.Graph() as graph:
        x, n = af.placeholder("float64", (None, None)), af.placeholder("int64", ())
        body = lambda row: af.sum(af.cond(row[0] > 0.0, lambda: row, lambda: row[:n]))  # noqa: E731
        y, looped = af.map_fn(body, x, lift=True), af.map_fn(body, x)
    async with af.Session(graph) as session:
        assert (await session.run(looped, {x: [[1.0, 2.0], [-3.0, 1.0]], n: 1})).tolist() == [3.0, -3.0]
        with pytest.raises(af.KernelError, match=r"one shape, .* of shape \[2\] and \[1\]; map_fn\(lift=False\)"):
            await session.run(y, {x: [[1.0, 2.0], [-3.0, 1.0]], n: 1})


async def test_an_array_without_rows_is_made_once() -> None:
    """The array has rows only where rows are written to it, in loops and branches too; else each row reads an
    element.
    """

    def elements(x: Any) -> Any:
        return af.TensorArray("float64", size=3, clear_after_read=False).unstack(x)

    def written(x: Any, row: Any) -> Any:
        a = af.TensorArray("float64", size=3, clear_after_read=False).write(2, x[2])
        return af.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, a.write(i, row * 2.0)), (0, a))[1]

    def inside(x: Any, row: Any) -> Any:
        a = af.TensorArray("float64", size=1)  # which the loop captures, and writes to a copy of
        return af.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v + a.write(0, row).read(0)), (0, x[0]))[1]

    def some(x: Any, row: Any) -> Any:
        a = af.TensorArray("float64", size=1)
        return af.cond(row > 1.0, lambda: a.write(0, 5.0), lambda: a.write(0, 6.0)).read(0)

    with af.Graph() as graph:
        x, at = af.placeholder("float64", (3,)), af.placeholder("int64", (4,))
        fetches = [
            af.vmap(lambda place: elements(x * 2.0).read(place))(at),
            af.vmap(lambda row: written(x, row).stack())(x),
            af.vmap(lambda row: inside(x, row))(x),
        ]
        with pytest.raises(af.GraphError, match="TensorArray go different ways"):
            af.vmap(lambda row: some(x, row))(x)
    async with af.Session(graph) as session:
        own, rows, looped = await session.run(fetches, {x: [1.0, 2.0, 3.0], at: [2, 0, 1, 2]})
    assert [*own] == [6.0, 2.0, 4.0, 6.0]
    assert rows.tolist() == [[2.0, 2.0, 3.0], [4.0, 4.0, 3.0], [6.0, 6.0, 3.0]]
    assert [*looped] == [3.0, 5.0, 7.0]


@pytest.mark.parametrize("open_", [False, True])
async def test_rows_read_arrays_at_places_of_their_own(open_: bool) -> None:
    """Each row reads an element once, although others come to it later; gradients equal the gradients of indexing."""
    x, k, rows = np.arange(20.0).reshape(4, 5), np.array([1, 4, 1, 0]), np.arange(4)

    def row(values: Any, place: Any) -> Any:
        array = af.TensorArray("float64", 5, element_shape=()).unstack(values * values)
        pair = array.gather(af.stack([(place + 2) % 5, (place + 3) % 5]))
        first = array.read(place)
        last = af.while_loop(
            lambda i, _: i < 2, lambda i, s: (i + 1, s + array.read((place + 1 - 2 * i) % 5)), (0, 0.0)
        )[1]
        return first, pair, last

    with af.Graph() as graph:
        values = af.placeholder("float64", (None, 5) if open_ else (4, 5))
        places = af.placeholder("int64", (None,) if open_ else (4,))
        found = af.vmap(row)(values, places)
        (gradient,) = af.gradients(af.sum(found[0]) + af.sum(found[1] * [2.0, 3.0]) + 4 * af.sum(found[2]), [values])
        one_by_one = af.map_fn(lambda pair: row(*pair), (values, places), lift=False)
    async with af.Session(graph) as session:
        fed = {values: x, places: k}
        for result in await session.run([found, one_by_one], fed):
            np.testing.assert_array_equal(result[0], x[rows, k] ** 2)
            np.testing.assert_array_equal(result[1], np.stack([x[rows, (k + 2) % 5], x[rows, (k + 3) % 5]], 1) ** 2)
            np.testing.assert_array_equal(result[2], x[rows, (k + 1) % 5] ** 2 + x[rows, (k - 1) % 5] ** 2)
        weights = np.zeros((4, 5))
        for step, weight in ((0, 1), (2, 2), (3, 3), (1, 4), (-1, 4)):
            weights[rows, (k + step) % 5] += weight
        np.testing.assert_allclose(await session.run(gradient, fed), 2 * x * weights)
        with pytest.raises(af.KernelError, match="cannot read element 7 of a TensorArray of size 5"):
            await session.run(found[0], {values: x, places: k + 3})
