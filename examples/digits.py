"""Teaches a small residual network to read handwritten digits, in less than a minute.

The digits are scikit-learn's: 1,797 images of 8 by 8 pixels (`pip install scikit-learn`). A fifth of them is held out,
as many of each digit. The network is of convolutions with batch normalisation: one graph trains it, with the statistics
of each batch, and reads digits with the running statistics.

    python examples/digits.py --output demo-out

It trains five networks, from different weights, and prints how many of the held-out digits each one reads. It saves the
weights of each network as a step of a checkpoint, and draws which digits were taken for which.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import asyncflow as af

BATCH, RATE = 64, 0.01
"""Images in a step, and the learning rate of the first steps, which falls to 0 along a cosine."""
SMOOTHING = 0.1
"""Share of each label that goes to all digits alike."""
CHANNELS = (16, 24, 32)
"""Channels of the first layer and behind each residual block; from the second block on, a block halves the image."""

Images = NDArray[np.float32]
Labels = NDArray[np.int64]

# -- the digits --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Digits:
    """Images ``(number, 1, height, width)`` of values from 0 to 1, and the digits that they show."""

    train: tuple[Images, Labels]
    held_out: tuple[Images, Labels]


def read_digits() -> Digits:
    """Return scikit-learn's digits."""
    if importlib.util.find_spec("sklearn") is None:
        raise SystemExit("the digits are scikit-learn's: pip install scikit-learn")
    from sklearn.datasets import load_digits  # noqa: PLC0415  (optional)

    pixels, labels = load_digits(return_X_y=True)
    return parted((pixels.reshape(-1, 1, 8, 8) / 16).astype(np.float32), labels.astype(np.int64))


