from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncflow.autodiff.gradients import gradients
from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import constant, placeholder
from asyncflow.graph.building.scopes import name_scope
from asyncflow.graph.graph import Graph
from asyncflow.graph.op import KernelContext
from asyncflow.graph.values.dtypes import as_dtype
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.random import random

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncflow.graph.ir import Tensor


@pytest.fixture(autouse=True)
def _graph() -> Iterator[None]:
    with Graph():
        yield


def draw(
    tensor: Tensor, feeds: dict[Tensor, Any] | None = None, *, seed: int = 1, run: int = 1, tag: tuple[int, ...] = ()
) -> Any:
    """The value of `tensor` in one run and iteration, held against the shape rules."""
    values = dict(feeds or {})
    for node in tensor.graph.nodes[: tensor.node.id + 1]:
        if node.op.kernel is None or any(x not in values for x in node.inputs):
            continue
        context = (KernelContext(seed=seed, run=run, tag=tag),) if node.op.conduct.needs_context else ()
        value = node.op.kernel(np, **node.attrs)(*context, *(values[x] for x in node.inputs))
        (output,) = node.outputs
        assert np.asarray(value).dtype == output.dtype
        if output.shape is not None:
            assert all(dim in (None, got) for dim, got in zip(output.shape, np.shape(value), strict=True))
        values[output] = value
    return values[tensor]


ALL = {
    "normal": lambda **o: random.normal((64,), **o),
    "truncated_normal": lambda **o: random.truncated_normal((64,), **o),
    "uniform": lambda **o: random.uniform((64,), **o),
    "integers": lambda **o: random.integers((64,), high=10**9, **o),
    "bernoulli": lambda **o: random.bernoulli(np.full(256, 0.5), **o),
    "categorical": lambda **o: random.categorical(np.zeros((64, 50)), **o),
    "choice": lambda **o: random.choice(10**6, 64, **o),
    "permutation": lambda **o: random.permutation(64, **o),
    "gamma": lambda **o: random.gamma((64,), alpha=2.0, **o),
    "poisson": lambda **o: random.poisson((64,), rate=100.0, **o),
}


@pytest.mark.parametrize("name", ALL)
def test_numbers_depend_on_seed_op_run_and_tag_and_on_nothing_else(name: str) -> None:
    x, y = ALL[name](), ALL[name]()
    first = draw(x)
    assert np.array_equal(first, draw(x))
    assert not np.array_equal(first, draw(y))
    for other in ({"seed": 2}, {"run": 2}, {"tag": (0,)}, {"tag": (1,)}, {"tag": (0, 0)}, {"tag": (0, 1)}):
        assert not np.array_equal(first, draw(x, **other))
    streams = [draw(x, tag=tag).tobytes() for tag in [(), (0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0)]]
    assert len(set(streams)) == len(streams)


@pytest.mark.parametrize("name", ALL)
def test_an_op_seed_fixes_the_numbers_whatever_the_node_is_called(name: str) -> None:
    x, y = ALL[name](seed=7), ALL[name](seed=7, name="other")
    assert np.array_equal(draw(x), draw(y))
    assert not np.array_equal(draw(x), draw(ALL[name](seed=8)))


def test_numbers_are_the_same_in_every_process_and_release() -> None:
    assert draw(random.integers((4,), high=1000, seed=3), seed=5, run=2, tag=(1,)).tolist() == INTEGERS
    assert draw(random.integers((4,), high=1000, name="fixed"), seed=5, run=2, tag=(1, 2)).tolist() == NAMED


@pytest.mark.parametrize("name", ["normal", "uniform", "truncated_normal", "integers"])
@pytest.mark.parametrize("tag", [(), (3,), (2**40,), (1, 2)])
def test_one_number_is_the_first_of_a_fresh_generator(name: str, tag: tuple[int, ...]) -> None:
    """Whatever was drawn with the generator before, and whatever its buffer held."""
    draws: dict[str, Any] = {
        "normal": lambda shape: random.normal(shape, dtype="float32", seed=7),
        "uniform": lambda shape: random.uniform(shape, seed=7),
        "truncated_normal": lambda shape: random.truncated_normal(shape, seed=7),
        "integers": lambda shape: random.integers(shape, high=1000, dtype="int32", seed=7),
    }
    for _ in range(2):
        draw(random.integers((3,), high=5, dtype="int8", seed=9), run=8)
        number = draw(draws[name](()), seed=-2, run=3, tag=tag)
        assert number == draw(draws[name]((1,)), seed=-2, run=3, tag=tag)[0]
        if len(tag) == 1 and name == "uniform":
            counter, key = np.array([0, 3, 1, *tag], np.uint64), np.array([2**64 - 2, 7], np.uint64)
            assert number == np.random.Generator(np.random.Philox(counter=counter, key=key)).random()


