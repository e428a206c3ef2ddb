"""Jacobians, Hessians and products with them, against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af

RNG = np.random.default_rng(3)
X, W, V = RNG.normal(size=(2, 3)), RNG.normal(size=(3, 2)), RNG.normal(size=(2, 3))


def _program(x: Any, w: Any) -> Any:
    """With a branch and a loop in it, whose gradients are loops with stores."""
    h = af.cond(af.sum(w) > -100.0, lambda: af.tanh(x @ w), lambda: x @ w)
    return af.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * h + af.sum(x)), (0, h))[1]


def _numpy(x: Any, w: Any) -> Any:
    h = y = np.tanh(x @ w)
    for _ in range(2):
        y = y * h + x.sum()
    return y


def _differences(f: Any, x: Any, step: float = 1e-5) -> Any:
    found = []
    for place in np.ndindex(x.shape):
        moved = np.zeros_like(x)
        moved[place] = step
        found.append((f(x + moved) - f(x - moved)) / (2 * step))
    return np.moveaxis(
        np.array(found).reshape(*x.shape, *np.shape(f(x))), tuple(range(x.ndim)), tuple(range(-x.ndim, 0))
    )


@pytest.mark.parametrize("known", [True, False])
async def test_jacobians_are_the_differences(known: bool) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float64", X.shape if known else (None, None))
        w = af.constant(W)
        found = af.jacobian(_program(x, w), {"x": x, "w": w})
    async with af.Session(graph) as session:
        got = await session.run(found, {x: X})
    np.testing.assert_allclose(got["x"], _differences(lambda x: _numpy(x, W), X), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(got["w"], _differences(lambda w: _numpy(X, w), W), rtol=1e-6, atol=1e-8)


async def test_hessians_and_products_with_them_are_the_differences() -> None:
    with af.Graph() as graph:
        x = af.constant(X)
        y = af.sum(af.tanh(x @ af.constant(W)) ** 3)
        whole, product = af.hessian(y, x), af.hvp(y, x, V)
        (slope,) = af.gradients([y], [x])
    async with af.Session(graph) as session:

        async def slope_at(at: Any) -> Any:
            return await session.run(slope, {x: at})

        hessian, times_v = await session.run((whole, product))
        step = 1e-5
        along = (await slope_at(X + step * V) - await slope_at(X - step * V)) / (2 * step)
    np.testing.assert_allclose(times_v, along, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(np.tensordot(hessian, V, axes=2), times_v, rtol=1e-10)
    np.testing.assert_allclose(hessian, np.transpose(hessian, (2, 3, 0, 1)), rtol=1e-10)


def _own_loop(row: Any) -> Any:
    grown = lambda y: af.tanh(y @ af.constant(W @ W.T)) * 0.2 + y + af.abs(row) + 0.5  # noqa: E731
    return af.while_loop(lambda y: af.sum(y) < 4.0, grown, (af.sin(row),))[0]


async def test_jacobians_of_loops_that_rows_leave_for_themselves() -> None:
    """Of all rows, and of each; first and second derivatives."""
    found = []
    with af.Graph() as graph:
        x = af.constant(X)
        for lift in (True, False):
            y = af.map_fn(_own_loop, x, lift=lift)
            of_row = af.map_fn(lambda row: af.jacobian(_own_loop(row), row), x, lift=lift)
            found.append((af.jacobian(y, x), af.hessian(af.sum(y * y), x), of_row))
    async with af.Session(graph) as session:
        got, want = await session.run(found)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose([got[0][row, :, row] for row in range(2)], got[2], rtol=1e-9)


async def test_jacobians_of_vertex_functions() -> None:
    @af.vertex_function(state=af.spec("float64", (3,)), children=2)
    def function(v: Any) -> None:
        state = v.pull() + v.gather(0) * 0.5 - v.gather(1) * 0.2
        v.scatter(af.cond(af.sum(state) > 0.0, lambda: _own_loop(state), lambda: state * state))

    with af.Graph() as graph:
        x = af.placeholder("float64", (4, 3))
        roots = af.vertex_map(function, af.InputGraph.from_parents([-1, 0, 0, 1]), x).roots
        with pytest.raises(af.GraphError, match=r"not known before the run: say it by af\.reshape"):
            af.jacobian(roots, x)
        of_reshaped = af.jacobian(af.reshape(roots, (1, 3)), x)
        root = roots[0]
        slopes = af.jacobian(root, x)
    at = np.concatenate([X, V])
    async with af.Session(graph) as session:
        got, reshaped = await session.run((slopes, of_reshaped), {x: at})
        np.testing.assert_array_equal(reshaped[0], got)
        for place in np.ndindex(at.shape):
            step = np.zeros_like(at)
            step[place] = 1e-5
            ahead, behind = [await session.run(root, {x: each}) for each in (at + step, at - step)]
            np.testing.assert_allclose(got[:, *place], (ahead - behind) / 2e-5, rtol=1e-5, atol=1e-7)


def test_second_derivatives_exist_of_a_scalar() -> None:
    with af.Graph():
        x = af.constant(X)
        with pytest.raises(af.ShapeError, match=r"need a scalar, not .*; af.jacobian takes any shape"):
            af.hessian(x * x, x)
        with pytest.raises(af.ShapeError, match=r"the rank of .* is not known"):
            af.jacobian(af.placeholder("float64"), x)


@pytest.mark.parametrize(
    ("v", "kind", "message"),
    [
        (V.astype("float32"), af.DTypeError, "hvp: v has the dtype of x, float64; got .* float32"),
        (V[:1], af.ShapeError, r"hvp: v has the shape of x, \[2,3\]; got .*\[1,3\]"),
    ],
)
def test_a_vector_that_is_not_like_x_is_refused(v: Any, kind: type[Exception], message: str) -> None:
    with af.Graph():
        x = af.constant(X)
        y = af.sum(x * x * x)
    with pytest.raises(kind, match=message):
        af.hvp(y, x, v)
    assert af.hvp(y, x, V.tolist()).spec == x.spec


async def test_derivatives_by_variables_cover_all_their_reads() -> None:
    w = af.Variable(X, name="w")
    with af.Graph() as graph:
        found = af.jacobian(w * w, {"w": w}), af.hessian(af.sum(w * w * w), w), af.hvp(af.sum(w * w * w), w, V)
    async with af.Session(graph) as session:
        slopes, second, product = await session.run(found)
    unit = np.eye(6).reshape(2, 3, 2, 3)
    np.testing.assert_allclose(slopes["w"], 2 * X * unit)
    np.testing.assert_allclose(second, 6 * X * unit)
    np.testing.assert_allclose(product, 6 * X * V)


def test_values_without_derivatives_are_reported() -> None:
    with af.Graph():
        x, n, z = af.constant(X), af.constant(np.arange(3)), af.constant(X * 1j)
        with pytest.raises(af.DTypeError, match=r"y is of floats, since others have no gradient; got .* int64"):
            af.jacobian(n * 2, n)
        with pytest.raises(af.DTypeError, match=r"jacobian: an x is of floats, .* int64"):
            af.jacobian(x * af.astype(n, "float64"), [x, n])
        with pytest.raises(af.DTypeError, match=r"y is of floats; differentiate the real and the imaginary part of"):
            af.jacobian(z * z, z)
        with pytest.raises(af.GraphError, match=r"jacobian: y is a tensor or a variable; got \["):
            af.jacobian([x, x], x)  # type: ignore[arg-type]
        with pytest.raises(af.GraphError, match=r"jacobian: an x is a tensor or a variable; got 3.0"):
            af.jacobian(x, 3.0)
        with pytest.raises(af.GraphError, match=r"second derivatives: x is a tensor or a variable; got \["):
            af.hessian(af.sum(x), [x])  # type: ignore[arg-type]
        with pytest.raises(af.DTypeError, match=r"hvp: the gradient by x is of floats; differentiate the real and the"):
            af.hvp(af.sum(af.real(z * z)), z, X * 1j)


# -- pieces that run again -------------------------------------------------------------------------------------------


def _repeated(count: int, body: Any, start: Any) -> Any:
    return af.while_loop(lambda i, _: i < count, lambda i, x: (i + 1, body(x)), (0, start))[1]


async def test_a_piece_runs_again_once_for_all_elements() -> None:
    """Also inside of loops over elements of arrays, and behind random draws: nothing of it is computed for each row."""
    sizes: list[int] = []

    def observed(x: Any) -> Any:
        sizes.append(np.size(x))
        return np.tanh(x)

    tanh = af.op(outputs=lambda x: x, pure=True, name="tanh", gradient=lambda xs, y, grad: grad * (1 - y * y))(observed)

    @af.recompute
    def piece(x: Any) -> Any:
        drawn = tanh(x) * af.random.uniform((32,), seed=3)
        mapped = af.map_fn(lambda row: tanh(af.reshape(row, (1,))), drawn[:2], lift=False)
        return af.concat([af.dropout(drawn, 0.5, seed=4), tanh(mapped[0])])

    with af.Graph() as graph:
        x = af.placeholder("float64", (32,))
        y = piece(x)
        slopes = af.jacobian(y, x)
    async with af.Session(graph) as session:
        await session.run([y, slopes], {x: np.linspace(-1, 1, 32)})
    assert sorted(sizes) == [1] * 6 + [32] * 2


def _until(x: Any) -> Any:
    """A loop that keeps elements of a TensorArray, and whose end depends on `x`."""
    array = af.TensorArray("float64", size=0, dynamic_size=True, element_shape=(3,))
    state = (0, x * 3.0, array)
    found = af.while_loop(
        lambda i, v, a: af.sum(v * v) > 1.0, lambda i, v, a: (i + 1, af.sin(v) * 0.7, a.write(i, v)), state
    )
    return af.sum(found[2].stack(), axis=0) * found[1]


def _drawn(row: Any) -> Any:
    return af.dropout(af.sin(row) * 1.5, 0.3, seed=5)


_sine = af.custom_gradient(lambda x: (af.sin(x), lambda grad: grad * af.cos(x)))

_PIECES = {
    "an array": lambda mark: lambda x: mark(_until)(x[0]),
    "draws of rows": lambda mark: mark(lambda x: af.map_fn(lambda row: _repeated(2, _drawn, row), x)),
    "draws of some rows": lambda mark: (
        lambda x: af.map_fn(mark(lambda row: af.cond(row[0] > 0, lambda: _drawn(row), lambda: row * 2)), x)
    ),
    "draws of rows of rows": lambda mark: af.vmap(
        af.vmap(mark(lambda a: af.cond(a > 0, lambda: a * af.random.normal((), seed=3), lambda: a * 2)))
    ),
    "draws of rows in pieces": lambda mark: mark(lambda x: af.map_fn(mark(_drawn), x)),
    "draws of a loop in pieces": lambda mark: mark(
        lambda x: _repeated(2, mark(lambda b: af.sin(b + af.random.normal(b.shape, seed=3))), x)
    ),
    "gradients of the user's": lambda mark: mark(
        lambda x: af.map_fn(
            lambda row: af.while_loop(lambda v: af.sum(v) < 2, lambda v: _sine(v) + row**2, (row,))[0], x
        )
    ),
    "draws in own loops": lambda mark: (
        lambda x: af.map_fn(
            mark(
                lambda row: af.while_loop(
                    lambda v: af.sum(v * v) < 20, lambda v: _drawn(v) * 0.1 + v * 1.2 + 0.5, (row,)
                )[0]
            ),
            x,
        )
    ),
}


@pytest.mark.parametrize("name", _PIECES)
async def test_jacobians_of_pieces_that_run_again(name: str) -> None:
    found = []
    for mark in (lambda fn: fn, af.recompute):
        with af.Graph(seed=3) as graph:
            x = af.placeholder("float64", X.shape)
            y = _PIECES[name](mark)(x)
            fetches = [y, af.gradients(y * y, x), af.jacobian(y, x)]
        async with af.Session(graph) as session:
            found.append(await session.run(fetches, {x: X}))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


async def test_hessians_of_branches_in_loops_that_rows_leave_for_themselves() -> None:
    """Gradients of parts of a value are added up in branches, where only the rank of the value is known."""

    def step(row: Any, w: Any) -> Any:
        def body(i: Any, v: Any) -> Any:
            one = lambda: v * v + 1.1 * row[i % 2] + w[i % 3]  # noqa: E731
            return i + 1, af.cond(v[1] > 1.0, one, lambda: v * 1.5 + w[0, 1])

        return af.while_loop(lambda i, v: v[0] < 4.0, body, (0, row))[1]

    with af.Graph() as graph:
        x, w = af.placeholder("float64", (2, 2)), af.placeholder("float64", (3, 2))
        losses = [af.sum(af.map_fn(lambda row: step(row, w), x, lift=lift) ** 2) for lift in (True, False)]
        found = [(af.hessian(loss, x), af.hessian(loss, w)) for loss in losses]
    async with af.Session(graph) as session:
        one, other = await session.run(found, {x: abs(X[:, :2]), w: abs(W)})
    np.testing.assert_allclose(one[0], other[0], rtol=1e-12)
    np.testing.assert_allclose(one[1], other[1], rtol=1e-12)
