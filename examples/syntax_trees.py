"""Teaches a Tree-LSTM to see in the syntax tree of a function whether it returns a value, on your machine.

The trees come from the functions in your Python's standard library, each of another shape. A vertex function declares
once how a vertex computes its state. The trees are data, and a batch of them is computed level by level, whatever their
shapes, forward and backward. The tree has the kind of each part and nothing else, neither names nor numbers.

    python examples/syntax_trees.py --output demo-out

It trains on some files of the library, and prints how often it is right about functions of the others. For comparison
it prints how often the more frequent answer would be right. It writes a timeline to look at.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import asyncflow as af

LARGEST = 120
"""Vertices a tree may have."""

KINDS = sorted(name for name, kind in vars(ast).items() if isinstance(kind, type) and issubclass(kind, ast.AST))
"""Kinds of vertices, by name."""

# -- the trees ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Function:
    """The syntax tree of a function, the kind of each vertex, and whether it returns a value."""

    tree: af.InputGraph
    kinds: NDArray[np.int64]
    returns: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Several functions: their trees in one graph, the kind of each vertex, and the answers."""

    trees: af.InputGraph
    kinds: NDArray[np.int64]
    returns: NDArray[np.float32]

    @classmethod
    def of(cls, functions: Sequence[Function]) -> Batch:
        """The functions as one batch."""
        return cls(
            af.InputGraph.batch([function.tree for function in functions]),
            np.concatenate([function.kinds for function in functions]),
            np.array([function.returns for function in functions], np.float32),
        )


def read_functions(most_files: int | None = None) -> tuple[list[Function], list[Function]]:
    """Return the functions of the standard library to learn from, and the held-out functions of a fifth of its
    files.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:most_files]
    train: list[Function] = []
    held_out: list[Function] = []
    for number, file in enumerate(files):
        (held_out if number % 5 == 4 else train).extend(functions_in(ast.parse(file.read_bytes())))
    if not train or not held_out:
        raise SystemExit(f"too few functions in {sysconfig.get_path('stdlib')}")
    return train, held_out


def functions_in(module: ast.Module) -> Iterator[Function]:
    """The functions of a module that are neither too short to tell nor too long to wait for."""
    number = {name: place for place, name in enumerate(KINDS)}
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef):
            continue
        vertices = list(ast.walk(function))
        if not 10 <= len(vertices) <= LARGEST:
            continue
        # Children are shared in Python's trees, as `Load` is: each is a vertex of its own here.
        parents, kinds = [-1], [number["FunctionDef"]]
        waiting: list[tuple[ast.AST, int]] = [(function, 0)]
        while waiting:
            node, place = waiting.pop()
            for child in ast.iter_child_nodes(node):
                waiting.append((child, len(parents)))
                parents.append(place)
                kinds.append(number[type(child).__name__])
        yield Function(af.InputGraph.from_parents(parents), np.array(kinds), returns_a_value(function))


def returns_a_value(function: ast.FunctionDef) -> bool:
    """Return True if one of its own return statements has a value; inner functions do not count."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Return) and node.value is not None:
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))
    return False


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """A graph that reads a batch of trees."""

    graph: af.Graph
    trees: af.InputGraph
    kinds: af.Tensor
    returns: af.Tensor
    loss: af.Tensor
    right: af.Tensor
    train: af.Node

    def feeds(self, batch: Batch) -> dict[af.Tensor, object]:
        """The batch as feeds."""
        return {**self.trees.feeds(batch.trees), self.kinds: batch.kinds, self.returns: batch.returns}