@pytest.mark.parametrize("dtype", ["int16", "int32", "uint32", "int64", "uint64"])
def test_one_integer_is_that_of_a_generator(dtype: str) -> None:
    """Of any bounds, those among which some words are drawn again included."""
    chance, kind = Random(dtype), np.dtype(dtype)
    bounds = np.iinfo(kind)
    make = random.INTEGERS.kernel
    assert make is not None
    for run in range(300):
        span = chance.choice((1, 2, 3, 100, 2**31 - 1, 2**31 + chance.randrange(2**30), 2**32 - 2, 2**32, 2**40))
        low = chance.choice((0, int(bounds.min), 5))
        if low + span > min(bounds.max + 1, 2**63 - 1):
            continue
        seed = chance.randrange(2**63)
        fresh = np.random.Generator(np.random.Philox(key=[3, seed], counter=[0, run, 1, 0]))
        expected = fresh.integers(low, low + span, None, kind.type)
        found = make(np, seed=seed, shape=(), dtype=kind)(
            KernelContext(3, run, (0,), None), np.int64(low), np.int64(low + span)
        )
        assert (found, type(found)) == (expected, type(expected))


def test_a_draw_that_fails_spoils_no_other() -> None:
    x = random.uniform(seed=3)
    before = draw(x)
    with pytest.raises(ValueError, match="high <= 0"):
        draw(random.integers(high=constant(0), seed=3))
    assert draw(x) == before


INTEGERS = [621, 864, 75, 918]
NAMED = [286, 816, 50, 525]


def test_the_name_is_the_full_name() -> None:
    with name_scope("layer"):
        x = random.normal(3)
    assert x.node.name == "layer/random_normal"
    assert not np.array_equal(draw(x), draw(random.normal(3)))
    assert x.node.op.conduct.is_random


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_floats_have_the_right_distribution(dtype: Any) -> None:
    n = draw(random.normal((20000,), dtype=dtype)).astype("f8")
    assert abs(n.mean()) < 0.03 and abs(n.std() - 1) < 0.03
    scaled = draw(random.normal((20000,), mean=5, std=0.5, dtype=dtype))
    assert abs(scaled.astype("f8").mean() - 5) < 0.05
    t = draw(random.truncated_normal((20000,), dtype=dtype)).astype("f8")
    assert np.abs(t).max() <= 2 and abs(t.std() - 0.88) < 0.03
    u = draw(random.uniform((20000,), low=-1, high=3, dtype=dtype)).astype("f8")
    assert u.min() >= -1 and u.max() <= 3 and abs(u.mean() - 1) < 0.05
    assert draw(random.normal(dtype=dtype)).shape == ()


def test_bounds_may_be_tensors() -> None:
    low = constant(np.array([[0], [10]], np.float32))
    u = draw(random.uniform((2, 50), low=low, high=low + 1, dtype="float32"))
    assert (u[0] < 1).all() and (u[1] >= 10).all() and (u[1] <= 11).all()
    i = draw(random.integers((2, 50), low=np.array([[0], [10]]), high=np.array([[5], [15]]), dtype="int8"))
    assert sorted(set(i[0].tolist())) == [0, 1, 2, 3, 4]
    assert sorted(set(i[1].tolist())) == [10, 11, 12, 13, 14]


def test_shapes_known_only_in_the_run() -> None:
    n, x = placeholder("int32", ()), placeholder("float32", (None, 2))
    assert random.normal((n, 3)).shape == (None, 3)
    assert draw(random.normal((n, 3)), {n: np.int32(2)}).shape == (2, 3)
    assert draw(random.integers(shape(x), high=3), {x: np.ones((4, 2), "f4")}).shape == (4, 2)
    assert draw(random.bernoulli(x), {x: np.ones((4, 2), "f4")}).all()
    assert draw(random.choice(x, n), {n: np.int32(5), x: np.ones((4, 2), "f4")}).shape == (5, 2)


def test_categorical_follows_its_logits() -> None:
    logits = np.log(np.array([[0.1, 0.2, 0.7]], np.float32)).repeat(20000, 0)
    counts = np.bincount(draw(random.categorical(logits))) / 20000
    np.testing.assert_allclose(counts, [0.1, 0.2, 0.7], atol=0.02)
    assert draw(random.categorical(logits.T, axis=0)).shape == (20000,)
    assert draw(random.categorical(np.array([-np.inf, 0], np.float32))) == 1


