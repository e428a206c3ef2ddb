"""Teaches a network to guess operators that are hidden in the code of Python's standard library, on your machine.

In ``x ? 2`` it may be ``*``, ``//`` or ``%``; that depends on where `x` comes from. So each function becomes the graph
of its data flow. A variable is the vertex of the value that it was given last, and all its uses share that vertex: the
graphs are directed and acyclic, but no trees. A vertex function declares once how a vertex computes its value from its
inputs. A batch of graphs of any shapes is computed at once, forward and backward.

    python examples/data_flow.py --output demo-out

It trains on some files of the library, and prints how often it is right about operators in the others. For comparison
it prints how often one constant answer would be right, and a table by the kinds of the two values. It writes a timeline
to look at.
"""

from __future__ import annotations

import argparse
import ast
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import asyncflow as af

LARGEST = 400
"""Vertices a graph may have."""

OPERATORS = sorted(kind.__name__ for kind in ast.operator.__subclasses__())
"""Operators to be guessed, by name."""

RATE, LAST_RATE = 0.01, 0.001
"""Learning rates of the first and of the last step."""

TRACED = 4
"""Steps at the end whose timeline is drawn."""

# -- the graphs --------------------------------------------------------------------------------------------------------


class DataFlow(ast.NodeVisitor):
    """The data flow of one function, statement by statement: its vertices come after the vertices that they use.

    A vertex has a kind, such as a call, and a name, as constants, arguments and attributes have. All operators have one
    kind, and stand over a left and a right vertex.
    """

    def __init__(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.kinds: list[str] = []
        self.names: list[str] = []
        self.edges: list[tuple[int, int]] = []
        self.operators: dict[int, str] = {}
        """By vertex."""
        self._values: dict[str, int] = {}
        for node in ast.walk(function.args):
            if isinstance(node, ast.arg):
                self._values[node.arg] = self._add("argument", node.arg)
        for statement in function.body:
            self.visit(statement)

    def _add(self, kind: str, name: str = "", children: Sequence[int] = ()) -> int:
        self.edges.extend((len(self.kinds), child) for child in children)
        self.kinds.append(kind)
        self.names.append(name)
        return len(self.kinds) - 1

    def _operator(self, operator: ast.operator, left: int, right: int) -> int:
        sides = [self._add("left", children=[left]), self._add("right", children=[right])]
        vertex = self._add("operator", children=sides)
        self.operators[vertex] = type(operator).__name__
        return vertex

    def _value(self, node: ast.expr) -> int:
        """The vertex of an expression."""
        match node:
            case ast.Name(id=name):
                if name not in self._values:
                    self._values[name] = self._add("name", name)
                return self._values[name]
            case ast.Constant(value=str(text)) if "%" in text:
                return self._add("str", "%")  # which are many, and each another
            case ast.Constant(value=value):
                return self._add(type(value).__name__, repr(value))
            case ast.BinOp():
                return self._operator(node.op, self._value(node.left), self._value(node.right))
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                return self._add(type(node).__name__)  # which has variables of its own
        parts = [part.value if isinstance(part, ast.keyword) else part for part in ast.iter_child_nodes(node)]
        children = [self._value(part) for part in parts if isinstance(part, ast.expr)]
        vertex = self._add(type(node).__name__, getattr(node, "attr", ""), children)
        if isinstance(node, ast.NamedExpr):
            self._give(node.target, vertex)
        return vertex

    def _give(self, target: ast.expr, vertex: int) -> None:
        """From here on the target has the value of that vertex."""
        match target:
            case ast.Name(id=name):
                self._values[name] = vertex
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self._give(part, self._add("element", children=[vertex]))
            case ast.Starred(value=part):
                self._give(part, vertex)

    def generic_visit(self, node: ast.AST) -> None:
        """Looks into statements, and for the values of expressions."""
        if isinstance(node, ast.expr):
            self._value(node)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            super().generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """``a = b = value``."""
        value = self._value(node.value)
        for target in node.targets:
            self._give(target, value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """``a += value``, which is an operator too."""
        self._give(node.target, self._operator(node.op, self._value(node.target), self._value(node.value)))

    def visit_For(self, node: ast.For) -> None:
        """``for a in value``."""
        self._give(node.target, self._add("element", children=[self._value(node.iter)]))
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def visit_withitem(self, node: ast.withitem) -> None:
        """``with value as a``."""
        value = self._value(node.context_expr)
        if node.optional_vars is not None:
            self._give(node.optional_vars, value)


@dataclass(frozen=True, slots=True)
class Function:
    """The inputs of the operators of a function: vertices, numbered anew, and the operators."""

    flow: af.InputGraph
    kinds: list[str]
    names: list[str]
    operators: dict[int, str]

    @classmethod
    def of(cls, found: DataFlow) -> Function:
        """Return the data flow without vertices that are no inputs of operators."""
        children: list[list[int]] = [[] for _ in found.kinds]
        for parent, child in found.edges:
            children[parent].append(child)
        needed = set(found.operators)
        for vertex in reversed(range(len(children))):  # parents first
            if vertex in needed:
                needed.update(children[vertex])
        kept = sorted(needed)
        number = {vertex: place for place, vertex in enumerate(kept)}
        edges = [(number[vertex], number[child]) for vertex in kept for child in children[vertex]]
        return cls(
            af.InputGraph.from_edges(len(kept), edges),
            [found.kinds[vertex] for vertex in kept],
            [found.names[vertex] for vertex in kept],
            {number[vertex]: name for vertex, name in found.operators.items()},
        )


@dataclass(frozen=True, slots=True)
class Code:
    """Functions to learn from and to be tested on."""

    train: list[Function]
    held_out: list[Function]


def count(functions: Sequence[Function]) -> int:
    """Number of their operators."""
    return sum(len(function.operators) for function in functions)


def read_code(most_files: int | None = None) -> Code:
    """Return the functions of the standard library; a fifth of its files is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for pattern in ("*.py", "*/*.py") for file in root.glob(pattern) if is_library(file, root))
    code = Code([], [])
    for number, file in enumerate(files[:most_files]):
        (code.held_out if number % 5 == 4 else code.train).extend(functions_in(ast.parse(file.read_bytes())))
    if not code.train or not code.held_out:
        raise SystemExit(f"too few operators in {root}")
    return code


def is_library(file: Path, root: Path) -> bool:
    """Return True if a file is no test, and was not installed beside the library."""
    first = file.relative_to(root).with_suffix("").parts[0]
    return first in sys.stdlib_module_names and first not in ("test", "idlelib")


def functions_in(module: ast.Module) -> Iterator[Function]:
    """Return the functions with operators."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = DataFlow(node)
            if found.operators:
                function = Function.of(found)
                if len(function.kinds) <= LARGEST:
                    yield function


@dataclass(frozen=True, slots=True)
class Batch:
    """Several functions as one graph: the number of each vertex's kind and name, and where operators are, and which."""

    flow: af.InputGraph
    kinds: NDArray[np.int64]
    names: NDArray[np.int64]
    places: NDArray[np.int64]
    operators: NDArray[np.int64]


class Words:
    """Numbers for the kinds and the names that are frequent; the others share number 0."""

    def __init__(self, functions: Sequence[Function], known: int) -> None:
        kinds = Counter(kind for function in functions for kind in function.kinds)
        names = Counter(name for function in functions for name in function.names)
        self.kinds = {kind: number + 1 for number, kind in enumerate(sorted(kinds))}
        self.names = {name: number + 1 for number, (name, _) in enumerate(names.most_common(known))}

    def batch(self, functions: Sequence[Function]) -> Batch:
        """The functions as one batch."""
        starts = np.cumsum([0, *(function.flow.n_vertices for function in functions)])
        found = [
            (start + vertex, OPERATORS.index(name))
            for start, function in zip(starts.tolist(), functions, strict=False)
            for vertex, name in function.operators.items()
        ]
        places, operators = np.array(found, np.int64).T
        return Batch(
            af.InputGraph.batch([function.flow for function in functions]),
            np.array([self.kinds.get(kind, 0) for function in functions for kind in function.kinds]),
            np.array([self.names.get(name, 0) for function in functions for name in function.names]),
            places,
            operators,
        )


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """A graph that reads a batch of functions."""

    graph: af.Graph
    flow: af.InputGraph
    kinds: af.Tensor
    names: af.Tensor
    places: af.Tensor
    operators: af.Tensor
    rate: af.Tensor
    loss: af.Tensor
    right: af.Tensor
    train: af.Node

    def feeds(self, batch: Batch) -> dict[af.Tensor, object]:
        """The batch as feeds."""
        return {
            **self.flow.feeds(batch.flow),
            self.kinds: batch.kinds,
            self.names: batch.names,
            self.places: batch.places,
            self.operators: batch.operators,
        }


def build(words: Words, hidden: int) -> Model:
    """Build a GRU from the mean of a vertex's inputs to its state, and a guess for each operator."""
    rng = np.random.default_rng(0)

    def weight(name: str, rows: int, columns: int, scale: float) -> af.Variable:
        return af.Variable((scale * rng.normal(size=(rows, columns))).astype(np.float32), name=name)

    kind_table = weight("kinds", len(words.kinds) + 1, hidden, 0.5)
    name_table = weight("names", len(words.names) + 1, hidden, 0.5)
    weights = af.nn.gru_weights(hidden, hidden, seed=1)
    output = weight("output", hidden, len(OPERATORS), hidden**-0.5)

    @af.vertex_function(state=af.spec("float32", (hidden,)))
    def gru(v: af.Vertex) -> None:
        seen, state = af.nn.gru_cell(v.pull("word"), v.gather_all(), weights)
        v.scatter(state)
        v.push(seen, "seen")

    with af.Graph() as graph:
        flow, rate = af.InputGraph.placeholder(), af.placeholder("float32", ())
        kinds, names, places, operators = (af.placeholder("int64", (None,)) for _ in range(4))
        word = af.embedding(kind_table, kinds) + af.embedding(name_table, names)
        seen = af.vertex_map(gru, flow, {"word": word}).pushes["seen"]
        scores = af.gather(seen, places) @ output
        loss = af.mean(af.nn.softmax_cross_entropy(scores, operators))
        right = af.sum(af.astype(af.argmax(scores, axis=1) == operators, "int64"))
        variables = [kind_table, name_table, *weights, output]
        grads, _ = af.optim.clip_by_global_norm(af.gradients(loss, variables), 1.0)
        train = af.optim.adam(zip(grads, variables, strict=True), rate)
    return Model(graph, flow, kinds, names, places, operators, rate, loss, right, train)


async def train(session: af.Session, model: Model, draw: Callable[[], Batch], steps: int, trace: af.Trace) -> None:
    """Trains on batches; the last few steps are recorded in `trace`."""
    for step in range(steps):
        rate = np.float32(RATE * (LAST_RATE / RATE) ** (step / steps))
        feeds = {**model.feeds(draw()), model.rate: rate}
        recorded = trace if step >= steps - TRACED else None
        loss, _ = await session.run((model.loss, model.train), feeds, trace=recorded)
        if step % max(1, steps // 10) == 0:
            print(f"  step {step:4} of {steps}  loss {loss:.3f}")


async def learn(model: Model, code: Code, words: Words, batch: int, steps: int, trace: af.Trace) -> float:
    """Trains, and gives the share of operators that were held out about which the model is right."""
    rng = np.random.default_rng(1)

    def draw() -> Batch:
        return words.batch([code.train[place] for place in rng.choice(len(code.train), batch, replace=False)])

    async with af.Session(model.graph) as session:
        await train(session, model, draw, steps, trace)
        batches = [words.batch(code.held_out[first : first + 64]) for first in range(0, len(code.held_out), 64)]
        right = sum([int(await session.run(model.right, model.feeds(each))) for each in batches])
    return right / count(code.held_out)


# -- what it is compared with ------------------------------------------------------------------------------------------


def right_by_table(code: Code, *, by_values: bool) -> float:
    """Return how often the most frequent operator is right: of all, or of all operators between two kinds of values."""
    table: dict[tuple[str, ...], Counter[str]] = {}
    for kinds, operator in joined(code.train, by_values):
        table.setdefault(kinds, Counter())[operator] += 1
    guess = {kinds: counts.most_common(1)[0][0] for kinds, counts in table.items()}
    return float(np.mean([guess.get(kinds) == operator for kinds, operator in joined(code.held_out, by_values)]))


def joined(functions: Sequence[Function], by_values: bool) -> Iterator[tuple[tuple[str, ...], str]]:
    """The kinds of the values that each operator joins, and the operator."""
    for function in functions:
        offsets, children = np.asarray(function.flow.offsets), np.asarray(function.flow.children)
        for vertex, operator in function.operators.items():
            sides = children[offsets[vertex] : offsets[vertex + 1]]
            yield tuple(function.kinds[children[offsets[side]]] for side in sides if by_values), operator


def main(argv: Sequence[str] | None = None) -> int:
    """Gives 0 if the model is right often enough about operators that it has not seen, else 1."""
    parser = argparse.ArgumentParser(description="Teaches a network to guess operators from data flow.")
    parser.add_argument("--output", type=Path, default=Path("demo-out"), help="folder for the timeline")
    parser.add_argument("--steps", type=int, default=300, help="steps of training")
    parser.add_argument("--batch", type=int, default=64, help="functions a step")
    parser.add_argument("--hidden", type=int, default=64, help="extent of a state")
    parser.add_argument("--names", type=int, default=500, help="how many names it knows; the others are alike")
    parser.add_argument("--files", type=int, help="read only so many files of the library")
    parser.add_argument("--target", type=float, default=0.62, help="share that is to be right at the end")
    options = parser.parse_args(argv)

    print(f"reading the standard library of Python {sys.version.split()[0]} ...")
    code = read_code(options.files)
    print(
        f"  {len(code.train)} functions with {count(code.train)} operators, and {len(code.held_out)} with "
        f"{count(code.held_out)} held out"
    )

    print(f"training for {options.steps} steps of {options.batch} functions ...")
    started = time.perf_counter()
    words = Words(code.train, options.names)
    model, trace = build(words, options.hidden), af.Trace()
    share = af.run(learn(model, code, words, min(options.batch, len(code.train)), options.steps, trace))
    took = time.perf_counter() - started
    frequent, table = (right_by_table(code, by_values=by_values) for by_values in (False, True))
    passed = share >= options.target
    print(
        f"\n{'PASS' if passed else 'FAIL'}: right about {share:.1%} of the operators it has not seen, after "
        f"{took:.0f} s; always the same answer would be right about {frequent:.1%}, a table by kinds of values about "
        f"{table:.1%}, and {options.target:.0%} was the aim"
    )

    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "data_flow.html"
    af.profiler.save(trace, path)
    print(f"timeline: open {path.resolve().as_uri()} in a browser")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