def build(hidden: int, rate: float) -> Model:
    """A child-sum Tree-LSTM (Tai et al. 2015), and a yes or no at the root."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> af.Variable:
        values = rng.normal(size=shape) / math.sqrt(shape[0])
        return af.Variable(values.astype(np.float32), name=name)

    table, w, u = weight("kinds", len(KINDS), hidden), weight("w", hidden, 4 * hidden), weight("u", hidden, 3 * hidden)
    forget, answer = weight("forget", hidden, hidden), weight("answer", hidden)
    bias = af.Variable(np.zeros(4 * hidden, np.float32), name="bias")
    part = af.spec("float32", (hidden,))

    @af.vertex_function(state=(part, part))
    def tree_lstm(v: af.Vertex) -> None:
        x = v.pull() @ w + bias
        gates, own_forget = x[: 3 * hidden], x[3 * hidden :]
        state = v.gather_all(lambda child: child[0])
        kept = v.gather_all(lambda child: af.sigmoid(own_forget + child[0] @ forget) * child[1])
        gates = gates + state @ u
        write, out, new = gates[:hidden], gates[hidden : 2 * hidden], gates[2 * hidden :]
        cell = kept + af.sigmoid(write) * af.tanh(new)
        v.scatter((af.sigmoid(out) * af.tanh(cell), cell))

    with af.Graph() as graph:
        trees = af.InputGraph.placeholder()
        kinds, returns = af.placeholder("int64", (None,)), af.placeholder("float32", (None,))
        roots, _ = af.vertex_map(tree_lstm, trees, af.gather(table, kinds)).roots
        score = roots @ answer
        # The loss of a yes or no, written so that nothing overflows.
        loss = af.mean(af.maximum(score, 0.0) - score * returns + af.log1p(af.exp(-af.abs(score))))
        right = af.sum(af.astype((score > 0) == (returns > 0.5), "int64"))
        train = af.optim.minimize(loss, [table, w, u, forget, answer, bias], partial(af.optim.adam, learning_rate=rate))
    return Model(graph, trees, kinds, returns, loss, right, train)


async def teach(model: Model, train: Sequence[Function], held_out: Sequence[Function], batch: int, steps: int) -> float:
    """Trains, and gives the share of functions that were held out about which the model is right."""
    rng = np.random.default_rng(1)
    async with af.Session(model.graph) as session:
        for step in range(steps):
            chosen = Batch.of([train[place] for place in rng.choice(len(train), batch, replace=False)])
            loss, _ = await session.run((model.loss, model.train), model.feeds(chosen))
            if step % max(1, steps // 10) == 0:
                print(f"  step {step:4} of {steps}  loss {loss:.3f}")
        right = [
            await session.run(model.right, model.feeds(Batch.of(held_out[first : first + 64])))
            for first in range(0, len(held_out), 64)
        ]
    return float(sum(right)) / len(held_out)


def main(argv: Sequence[str] | None = None) -> int:
    """Gives 0 if the model is right often enough about functions that it has not seen, else 1."""
    parser = argparse.ArgumentParser(description="Teaches a Tree-LSTM to read syntax trees.")
    parser.add_argument("--output", type=Path, default=Path("demo-out"), help="folder for the timeline")
    parser.add_argument("--steps", type=int, default=100, help="steps of training")
    parser.add_argument("--batch", type=int, default=32, help="functions a step")
    parser.add_argument("--hidden", type=int, default=64, help="extent of a state")
    parser.add_argument("--files", type=int, help="read only so many files of the library")
    parser.add_argument("--target", type=float, default=0.95, help="share that is to be right at the end")
    options = parser.parse_args(argv)

    print(f"reading the standard library of Python {sys.version.split()[0]} ...")
    train, held_out = read_functions(options.files)
    vertices = sum(len(function.kinds) for function in train)
    print(f"  {len(train)} functions with {vertices} vertices, and {len(held_out)} held out")

    print(f"training for {options.steps} steps of {options.batch} functions ...")
    started = time.perf_counter()
    model = build(options.hidden, rate=0.005)
    with af.Trace() as trace:
        share = af.run(teach(model, train, held_out, min(options.batch, len(train)), options.steps))
    took = time.perf_counter() - started
    yes = float(np.mean([function.returns for function in held_out]))
    passed = share >= options.target
    print(
        f"\n{'PASS' if passed else 'FAIL'}: right about {share:.1%} of the functions it has not seen, after "
        f"{took:.0f} s; always the same answer would be right about {max(yes, 1 - yes):.1%}, "
        f"and {options.target:.0%} was the aim"
    )

    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "syntax_trees.html"
    af.profiler.save(trace, path)
    print(f"timeline: open {path.resolve().as_uri()} in a browser")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