def test_choice_and_permutation() -> None:
    x = np.arange(12).reshape(6, 2)
    picked = draw(random.choice(x, (6,), replace=False))
    assert sorted(picked.tolist()) == x.tolist()
    assert draw(random.choice(x)).shape == (2,)
    assert draw(random.choice(3)) in (0, 1, 2)
    assert set(draw(random.choice(3, 50, p=np.array([0.5, 0, 0.5], np.float32))).tolist()) == {0, 2}
    mixed = draw(random.permutation(x, axis=1))
    assert sorted(mixed[0].tolist()) == [0, 1]
    assert sorted(draw(random.permutation(10)).tolist()) == list(range(10))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_the_rounding_of_probabilities_is_not_taken_for_a_wrong_sum(dtype: str) -> None:
    kind = np.float64 if dtype == "float64" else np.float32
    for seed in range(20):
        exponentials = np.exp(np.random.default_rng(seed).standard_normal(1000).astype(kind))
        weights = (exponentials / exponentials.sum()).astype(as_dtype(dtype))
        assert 0 <= draw(random.choice(1000, p=weights), seed=seed) < 1000
    twice = np.full(4, 0.5).astype(as_dtype(dtype))
    with pytest.raises(ValueError, match=r"do not sum to 1"):
        draw(random.choice(4, p=twice))


def test_errors() -> None:
    with pytest.raises(DTypeError, match=r"random_normal gives floats, not int32; use af.random.integers"):
        random.normal(3, dtype="int32")
    with pytest.raises(DTypeError, match=r"random_integers gives integers, not float32"):
        random.integers(3, high=4, dtype="float32")
    with pytest.raises(ShapeError, match=r"random_integers: bounds broadcast to the shape asked for, \[3\]"):
        random.integers(3, high=np.array([[1], [2]]))
    with pytest.raises(DTypeError, match=r"random_bernoulli: takes probabilities as floats, not int64"):
        random.bernoulli(1)
    with pytest.raises(ShapeError, match=r"one probability for each row"):
        random.choice(3, p=np.ones(4))
    with pytest.raises(GraphError, match=r"takes a tensor or an int to choose from, not 1.5"):
        random.choice(1.5)
    with pytest.raises(ShapeError, match=r"takes a tensor of rank 1 or more"):
        random.choice(placeholder("float32", ()))


