"""Random programs over arrays of any size and dtype, the same for NumPy and for a graph.

A program is the decisions of a random number generator. Each runner draws them anew, with the same seed each time a
body runs, so there is no tree of it: `statements` runs on a machine of `tests.property.machines`.

Arrays have `rows` times `columns` elements, as a vector or as a matrix, so that views come about: they are reshaped,
transposed, flipped and sliced. Sums of floats are left out, as their bits depend on where elements lie. Products of
complex numbers are of small whole numbers, which have only one result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import numpy as np

import asyncflow as af
from tests.property.machines import Machine, Nodes, Numbers

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)

VECTOR, MATRIX = "vector", "matrix"
TRIPS = 3
"""No loop has more."""
LARGEST = 97
"""Bound of complex numbers that are multiplied."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a value: its dtype, and a vector of all elements or a matrix of them."""

    dtype: str
    form: str

    def shape(self, extents: tuple[int, int]) -> tuple[int, ...]:
        return extents if self.form == MATRIX else (extents[0] * extents[1],)


@dataclass(slots=True)
class Scope:
    """The names that a block sees."""

    values: list[tuple[Kind, Any]]
    arrays: list[tuple[Kind, Any]] = field(default_factory=list)
    count: Any = None
    """That of the innermost loop."""

    def inner(self, count: Any = None) -> Scope:
        return Scope(list(self.values), list(self.arrays), self.count if count is None else count)


class Program(NamedTuple):
    """The start of a generator.

    Attributes:
        seed: of its decisions.
        extents: rows and columns of every array.
        feeds: arrays to feed, some of them not contiguous.
        variables: initial values of variables.
    """

    seed: int
    extents: tuple[int, int]
    feeds: Mapping[str, Any]
    variables: Mapping[str, Any]


def write_program(seed: int, extents: tuple[int, int]) -> Program:
    random = Random(seed)
    kinds = [Kind(random.choice(DTYPES), random.choice((VECTOR, MATRIX))) for _ in range(5)]
    feeds = {f"fed{index}": laid_out(array_of(kind, extents, random), random) for index, kind in enumerate(kinds[:3])}
    variables = {f"variable{index}": array_of(kind, extents, random) for index, kind in enumerate(kinds[3:])}
    return Program(seed, extents, feeds, variables)


def array_of(kind: Kind, extents: tuple[int, int], random: Random) -> Any:
    """Return an array of whole numbers, halves and, if the dtype has them, special values."""
    rng = np.random.default_rng(random.randrange(1 << 30))
    shape = kind.shape(extents)
    match np.dtype(kind.dtype).kind:
        case "b":
            return rng.integers(0, 2, shape).astype(bool)
        case "i" | "u":
            limits = np.iinfo(kind.dtype)
            small = rng.integers(max(-9, limits.min), 9, shape).astype(kind.dtype)
            return np.where(rng.random(shape) < 0.9, small, np.asarray(limits.max - small.astype(kind.dtype) % 2))
        case "f":
            special = np.array([np.inf, -np.inf, np.nan, 3e4, 1e-3, 0.1], kind.dtype)
            small = rng.integers(-9, 9, shape).astype(kind.dtype) / 2
            return np.where(rng.random(shape) < 0.9, small, special[rng.integers(0, 6, shape)]).astype(kind.dtype)
        case _:
            return (rng.integers(-9, 9, shape) + 1j * rng.integers(-9, 9, shape)).astype(kind.dtype)


def laid_out(array: Any, random: Random) -> Any:
    """The same values, contiguous or not."""
    match random.randrange(4):
        case 0:
            return np.repeat(array, 2, axis=-1)[..., ::2]
        case 1:
            return np.flip(np.flip(array).copy())
        case 2:
            return np.asfortranarray(array)
        case _:
            return array


# -- running it ------------------------------------------------------------------------------------------------------


