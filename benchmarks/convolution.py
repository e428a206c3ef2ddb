"""Convolution of images, and its gradients, beside PyTorch: processor time of one thread.

Inputs stay where they are: variables in a session, tensors in PyTorch. Filters are as many as the result has channels,
with padding that keeps the extents. A training step gives the result and the gradients of images and filters.
"""

from __future__ import annotations

from time import process_time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, TORCH, Peers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Array = np.ndarray[Any, Any]

TIME: Final = Figure("processor time", "ms")
TOLERANCE: Final = 1e-3


class Layer(NamedTuple):
    """Sizes of a layer: images are squares, and so are windows."""

    images: int
    channels: int
    extent: int
    filters: int
    window: int

    def __str__(self) -> str:
        images = f"{self.images}x{self.channels}x{self.extent}x{self.extent}"
        return f"{self.filters} filters of {self.window}x{self.window} on {images}"

    def arrays(self) -> list[Array]:
        """Images, filters, and a gradient of the result."""
        random = np.random.default_rng(0)
        n, c, s, o, k = self
        shapes = (n, c, s, s), (o, c, k, k), (n, o, s, s)
        return [random.standard_normal(shape, np.float32) for shape in shapes]


LAYERS: Final = (
    Layer(32, 3, 32, 32, 3),
    Layer(32, 32, 32, 32, 3),
    Layer(32, 64, 16, 64, 3),
    Layer(8, 64, 56, 64, 3),
    Layer(64, 1, 28, 32, 5),
    Layer(32, 256, 8, 256, 3),
)


async def measure(
    peers: Peers = NO_PEERS, *, repeats: int = 9, steps: int = 5, layers: tuple[Layer, ...] = LAYERS
) -> list[Result]:
    """Milliseconds of a forward pass, and of a training step: the least of `steps`."""
    found = []
    for layer in layers:
        padding = layer.window // 2
        with af.Graph() as graph:
            x, w, grad = (af.Variable(each) for each in layer.arrays())
            y = af.nn.conv2d(x, w, padding=padding)
            training = [y, *af.gradients(y, [x, w], grad)]
        async with af.Session(graph, devices=["cpu:0"]) as session:
            for what, fetches in (("forward", [y]), ("training", training)):
                trials: dict[str, Trial] = {ASYNCFLOW: _trial(session.prepare(fetches, []), steps)}
                if peers.torch is not None:
                    trials[TORCH] = _trial(_torch(peers.torch, layer, is_training=what == "training"), steps)
                found += await compare("convolution", f"{layer}, {what}", trials, repeats=repeats, tolerance=TOLERANCE)
    return found


def _trial(step: Callable[[], Awaitable[Any]], steps: int) -> Trial:
    async def trial() -> Sample:
        least, results = float("inf"), []
        for _ in range(steps):
            started = process_time()
            results = await step()
            least = min(least, process_time() - started)
        # A few elements of each: sums of whole results would add up their rounding.
        return Sample({TIME: least * 1e3}, np.stack([np.asarray(each).ravel()[:9] for each in results]))

    return trial


def _torch(torch: Any, layer: Layer, *, is_training: bool) -> Callable[[], Awaitable[list[Any]]]:
    x, w, grad = (torch.from_numpy(each) for each in layer.arrays())
    for each in (x, w):
        each.requires_grad_(is_training)

    async def step() -> list[Any]:
        y = torch.nn.functional.conv2d(x, w, padding=layer.window // 2)
        grads = torch.autograd.grad(y, [x, w], grad) if is_training else []
        return [each.detach() for each in (y, *grads)]

    return step
