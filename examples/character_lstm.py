"""Teaches an LSTM to write like the documentation of Python's standard library, on your machine, letter by letter.

The text is the paragraphs of the docstrings in your Python's library. Paragraphs differ in length, and so do the loops.
In every training step two CPU devices read a batch of whole paragraphs each, one `while_loop` iteration a letter.
Nothing is computed past a paragraph's end. The gradients run the same loops backward, and Adam changes the
weights. Afterwards a loop that draws one letter after the other is streamed, so that you see it write.

    python examples/character_lstm.py --output demo-out

It prints the bits for each letter of unseen paragraphs, beside the bits of a table of letter pairs, and writes a
timeline to look at.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import math
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import asyncflow as af

DEVICES = ("cpu:0", "cpu:1")
"""Each reads its own part of every batch."""

LONGEST = 160
"""Letters a paragraph may have."""

RATE, LAST_RATE = 0.02, 0.004
"""Learning rates of the first and of the last step."""

TRACED = 4
"""Steps at the end whose timeline is drawn."""

# -- the text ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """Paragraphs to learn from and to be tested on. Letter 0 stands before and behind each."""

    alphabet: str
    train: list[str]
    held_out: list[str]

    def encode(self, paragraph: str) -> list[int]:
        """Numbers of its letters, between two zeros."""
        return [0, *(self.alphabet.index(letter) for letter in paragraph), 0]

    def batch(self, paragraphs: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The letters, a column for each paragraph, and how many letters are to be guessed in each."""
        columns = [self.encode(paragraph) for paragraph in paragraphs]
        letters = np.zeros((max(map(len, columns)), len(columns)), np.int64)
        for place, column in enumerate(columns):
            letters[: len(column), place] = column
        return letters, np.array([len(column) - 1 for column in columns])