@pytest.mark.parametrize("p", [-1.0, 2.0, np.nan, np.inf])
def test_bernoulli_refuses_wrong_probabilities(p: float) -> None:
    x = placeholder("float32", (None,))
    with pytest.raises(ValueError, match=rf"probabilities lie from 0 to 1; got {p} \(1 of 2 values are wrong\)"):
        draw(random.bernoulli(x), {x: np.array([0.5, p], "f4")})


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([[0.0, np.nan], [0, 0]], r"the largest logit along the axis is finite; got nan \(1 of 2"),
        ([[0.0, np.inf], [0, 0]], r"the largest logit along the axis is finite; got inf"),
        ([[-np.inf, -np.inf], [0, 0]], r"the largest logit along the axis is finite; got -inf"),
        (np.ones((2, 0)), r"there is no category to draw: logits of shape \(2, 0\) along axis -1"),
    ],
)
def test_categorical_refuses_logits_of_no_distribution(logits: Any, message: str) -> None:
    x = placeholder("float64", (2, None))
    with pytest.raises(ValueError, match=message):
        draw(random.categorical(x), {x: np.array(logits)})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: random.normal((2,), std=-1), r"random_normal: a standard deviation is finite, and 0 or more; got -1"),
        (lambda: random.truncated_normal(std=np.nan), r"random_truncated_normal: a standard deviation is finite"),
        (lambda: random.normal(std=np.array([1.0, -2.0])), r"random_normal: a standard deviation"),
        (lambda: random.uniform(low=2, high=1.0), r"random_uniform: low and high .* not above high; got 2 and 1.0"),
        (lambda: random.uniform(high=np.inf), r"random_uniform: low and high are finite"),
    ],
)
def test_parameters_that_make_no_distribution_are_refused(build: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        build()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_gamma(dtype: str) -> None:
    for alpha in (0.5, 3.0):
        values = draw(random.gamma((4000,), alpha=alpha, scale=2.0, dtype=dtype)).astype("float64")
        assert (values >= 0).all()
        assert abs(values.mean() / (2 * alpha) - 1) < 0.1
        assert abs(values.var() / (4 * alpha) - 1) < 0.3


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint16", "float32"])
def test_poisson(dtype: str) -> None:
    for rate in (0, 0.5, 8.0):
        values = draw(random.poisson((4000,), rate=rate, dtype=dtype)).astype("float64")
        assert (values == np.floor(values)).all()
        assert abs(values.mean() - rate) <= 0.1 * rate
        assert abs(values.var() - rate) <= 0.2 * rate


def test_parameters_of_gamma_and_poisson_broadcast() -> None:
    size = placeholder("int64", ())
    many = np.array([1e-9, 1e6])
    for build in (lambda n, p: random.gamma((n, 2), alpha=p), lambda n, p: random.poisson((n, 2), rate=p)):
        values = draw(build(size, many), {size: np.int64(3)})
        assert values.shape == (3, 2)
        assert (values[:, 0] < 1).all()
        assert (values[:, 1] > 1e5).all()
        assert draw(build(0, many)).shape == (0, 2)
    assert np.shape(draw(random.gamma(alpha=1.0))) == ()
    assert np.shape(draw(random.poisson(rate=1.0))) == ()


def test_errors_of_gamma_and_poisson() -> None:
    with pytest.raises(ValueError, match="alpha is finite, and above 0; got 0"):
        draw(random.gamma(2, alpha=0.0))
    with Graph(), pytest.raises(ValueError, match="a rate is finite, and 0 or more; got -1"):
        draw(random.poisson(2, rate=[1.0, -1.0]))
    with pytest.raises(DTypeError, match="random_gamma gives floats, not int64"):
        random.gamma(alpha=1.0, dtype="int64")
    with pytest.raises(DTypeError, match="random_poisson gives integers or floats, not bool"):
        random.poisson(rate=1.0, dtype="bool")
    with pytest.raises(ShapeError, match=r"parameters broadcast to the shape asked for, \[2\]; got float64\[1,2\]"):
        random.gamma((2,), alpha=[[1.0, 2.0]])
    with pytest.raises(DTypeError, match="takes real numbers"):
        random.poisson(rate=[1j])


def test_gradients_of_gamma() -> None:
    """The scale has one; alpha would need one, which is refused."""
    scale, alpha = placeholder("float64", ()), placeholder("float64", ())
    x = random.gamma((3,), alpha=alpha, scale=scale)
    assert gradients(x, scale) is not None
    with pytest.raises(GraphError, match="random_gamma has no gradient with respect to alpha"):
        gradients(x, alpha)


def test_gamma_and_poisson_draw_one_number_for_each_parameter() -> None:
    for build in (lambda p: random.gamma(alpha=p), lambda p: random.poisson(rate=p)):
        assert build([[1.0, 2.0, 3.0]]).shape == (1, 3)
        values = draw(build(np.array([[1e-3] * 3, [1e6] * 3])))
        assert (values[0] < 1e3).all()
        assert (values[1] > 1e3).all()
        x = placeholder("float64", (None, 2))
        assert build(x).shape == (None, 2)


@pytest.mark.parametrize("name", ALL)
def test_a_request_draws_by_its_own_seed(name: str) -> None:
    """And by the op and the iteration, but neither by the session's seed nor by the run."""
    seed = placeholder("int64", ())
    x, y, fixed = ALL[name](seed=seed), ALL[name](seed=seed), ALL[name](seed=(seed, 3), name="other")
    first = draw(x, {seed: np.int64(-5)})
    assert np.array_equal(first, draw(x, {seed: np.int64(-5)}, seed=9, run=4))
    others = [draw(y, {seed: np.int64(-5)}), draw(x, {seed: np.int64(5)}), draw(x, {seed: np.int64(-5)}, tag=(0,))]
    assert not any(np.array_equal(first, other) for other in others)
    assert np.array_equal(draw(fixed, {seed: np.int64(1)}), draw(ALL[name](seed=(seed, 3)), {seed: np.int64(1)}))
    assert not np.array_equal(draw(fixed, {seed: np.int64(1)}), draw(ALL[name](seed=(seed, 4)), {seed: np.int64(1)}))


def test_seeds_of_requests_are_integers() -> None:
    with pytest.raises(
        GraphError, match=r"the seed of random_normal is an int, or an integer tensor of rank 0.*float32"
    ):
        random.normal(seed=placeholder("float32", ()))
    with pytest.raises(GraphError, match=r"the seed of random_uniform is an int, or an integer tensor of rank 0"):
        random.uniform(seed=placeholder("int64", (2,)))
    with pytest.raises(GraphError, match=r"the second of seed=\(tensor, int\) must be an int"):
        random.uniform(seed=(placeholder("int64", ()), 1.5))  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"a seed that is no tensor, nor a pair \(tensor, int\), must be an int"):
        random.uniform(seed=1.5)  # type: ignore[arg-type]


def test_seeded_draws_have_the_gradients_of_others() -> None:
    seed, alpha = placeholder("int64", ()), placeholder("float64", ())
    assert gradients(random.normal(std=alpha, seed=seed), [alpha])[0] is not None
    with pytest.raises(GraphError, match="random_gamma has no gradient with respect to"):
        gradients(random.gamma(alpha=alpha, seed=seed), [alpha])
