"""Teaches an LSTM to guess the next word of the documentation of Python's standard library, on your machine.

Sentences differ in length: a batch of them is an input graph of chains, and a vertex function declares once the
computation of a word. In every step the first words of all sentences are computed together, then the second words, and
so on; no sentence is padded. Parts that need no earlier word, such as the product with the embedding, are computed once
for all words. So are parts that no later word needs, such as the guess.

    python examples/word_lstm.py --output demo-out

It trains on most of the sentences, and prints its perplexity on the others: the number of equally likely words that
would be as hard to guess. For comparison it prints the perplexity of a table of word pairs. It writes a timeline to
look at.
"""

from __future__ import annotations

import argparse
import ast
import math
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import asyncflow as af

LONGEST = 60
"""Words that a sentence may have."""

RATE, LAST_RATE = 0.01, 0.0005
"""Learning rates of the first and of the last step."""

TRACED = 4
"""Steps at the end whose timeline is drawn."""

# -- the sentences -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """Sentences to learn from and to be tested on, as numbers of words: 0 begins and ends each, 1 is any rare word."""

    words: list[str]
    train: list[NDArray[np.int64]]
    held_out: list[NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Several sentences: a chain for each, and at each of its vertices a word and the following word."""

    chains: af.InputGraph
    words: NDArray[np.int64]
    following: NDArray[np.int64]

    @classmethod
    def of(cls, sentences: Sequence[NDArray[np.int64]]) -> Batch:
        """The sentences as one batch."""
        return cls(
            af.InputGraph.chain([len(sentence) - 1 for sentence in sentences]),
            np.concatenate([sentence[:-1] for sentence in sentences]),
            np.concatenate([sentence[1:] for sentence in sentences]),
        )


def read_text(known: int, most_files: int | None = None) -> Text:
    """Reads the docstrings of the standard library; a tenth of their sentences is held out, as the shuffle has it."""
    files = sorted(library_files())[:most_files]
    found = sorted({sentence for file in files for sentence in sentences_in(file.read_bytes())})
    if len(found) < 40:
        raise SystemExit(f"too little documentation in {sysconfig.get_path('stdlib')}: {len(found)} sentences")
    np.random.default_rng(0).shuffle(found)
    held_out, train = found[: len(found) // 10], found[len(found) // 10 :]
    counts = Counter(word for sentence in train for word in sentence)
    words = ["\n", "?", *(word for word, _ in counts.most_common(known))]
    number = {word: place for place, word in enumerate(words)}

    def encoded(sentence: tuple[str, ...]) -> NDArray[np.int64]:
        return np.array([0, *(number.get(word, 1) for word in sentence), 0])

    return Text(words, [encoded(sentence) for sentence in train], [encoded(sentence) for sentence in held_out])


def library_files() -> Iterator[Path]:
    """The library's modules, without its tests and whatever was installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in root.rglob("*.py"):
        parts = file.relative_to(root).with_suffix("").parts
        if parts[0] in sys.stdlib_module_names and not {"test", "tests", "idle_test"} & set(parts):
            yield file


def sentences_in(source: bytes) -> Iterator[tuple[str, ...]]:
    """The words and marks of each sentence of its docstrings, in small letters."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
                    words = re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", sentence.lower())
                    if re.fullmatch(r"[A-Z][ -~]*[.!?]", sentence) and 4 <= len(words) <= LONGEST:
                        yield tuple(words)


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """A graph that reads a batch of sentences."""

    graph: af.Graph
    chains: af.InputGraph
    words: af.Tensor
    following: af.Tensor
    rate: af.Tensor
    costs: af.Tensor
    """Loss of each following word, in nats."""
    loss: af.Tensor
    train: af.Node

    def feeds(self, batch: Batch) -> dict[af.Tensor, object]:
        """The batch as feeds."""
        return {**self.chains.feeds(batch.chains), self.words: batch.words, self.following: batch.following}


def build(words: int, hidden: int) -> Model:
    """An LSTM along each sentence, and a score for each word that may follow: how its state agrees with the word's."""
    rng = np.random.default_rng(0)
    table = af.Variable(0.1 * rng.standard_normal((words, hidden), np.float32), name="embedding")
    weights = af.nn.lstm_weights(hidden, hidden, seed=1)
    bias = af.Variable(np.zeros(words, np.float32), name="bias")
    part = af.spec("float32", (hidden,))

    @af.vertex_function(state=(part, part), children=1)
    def lstm(v: af.Vertex) -> None:
        seen, state = af.nn.lstm_cell(v.pull("word"), v.gather(0), weights)
        v.scatter(state)
        v.push(seen @ af.matrix_transpose(table) + bias, "scores")

    with af.Graph() as graph:
        chains, rate = af.InputGraph.placeholder(), af.placeholder("float32", ())
        numbers, following = af.placeholder("int64", (None,)), af.placeholder("int64", (None,))
        found = af.vertex_map(lstm, chains, {"word": af.embedding(table, numbers)})
        costs = af.nn.softmax_cross_entropy(found.pushes["scores"], following)
        loss = af.mean(costs)
        variables = [table, *weights, bias]
        grads, _ = af.optim.clip_by_global_norm(af.gradients(loss, variables), 1.0)
        train = af.optim.adam(zip(grads, variables, strict=True), rate)
    return Model(graph, chains, numbers, following, rate, costs, loss, train)


async def teach(session: af.Session, model: Model, text: Text, batch: int, steps: int, trace: af.Trace) -> None:
    """Trains on sentences drawn at random; the last few steps are recorded in `trace`."""
    rng = np.random.default_rng(1)
    for step in range(steps):
        chosen = Batch.of([text.train[place] for place in rng.choice(len(text.train), batch, replace=False)])
        rate = np.float32(RATE * (LAST_RATE / RATE) ** (step / steps))
        feeds = {**model.feeds(chosen), model.rate: rate}
        recorded = trace if step >= steps - TRACED else None
        loss, _ = await session.run((model.loss, model.train), feeds, trace=recorded)
        if step % max(1, steps // 10) == 0:
            print(f"  step {step:4} of {steps}  perplexity {math.exp(loss):.1f}")


async def cost_of(session: af.Session, model: Model, sentences: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
    """Return the loss of each word of the sentences."""
    batches = [Batch.of(sentences[first : first + 256]) for first in range(0, len(sentences), 256)]
    return np.concatenate([await session.run(model.costs, model.feeds(batch)) for batch in batches])


def cost_by_pairs(text: Text) -> float:
    """Return the mean loss of a held-out word, given the word before it, with Witten-Bell smoothing."""
    counts = np.zeros((len(text.words), len(text.words)))
    for sentence in text.train:
        np.add.at(counts, (sentence[:-1], sentence[1:]), 1)
    alone = (counts.sum(axis=0) + 1) / (counts.sum() + len(counts))
    kinds = (counts > 0).sum(axis=1, keepdims=True)
    shares = (counts + np.maximum(kinds, 1) * alone) / (counts.sum(axis=1, keepdims=True) + np.maximum(kinds, 1))
    return float(np.mean(np.concatenate([-np.log(shares[each[:-1], each[1:]]) for each in text.held_out])))


async def learn(model: Model, text: Text, batch: int, steps: int, trace: af.Trace) -> float:
    """Trains, prints how it reads a sentence, and gives what a word that is held out costs on average."""
    async with af.Session(model.graph) as session:
        await teach(session, model, text, batch, steps, trace)
        costs = await cost_of(session, model, text.held_out)
        print("\na sentence it has not seen, with the bits that each word costs:")
        shown = zip(text.held_out[0][1:-1], costs / math.log(2), strict=False)
        print("  " + " ".join(f"{text.words[word]}({bits:.1f})" for word, bits in shown))
    return float(costs.mean())


def main(argv: Sequence[str] | None = None) -> int:
    """Gives 0 if the model is sure enough about sentences that it has not seen, else 1."""
    parser = argparse.ArgumentParser(
        description="Teaches an LSTM to guess words of the standard library's documentation."
    )
    parser.add_argument("--output", type=Path, default=Path("demo-out"), help="folder for the timeline")
    parser.add_argument("--steps", type=int, default=800, help="steps of training")
    parser.add_argument("--batch", type=int, default=32, help="sentences a step")
    parser.add_argument("--hidden", type=int, default=128, help="extent of the state")
    parser.add_argument("--words", type=int, default=1000, help="how many words it knows; the others are alike")
    parser.add_argument("--files", type=int, help="read only so many files of the library")
    parser.add_argument("--target", type=float, default=44.0, help="perplexity that it may have at the end")
    options = parser.parse_args(argv)

    print(f"reading the documentation of Python {sys.version.split()[0]}'s standard library ...")
    text = read_text(options.words, options.files)
    total = sum(len(sentence) - 1 for sentence in text.train)
    print(f"  {len(text.train)} sentences with {total} words, and {len(text.held_out)} held out")

    print(f"training for {options.steps} steps of {options.batch} sentences ...")
    started = time.perf_counter()
    model = build(len(text.words), options.hidden)
    trace = af.Trace()
    found = af.run(learn(model, text, min(options.batch, len(text.train)), options.steps, trace))
    took = time.perf_counter() - started
    perplexity, pairs = math.exp(found), math.exp(cost_by_pairs(text))
    passed = perplexity <= options.target
    print(
        f"\n{'PASS' if passed else 'FAIL'}: its perplexity on sentences it has not seen is {perplexity:.1f}, after "
        f"{took:.0f} s; {pairs:.1f} by a table of word pairs, and at most {options.target:.1f} was the aim"
    )

    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "word_lstm.html"
    af.profiler.save(trace, path)
    print(f"timeline: open {path.resolve().as_uri()} in a browser")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