def read_text(most_files: int | None = None) -> Text:
    """Reads the docstrings of the standard library; a shuffled twentieth of their paragraphs is held out."""
    found = dict.fromkeys(
        paragraph for file in islice(library_files(), most_files) for paragraph in paragraphs(file.read_bytes())
    )
    if len(found) < 40:
        raise SystemExit(f"too little documentation in {sysconfig.get_path('stdlib')}: {len(found)} paragraphs")
    listed = sorted(found)
    np.random.default_rng(0).shuffle(listed)
    alphabet = "\0" + "".join(sorted(set("".join(listed))))
    return Text(alphabet, listed[len(listed) // 20 :], listed[: len(listed) // 20])


def library_files() -> Iterator[Path]:
    """The library's modules, without its tests and whatever was installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if parts[0] in sys.stdlib_module_names and not {"test", "tests", "idle_test"} & set(parts):
            yield file


def paragraphs(source: bytes) -> Iterator[str]:
    """The paragraphs of its docstrings that are sentences, each on one line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for part in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                paragraph = " ".join(part.split())
                if 30 <= len(paragraph) <= LONGEST and re.fullmatch(r"[A-Z][ -~]*\.", paragraph):
                    yield paragraph


# -- the model as a dataflow graph -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """A graph, and the tensors in it that we feed, fetch and stream."""

    graph: af.Graph
    letters: list[af.Tensor]
    """Feed, one a device: numbers of letters. int64[letters,paragraphs]"""
    lengths: list[af.Tensor]
    """Feed, one a device: how many letters of each paragraph are to be guessed. int64[paragraphs]"""
    rate: af.Tensor
    """Feed: the learning rate. float32[]"""
    loss: af.Tensor
    """Fetch: what a letter costs, on average, in nats. float32[]"""
    step: af.Node
    """Run: one step of training."""
    eagerness: af.Tensor
    """Feed: how much likely letters are preferred when writing; 1 writes as it has learned. float32[]"""
    written: af.Tensor
    """Stream: the letters of a new paragraph, the last of them 0. int64[]"""


def build_model(alphabet: int, hidden: int, devices: Sequence[str] = DEVICES, seed: int = 0) -> Model:
    """Every device runs the model over its own paragraphs, with one set of weights, kept on the first device.

    `seed` is that of the letters it will draw.
    """
    random = np.random.default_rng(1)
    embedding = af.Variable(0.3 * random.standard_normal((alphabet, 32), np.float32), name="embedding")
    lstm = af.nn.lstm_weights(32, hidden, seed=2)
    output = af.Variable(af.nn.glorot_uniform(random, hidden, alphabet), name="output")
    bias = af.Variable(np.zeros(alphabet, np.float32), name="bias")
    variables = [embedding, *lstm, output, bias]

    with af.Graph(seed=seed) as graph:
        with af.device(devices[0]):
            table, weights, to_logits, offset = embedding.read(), lstm.read(), output.read(), bias.read()
        cell = partial(af.nn.lstm_cell, weights=weights)

        def cost(letters: af.Tensor, lengths: af.Tensor) -> af.Tensor:
            """Return the sum of losses of all letters."""
            zeros = af.zeros((af.shape(letters)[1], hidden), dtype="float32")
            outputs, _ = af.nn.dynamic_rnn(cell, af.embedding(table, letters[:-1]), (zeros, zeros), lengths)
            costs = af.nn.softmax_cross_entropy(af.matmul(outputs, to_logits) + offset, letters[1:])
            return af.sum(af.where(af.nn.sequence_mask(lengths, af.shape(costs)[0]), costs, 0))

        letters = [af.placeholder("int64", (None, None), name="letters") for _ in devices]
        lengths = [af.placeholder("int64", (None,), name="lengths") for _ in devices]
        costs = []
        for device, mine, ends in zip(devices, letters, lengths, strict=True):
            with af.device(device):
                costs.append(cost(mine, ends))

        rate = af.placeholder("float32", (), name="rate")
        eagerness = af.placeholder("float32", (), name="eagerness")
        with af.device(devices[0]):
            loss = af.sum(af.stack(costs)) / af.astype(af.sum(af.concat(lengths)), "float32")
            grads, _ = af.optim.clip_by_global_norm(af.gradients(loss, variables), 1.0)
            step = af.optim.adam(zip(grads, variables, strict=True), rate)

            streamed = []

            def unfinished(count: af.Tensor, letter: af.Tensor, state: object) -> af.Tensor:
                return (count < LONGEST) & ((letter != 0) | (count == 0))

            def write(
                count: af.Tensor, letter: af.Tensor, state: tuple[af.Tensor, af.Tensor]
            ) -> tuple[af.Tensor, af.Tensor, tuple[af.Tensor, af.Tensor]]:
                seen, state = cell(af.embedding(table, af.reshape(letter, (1,))), state)
                logits = af.reshape(af.matmul(seen, to_logits) + offset, (alphabet,))
                streamed.append(af.random.categorical(logits * eagerness))
                return count + 1, streamed[0], state

            zeros = af.zeros((1, hidden), dtype="float32")
            af.while_loop(unfinished, write, (0, af.constant(0), (zeros, zeros)), name="write")
    return Model(graph, letters, lengths, rate, loss, step, eagerness, streamed[0])


# -- training and writing ----------------------------------------------------------------------------------------------


def feeds_of(model: Model, text: Text, chosen: Sequence[str]) -> dict[af.Tensor, NDArray[np.int64]]:
    """The paragraphs, dealt out to the devices."""
    count = len(model.letters)
    batches = [text.batch(chosen[device::count]) for device in range(count)]
    return {
        **{tensor: letters for tensor, (letters, _) in zip(model.letters, batches, strict=True)},
        **{tensor: lengths for tensor, (_, lengths) in zip(model.lengths, batches, strict=True)},
    }


async def train(session: af.Session, model: Model, text: Text, steps: int, batch: int, trace: af.Trace) -> list[float]:
    """Trains, and gives the loss of every step; the last few are recorded in `trace`."""
    random = np.random.default_rng(3)
    losses = []
    with progress(steps) as report:
        for number in range(steps):
            chosen = [text.train[place] for place in random.choice(len(text.train), batch, replace=False)]
            rate = np.float32(RATE * (LAST_RATE / RATE) ** (number / steps))
            feeds = {**feeds_of(model, text, chosen), model.rate: rate}
            recorded = trace if number >= steps - TRACED else None
            loss, _ = await session.run([model.loss, model.step], feeds, trace=recorded)
            losses.append(float(loss))
            report(number + 1, bits(losses[-1]))
    return losses


async def write(session: af.Session, model: Model, text: Text, eagerness: float) -> str:
    """Writes a paragraph and prints its letters as they come."""
    written = ""
    async for letter in session.stream(model.written, {model.eagerness: np.float32(eagerness)}):
        if letter != 0:
            written += text.alphabet[letter]
            print(text.alphabet[letter], end="", flush=True)
    print()
    return written


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results; losses in nats."""

    losses: list[float]
    held_out: float
    written: list[str]
    seconds: float
    """Of training."""
    trace: af.Trace
    """The last steps of training."""


async def teach(text: Text, *, steps: int, batch: int, hidden: int, devices: Sequence[str], seed: int) -> Outcome:
    """Trains a model, tests it and lets it write."""
    model = build_model(len(text.alphabet), hidden, devices, seed)
    async with af.Session(model.graph, devices=devices) as session:
        trace = af.Trace(detail="region")
        started = time.perf_counter()
        losses = await train(session, model, text, steps, batch, trace)
        seconds = time.perf_counter() - started
        held_out = float(await session.run(model.loss, feeds_of(model, text, text.held_out)))
        print("\nit writes:")
        written = []
        for eagerness in (2.0, 2.0, 1.4, 1.4):
            print("  ", end="")
            written.append(await write(session, model, text, eagerness))
    return Outcome(losses, held_out, written, seconds, trace)


# -- what the user sees ------------------------------------------------------------------------------------------------


def bits(nats: float) -> float:
    """The same amount of information in bits."""
    return nats / math.log(2)


def loss_of_pairs(text: Text) -> float:
    """Return the loss of a held-out letter, in nats, if it is guessed from the letter before it."""
    counts = np.full((len(text.alphabet), len(text.alphabet)), 0.1)
    for paragraph in text.train:
        column = text.encode(paragraph)
        np.add.at(counts, (column[:-1], column[1:]), 1)
    costs = -np.log(counts / counts.sum(axis=1, keepdims=True))
    pairs = [pair for paragraph in text.held_out for pair in pairwise(text.encode(paragraph))]
    return float(np.mean([costs[pair] for pair in pairs]))


@contextmanager
def progress(steps: int) -> Iterator[Callable[[int, float], None]]:
    """A function that shows the step and what a letter costs: as a bar on a terminal, otherwise line by line."""

    def print_line(number: int, cost: float) -> None:
        if number % max(1, steps // 10) == 0:
            print(f"  step {number:4} of {steps}  {cost:.2f} bits a letter")

    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield print_line
        return

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415  (optional)

    state = TextColumn("step {task.completed} of {task.total}  {task.fields[cost]:.2f} bits a letter")
    with Progress(TextColumn(" "), BarColumn(), state, TimeElapsedColumn()) as bars:
        bar = bars.add_task("", total=steps, cost=math.nan)
        yield lambda number, cost: bars.update(bar, completed=number, cost=cost)


def at_least_one(text: str) -> int:
    """A number on the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1")
    return int(text)


def folder(text: str) -> Path:
    """A folder on the command line, which may have to be made."""
    path = Path(text)
    nearest = next(place for place in [path, *path.absolute().parents] if place.exists())
    if not nearest.is_dir():
        raise argparse.ArgumentTypeError(f"{nearest} is no folder")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Gives 0 if letters that were held out cost at most the target, 1 if they cost more, and 130 if interrupted."""
    try:
        return demonstrate(argv)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def demonstrate(argv: Sequence[str] | None) -> int:
    """Reads the command line, trains and reports."""
    parser = argparse.ArgumentParser(description="Teaches an LSTM to write like the standard library's documentation.")
    parser.add_argument("--output", type=folder, default=Path("demo-out"), help="folder for the timelines")
    parser.add_argument("--steps", type=at_least_one, default=500, help="steps of training")
    parser.add_argument("--batch", type=at_least_one, default=16, help="paragraphs a step, at least one a device")
    parser.add_argument("--hidden", type=at_least_one, default=128, help="extent of the LSTM's state")
    parser.add_argument("--devices", nargs="+", default=list(DEVICES), help="each reads a part of the batch")
    parser.add_argument("--files", type=at_least_one, help="read only so many files of the library")
    parser.add_argument("--seed", type=int, default=0, help="of what it writes")
    parser.add_argument("--target", type=float, default=2.6, help="bits that a letter may cost at the end")
    options = parser.parse_args(argv)
    if options.batch < len(options.devices):
        parser.error(f"argument --batch: {len(options.devices)} devices read one paragraph each, or more")

    print(f"reading the documentation of Python {sys.version.split()[0]}'s standard library ...")
    text = read_text(options.files)
    letters = sum(map(len, text.train))
    print(f"  {len(text.train)} paragraphs, {letters} letters, {len(text.alphabet)} different ones")
    if options.batch > len(text.train):
        parser.error(f"argument --batch: there are no more than {len(text.train)} paragraphs")

    print(f"training for {options.steps} steps on {', '.join(options.devices)} ...")
    outcome = af.run(
        teach(
            text,
            steps=options.steps,
            batch=options.batch,
            hidden=options.hidden,
            devices=options.devices,
            seed=options.seed,
        )
    )
    found, pairs = bits(outcome.held_out), bits(loss_of_pairs(text))
    print(
        f"\n{'PASS' if found <= options.target else 'FAIL'}: a letter it has never seen costs {found:.2f} bits after "
        f"{outcome.seconds:.0f} s; {bits(outcome.losses[0]):.2f} at first, {pairs:.2f} by a table of letter pairs, "
        f"and at most {options.target:.2f} was the aim"
    )

    options.output.mkdir(parents=True, exist_ok=True)
    viewers = {".html": "in a browser", ".json.gz": "at https://ui.perfetto.dev"}
    if importlib.util.find_spec("matplotlib") is not None:
        viewers[".png"] = "to see it at a glance"
    for suffix, viewer in viewers.items():
        path = options.output / f"character_lstm{suffix}"
        af.profiler.save(outcome.trace, path)
        print(f"timeline: open {path.resolve().as_uri() if suffix == '.html' else path} {viewer}")
    return 0 if found <= options.target else 1


if __name__ == "__main__":
    sys.exit(main())