def interpret(program: Program, state: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a run, by NumPy; changes `state`, the values of the variables."""
    with np.errstate(all="ignore"):
        return _Writer(Numbers(state), program).run(dict(program.feeds))


class Built(NamedTuple):
    """A program as a graph: what to run, and what to feed."""

    graph: af.Graph
    fetches: dict[str, af.Tensor]
    feeds: dict[af.Tensor, Any]


def build(program: Program, parallel_iterations: int, *, is_open: bool = False) -> Built:
    """The graph of `program`; with `is_open` no extent of an array is known before the run."""
    with af.Graph() as graph:
        variables = {name: af.Variable(value, name=name) for name, value in program.variables.items()}
        placeholders = {
            name: af.placeholder(value.dtype.name, (None,) * value.ndim if is_open else value.shape, name=name)
            for name, value in program.feeds.items()
        }
        fetches = _Writer(Nodes(variables, parallel_iterations), program).run(placeholders)
    return Built(graph, fetches, {placeholders[name]: value for name, value in program.feeds.items()})


class _Writer:
    """Makes the decisions, and has a machine carry them out."""

    def __init__(self, machine: Machine, program: Program) -> None:
        self.machine = machine
        self.xp = machine.xp
        self.program = program
        self.variables = {name: _kind_of(value) for name, value in program.variables.items()}
        # Few, so that values meet others of their own kind and are computed from them with nothing in between.
        kinds = [*self.variables.values(), *map(_kind_of, program.feeds.values())]
        self.dtypes = [kind.dtype for kind in kinds[:3]]
        self.forms = [kind.form for kind in kinds]

    def run(self, fed: Mapping[str, Any]) -> dict[str, Any]:
        """All that the outermost block has."""
        scope = Scope([(_kind_of(self.program.feeds[name]), value) for name, value in fed.items()])
        self.statements(Random(self.program.seed + 1), scope, 0, 3)
        results = {f"value{index}": value for index, (_, value) in enumerate(scope.values)}
        results |= {f"array{index}": array.stack() for index, (_, array) in enumerate(scope.arrays)}
        return results | {name: self.machine.read(name) for name in self.variables}

    # -- statements ----------------------------------------------------------------------------------------------

    def statements(self, random: Random, scope: Scope, depth: int, most: int) -> None:
        for _ in range(random.randint(most // 2, most)):
            kinds = [self.compute, *[self.write] * 2, *[self.array] * 2]
            if depth < 2:
                kinds += [self.branch] * (2 if scope.count is None else 6) + [self.loop] * 3 + [self.series]
            random.choice(kinds)(random, scope, depth)

    def compute(self, random: Random, scope: Scope, depth: int) -> None:
        scope.values.append(self.expression(random, scope))

    def write(self, random: Random, scope: Scope, depth: int) -> None:
        """Changes a variable, whose old or new value is used later on."""
        variable = random.choice(list(self.variables))
        kind = self.variables[variable]
        if random.randrange(3) == 0:
            scope.values.append((kind, self.machine.read(variable)))
        verb = random.choice(("assign", "assign_add", "assign_sub") if kind.dtype != "bool" else ("assign",))
        scope.values.append((kind, self.machine.write(variable, verb, self.value_of(kind, random, scope))))

    def array(self, random: Random, scope: Scope, depth: int) -> None:
        """A new TensorArray with one row, or one row more, or one read."""
        if not scope.arrays or random.randrange(4) == 0:
            kind = self.a_kind(random)
            array = self.machine.rows(kind.dtype, kind.shape(self.program.extents))
            scope.arrays.append((kind, array.write(0, self.value_of(kind, random, scope))))
            return
        place = random.randrange(len(scope.arrays))
        kind, array = scope.arrays[place]
        if random.randrange(2):
            index = random.randrange(TRIPS) if scope.count is None else scope.count
            scope.values.append((kind, array.read(index % array.size())))
        else:
            scope.arrays[place] = kind, array.write(array.size(), self.value_of(kind, random, scope))

    def branch(self, random: Random, scope: Scope, depth: int) -> None:
        """Return a branch of two, or of three."""
        kinds = [self.a_kind(random) for _ in range(random.randint(1, 2))]
        seeds = [random.randrange(1 << 30) for _ in range(random.choice((2, 2, 3)))]

        def result_of(seed: int) -> Callable[[], list[Any]]:
            return lambda: self.block(Random(seed), scope.inner(), kinds, depth + 1, 2)

        branches = [result_of(seed) for seed in seeds]
        if len(branches) == 2:
            results = self.machine.cond(self.predicate(random, scope), *branches)
        else:
            results = self.machine.switch(self.number(random, scope), branches)
        self.bind(results, kinds, scope)

    def loop(self, random: Random, scope: Scope, depth: int) -> None:
        kinds = [self.a_kind(random) for _ in range(random.randint(1, 3))]
        initial = [self.value_of(kind, random, scope) for kind in kinds]
        trips = random.choice((1, 2, TRIPS, self.number(random, scope)))
        seed = random.randrange(1 << 30)
        kept = self.a_kind(random)

        def body(count: Any, rows: Any, *carried: Any) -> list[Any]:
            inner = scope.inner(count)
            inner.values += zip(kinds, carried[: len(kinds)], strict=True)
            inner.arrays = [(kind, array) for (kind, _), array in zip(scope.arrays, carried[len(kinds) :], strict=True)]
            results = self.block(Random(seed), inner, kinds, depth + 1, 3)
            return [rows.write(count, self.value_of(kept, Random(seed + 1), inner)), *results]

        rows = self.machine.rows(kept.dtype, kept.shape(self.program.extents), trips)
        rows, *results = self.machine.loop(trips, body, [rows, *initial, *(array for _, array in scope.arrays)])
        self.bind(results, kinds, scope)
        truths = self.xp.astype(self.real(rows.stack()), "bool")
        scope.values.append((Kind("bool", kept.form), self.xp.any(truths, axis=0)))

    def series(self, random: Random, scope: Scope, depth: int) -> None:
        """A loop of nothing but arithmetic, whose variables take turns in buffers."""
        kind = self.a_kind(random)
        initial = [self.value_of(kind, random, scope) for _ in range(random.randint(1, 3))]
        captured = self.value_of(kind, random, scope)
        names = {"b": ("logical_and", "logical_xor"), "c": ("add", "subtract")}.get(
            np.dtype(kind.dtype).kind, ("add", "subtract", "multiply", "maximum", "minimum")
        )
        seed = random.randrange(1 << 30)

        def body(count: Any, *carried: Any) -> list[Any]:
            drawn = Random(seed)
            results: list[Any] = []
            for value in drawn.sample(carried, len(carried)):
                for _ in range(drawn.randint(1, 3)):
                    value = getattr(self.xp, drawn.choice(names))(value, drawn.choice((*carried, *results, captured)))
                # A view keeps the buffer of the variable that it looks into.
                results.append(self.xp.flip(drawn.choice(carried)) if drawn.randrange(5) == 0 else value)
            return results

        results = self.machine.loop(TRIPS, body, initial)
        scope.values += [(kind, value) for value in (captured, *initial, *results)]

    def block(self, random: Random, scope: Scope, kinds: Sequence[Kind], depth: int, most: int) -> list[Any]:
        """Values of these kinds, and all arrays from outside, which the block may have changed."""
        outside = len(scope.arrays)
        self.statements(random, scope, depth, most)
        values = [self.value_of(kind, random, scope) for kind in kinds]
        if random.randrange(3) == 0:
            values.reverse()  # variables that change places
            values = [self.as_kind(kind, value) for kind, value in zip(kinds, values, strict=True)]
        return values + [array for _, array in scope.arrays[:outside]]

    def bind(self, results: Sequence[Any], kinds: Sequence[Kind], scope: Scope) -> None:
        scope.values += zip(kinds, results, strict=False)
        scope.arrays = [(kind, array) for (kind, _), array in zip(scope.arrays, results[len(kinds) :], strict=True)]

    # -- expressions ---------------------------------------------------------------------------------------------

    def a_kind(self, random: Random) -> Kind:
        return Kind(random.choice(self.dtypes), random.choice(self.forms))

    def value_of(self, kind: Kind, random: Random, scope: Scope) -> Any:
        """Return a value of a kind, seen or computed."""
        value = self.expression(random, scope)[1] if random.randrange(3) else self.seen(random, scope)
        return self.as_kind(kind, value)

    def as_kind(self, kind: Kind, value: Any) -> Any:
        dtype = np.dtype(self.machine.dtype(value))
        if dtype.kind == "c" and kind.dtype not in COMPLEX:
            value = self.real(value)
            dtype = np.dtype(self.machine.dtype(value))
        if dtype.kind == "f" and kind.dtype in INTEGERS:
            value = self.xp.less(value, 1)  # NumPy does not say what too large a float becomes
        value = self.in_form(kind.form, value)
        return value if self.machine.dtype(value) == kind.dtype else self.xp.astype(value, kind.dtype)

    def real(self, value: Any) -> Any:
        return self.xp.real(value) if self.machine.dtype(value) in COMPLEX else value

    def in_form(self, form: str, value: Any) -> Any:
        shape = Kind("", form).shape(self.program.extents)
        return value if tuple(value.shape) == shape else self.xp.reshape(value, shape)

    def expression(self, random: Random, scope: Scope) -> tuple[Kind, Any]:
        """Return a chain of operations, most of them elementwise: values in between are used once, and their buffers
        again.
        """
        form = random.choice(self.forms)
        value = self.in_form(form, self.seen(random, scope))
        for _ in range(random.randint(1, 4)):
            other = self.in_form(form, self.seen(random, scope))
            value = random.choice((self.of_two,) * 4 + (self.of_one, self.moved))(random, value, other, form)
        return Kind(self.machine.dtype(value), form), value

    def seen(self, random: Random, scope: Scope) -> Any:
        return random.choice(scope.values[-6:])[1]

    def of_two(self, random: Random, first: Any, second: Any, form: str) -> Any:
        kinds = {np.dtype(self.machine.dtype(value)).kind for value in (first, second)}
        if kinds == {"b"}:
            name = random.choice(("logical_and", "logical_or", "logical_xor", "equal"))
        elif "c" in kinds:
            name = random.choice(("add", "subtract", "multiply", "equal", "not_equal"))
            if name == "multiply":
                first, second = self.small(first), self.small(second)
        else:
            names = ["add", "multiply", "maximum", "minimum", "less", "equal", "where"]
            names += ["bitwise_and", "bitwise_or", "bitwise_xor"] if "f" not in kinds and "b" not in kinds else []
            names += ["subtract", "floor_divide", "remainder"] if "b" not in kinds else []
            name = random.choice(names)
            if name.startswith("bitwise") and np.result_type(*map(self.machine.dtype, (first, second))).kind == "f":
                name = "add"  # uint64 and a signed one
        if name == "where":
            return self.xp.where(self.xp.less(first, second), first, second)
        return getattr(self.xp, name)(first, second)

    def of_one(self, random: Random, value: Any, _: Any, form: str) -> Any:
        match np.dtype(self.machine.dtype(value)).kind:
            case "b":
                return self.xp.logical_not(value)
            case "c":
                return getattr(self.xp, random.choice(("conj", "real", "imag", "negative")))(value)
            case "f":
                return getattr(self.xp, random.choice(("negative", "abs", "square", "sqrt", "floor", "isnan")))(value)
            case _:
                return getattr(self.xp, random.choice(("negative", "abs", "square", "bitwise_invert")))(value)

    def moved(self, random: Random, value: Any, _: Any, form: str) -> Any:
        """Other places for the same elements: views, and copies."""
        rows, columns = self.program.extents
        match random.randrange(5):
            case 0:
                return self.xp.flip(value)
            case 1:
                return self.xp.roll(value, random.choice((1, -2)), axis=0)
            case 2:
                matrix = self.xp.reshape(value, (columns, rows))
                return self.in_form(form, self.xp.permute_dims(matrix, (1, 0)))
            case 3:
                half = Kind("", form).shape(self.program.extents)[0] // 2
                return self.xp.concat((value[half:], value[:half]), axis=0)
            case _:
                row = self.in_form(MATRIX, value)[-1:, :] if rows else self.in_form(MATRIX, value)
                return self.in_form(form, self.xp.broadcast_to(row, self.program.extents))

    def small(self, value: Any) -> Any:
        """Whole numbers below `LARGEST`, as complex ones."""
        dtype = self.machine.dtype(value)
        if dtype not in COMPLEX:
            return self.whole(self.xp.astype(value, "int8") if dtype == "bool" else value)
        real, imag = (self.whole(part(value)) for part in (self.xp.real, self.xp.imag))
        return self.xp.astype(real, dtype) + self.xp.astype(imag, dtype) * 1j

    def whole(self, value: Any) -> Any:
        """Floats and integers, brought below `LARGEST`."""
        if np.dtype(self.machine.dtype(value)).kind == "f":
            value = self.xp.where(self.xp.less(self.xp.abs(value), 1e4), self.xp.floor(value), 1)
        return self.xp.remainder(value, LARGEST)

    # -- numbers -------------------------------------------------------------------------------------------------

    def number(self, random: Random, scope: Scope) -> Any:
        """From 0 to `TRIPS`, known when the program runs."""
        count = self.xp.sum(self.xp.astype(self.truths(random, scope), "int32"), dtype="int32")
        return self.xp.remainder(count, TRIPS + 1)

    def predicate(self, random: Random, scope: Scope) -> Any:
        if scope.count is not None and random.randrange(2):
            return self.xp.equal(scope.count % 2, random.randrange(2))
        return self.xp.equal(self.number(random, scope), random.randrange(TRIPS + 1))

    def truths(self, random: Random, scope: Scope) -> Any:
        first, second = (self.as_kind(Kind("float64", VECTOR), random.choice(scope.values)[1]) for _ in range(2))
        return self.xp.less(first, second)


def _kind_of(value: Any) -> Kind:
    return Kind(value.dtype.name, MATRIX if value.ndim == 2 else VECTOR)