def parted(images: Images, labels: Labels) -> Digits:
    """Hold out a fifth of the images of each digit, the same in every call."""
    random = np.random.default_rng(0)
    rows = [random.permutation(np.flatnonzero(labels == digit)) for digit in range(10)]
    held_out = np.concatenate([each[: len(each) // 5] for each in rows])
    train = np.concatenate([each[len(each) // 5 :] for each in rows])
    return Digits((images[train], labels[train]), (images[held_out], labels[held_out]))


def moved(images: Images, random: np.random.Generator) -> Images:
    """Move each image by up to a pixel up or down and left or right."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[2:], axis=(2, 3))
    down, right = random.integers(0, 3, (2, len(images)))
    return windows[np.arange(len(images)), :, down, right]


# -- the network -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Layers:
    """Makes the layers of a network; its variables are made by the first network, and shared by the second."""

    random: np.random.Generator
    variables: dict[str, af.Variable] = field(default_factory=dict)
    weights: list[af.Variable] = field(default_factory=list)

    def variable(self, name: str, start: Callable[[], NDArray[np.float32]], *, is_trained: bool = True) -> af.Variable:
        """Return the variable of that name, which is made at the first call."""
        if name not in self.variables:
            self.variables[name] = af.Variable(start(), name=name)
            self.weights += [self.variables[name]] * is_trained
        return self.variables[name]

    def conv(self, x: af.Tensor, name: str, filters: int, size: int, stride: int, training: bool) -> af.Tensor:
        """A convolution, normalised over the batch."""
        assert x.shape is not None
        channels = x.shape[1] or 0
        shape = (filters, channels, size, size)
        w = self.variable(f"{name}/weight", lambda: af.nn.he_normal(self.random, shape))
        y = af.nn.conv2d(x, w, stride=stride, padding=size // 2)
        return af.nn.batch_norm(
            y,
            self.variable(f"{name}/mean", lambda: np.zeros(filters, np.float32), is_trained=False),
            self.variable(f"{name}/variance", lambda: np.ones(filters, np.float32), is_trained=False),
            self.variable(f"{name}/scale", lambda: np.ones(filters, np.float32)),
            self.variable(f"{name}/shift", lambda: np.zeros(filters, np.float32)),
            training,
        )

    def block(self, x: af.Tensor, name: str, filters: int, stride: int, training: bool) -> af.Tensor:
        """Two convolutions, and the input around them."""
        y = af.relu(self.conv(x, f"{name}/first", filters, 3, stride, training))
        y = self.conv(y, f"{name}/second", filters, 3, 1, training)
        around = x if stride == 1 else self.conv(x, f"{name}/around", filters, 1, stride, training)
        return af.relu(y + around)

    def logits(self, images: af.Tensor, training: bool) -> af.Tensor:
        """The network: how much each image looks like each digit."""
        x = af.relu(self.conv(images, "stem", CHANNELS[0], 3, 1, training))
        for number, filters in enumerate(CHANNELS):
            x = self.block(x, f"block{number}", filters, 1 if number == 0 else 2, training)
        x = af.mean(x, axis=(2, 3))
        w = self.variable("digits/weight", lambda: af.nn.he_normal(self.random, (CHANNELS[-1], 10)) * np.float32(0.1))
        return af.matmul(x, w) + self.variable("digits/bias", lambda: np.zeros(10, np.float32))


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A graph: fetch `step` to train on `images` and `labels`, and `found` to read `images`."""

    graph: af.Graph
    images: af.Tensor
    labels: af.Tensor
    rate: af.Tensor
    loss: af.Tensor
    step: af.Node
    found: af.Tensor


def new_network(shape: Sequence[int], seed: int) -> Network:
    """Build a network for images of this shape."""
    layers = Layers(np.random.default_rng(seed))
    with af.Graph() as graph:
        images = af.placeholder("float32", (None, *shape), name="images")
        labels = af.placeholder("int64", (None,), name="labels")
        rate = af.placeholder("float32", (), name="rate")
        # Labels that are not sure keep the network from learning single images by heart.
        smooth = af.one_hot(labels, 10) * np.float32(1 - SMOOTHING) + np.float32(SMOOTHING / 10)
        loss = af.mean(af.nn.softmax_cross_entropy(layers.logits(images, training=True), smooth))
        step = af.optim.adam(zip(af.gradients(loss, layers.weights), layers.weights, strict=True), rate)
        found = af.argmax(layers.logits(images, training=False), axis=1)
    return Network(graph, images, labels, rate, loss, step, found)


async def teach(
    network: Network, session: af.Session, digits: Digits, epochs: int, report: Callable[[float], None]
) -> Labels:
    """Train the network, and return the digits that it reads in the held-out images."""
    random = np.random.default_rng(0)
    images, labels = digits.train
    steps = max(1, len(labels) // BATCH)
    train = session.prepare([network.loss, network.step], [network.images, network.labels, network.rate])
    for epoch in range(epochs):
        order = random.permutation(len(labels))
        for number in range(steps):
            chosen = order[number * BATCH : (number + 1) * BATCH]
            share = (epoch + number / steps) / epochs
            rate = np.float32(RATE * (1 + math.cos(math.pi * share)) / 2)
            loss, _ = await train(moved(images[chosen], random), labels[chosen], rate)
            report(float(loss))
    found: Labels = await session.run(network.found, {network.images: digits.held_out[0]})
    return found


# -- what the user sees ------------------------------------------------------------------------------------------------


@contextmanager
def progress(title: str, steps: int) -> Iterator[Callable[[float], None]]:
    """Yield a function that shows a further step and its loss: as a bar on a terminal, else nothing."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda loss: None
        return

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415  (optional)

    state = TextColumn("step {task.completed} of {task.total}  loss {task.fields[loss]:.3f}")
    with Progress(TextColumn(f"  {title}"), BarColumn(), state, TimeElapsedColumn(), transient=True) as bars:
        bar = bars.add_task("", total=steps, loss=math.nan)
        yield lambda loss: bars.update(bar, advance=1, loss=loss)


def picture_of(confusion: NDArray[np.int64]) -> str:
    """Draw how often each digit was taken for which: a square each, darker for more, as SVG."""
    size, parts = 40, []
    for digit, taken_for in np.ndindex(confusion.shape):
        count = int(confusion[digit, taken_for])
        share = count / max(1, int(confusion[digit].sum()))
        x, y = (taken_for + 1) * size, (digit + 1) * size
        colour = f"rgb({round(255 - 200 * share)},{round(255 - 155 * share)},255)"
        parts.append(f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="{colour}" stroke="#ccc"/>')
        if count:
            ink = "#fff" if share > 0.5 else "#000"
            parts.append(f'<text x="{x + size // 2}" y="{y + 25}" fill="{ink}">{count}</text>')
    for digit in range(len(confusion)):
        place = (digit + 1) * size + size // 2
        parts.append(f'<text x="{place}" y="25" font-weight="bold">{digit}</text>')
        parts.append(f'<text x="{size // 2}" y="{place + 5}" font-weight="bold">{digit}</text>')
    whole = (len(confusion) + 1) * size
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{whole + size}"'
    told = f'<text x="{whole // 2}" y="{whole + 25}">rows: the digit; columns: taken for</text>'
    return (
        f'{head} font-family="sans-serif" font-size="14" text-anchor="middle">\n{told}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def at_least_one(text: str) -> int:
    """A number on the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1")
    return int(text)


async def demonstrate(trainings: int, epochs: int, target: float, output: Path) -> int:
    """Train the networks and report."""
    digits = read_digits()
    images, labels = digits.held_out
    print(f"{len(digits.train[1])} digits to learn from, {len(labels)} held out")
    shares, confusion, started = [], np.zeros((10, 10), np.int64), time.perf_counter()
    for seed in range(trainings):
        network = new_network(images.shape[1:], seed)
        async with af.Session(network.graph) as session:
            steps = epochs * max(1, len(digits.train[1]) // BATCH)
            with progress(f"network {seed + 1} of {trainings}", steps) as report:
                found = await teach(network, session, digits, epochs, report)
            await session.save(output / "digits", step=seed + 1)
        shares.append(100 * float(np.mean(found == labels)))
        np.add.at(confusion, (labels, found), 1)
        print(f"  network {seed + 1}: reads {shares[-1]:.1f} % of the held-out digits")
    seconds, mean = time.perf_counter() - started, float(np.mean(shares))
    passed = mean >= target
    verdict = "PASS" if passed else "FAIL"
    print(f"{verdict}: {mean:.2f} % in the mean of {trainings} (target {target} %), in {seconds:.0f} s")
    path = output / "digits.svg"
    path.write_text(picture_of(confusion), encoding="utf-8")
    print(f"weights of the networks: {output / 'digits'}\nconfusions: open {path.resolve().as_uri()} in a browser")
    return 0 if passed else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if the networks read enough of the held-out digits, 1 if not, and 130 if interrupted."""
    parser = argparse.ArgumentParser(description="Teaches small residual networks to read handwritten digits.")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-out"), help="folder for the checkpoint and the picture"
    )
    parser.add_argument("--trainings", type=at_least_one, default=5, help="networks to train")
    parser.add_argument("--epochs", type=at_least_one, default=18, help="times that each sees all digits")
    parser.add_argument("--target", type=float, default=98.5, help="percent of the held-out digits to read")
    options = parser.parse_args(argv)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        return af.run(demonstrate(options.trainings, options.epochs, options.target, options.output))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
