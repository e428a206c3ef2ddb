"""Compare convolution and pooling with `torch.nn.functional`: ``python -m tests.nn.against_torch 2000 [seed]``.

Each random call is made in float64 with shapes that are known while the graph is built, or open; with channels first,
or last. Gradients of a weighed sum are compared as well. Results and gradients differ by 1e-12 at most, relative to the
largest one.
"""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from typing import Any

import numpy as np

import asyncflow as af
from asyncflow.ops.windows import conv
from tests.nn.layer_cases import FUNCTIONS, LAYOUTS, Case, random_case

TOLERANCE = 1e-12


async def main(count: int, seed: int) -> None:
    """Compare `count` random calls, and print how many there were of each function, and the largest difference."""
    torch: Any = import_module("torch")
    torch.set_num_threads(1)
    worst, counts = 0.0, dict.fromkeys(FUNCTIONS, 0)
    for number in range(count):
        random = np.random.default_rng([seed, number])
        case = random_case(random)
        # Small images go the ways of large ones, too.
        conv.BLOCK_BYTES = int(random.choice([1, 3000, 1 << 20]))
        conv.FEW_TERMS, conv.FEW_OUTPUTS = (int(each) for each in random.choice([0, 100], 2))
        theirs = by_torch(torch, case)
        ours = await by_asyncflow(case, random, weighed(theirs[0].shape))
        assert [x.shape for x in ours] == [x.shape for x in theirs], (number, case)
        for x, y in zip(ours, theirs, strict=True):
            differs = float(np.max(np.abs(x - y), initial=0) / max(1.0, np.max(np.abs(y), initial=0)))
            assert differs <= TOLERANCE, f"call {number} differs by {differs}: {case.name} {case.options}"
            worst = max(worst, differs)
        counts[case.name] += 1
    print(f"{count} calls, seed {seed}: the largest relative difference is {worst:.1e}")
    print(", ".join(f"{name} {n}" for name, n in counts.items()))


def weighed(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Weights of the sum whose gradients are compared."""
    return np.cos(np.arange(np.prod(shape, dtype=int))).reshape(shape)


async def by_asyncflow(
    case: Case, random: np.random.Generator, weights: np.ndarray[Any, Any]
) -> list[np.ndarray[Any, Any]]:
    """The result and the gradients, with channels first."""
    x, *rest = case.arrays
    options, is_last, is_open = dict(case.options), random.random() < 0.3, random.random() < 0.5
    if is_last:
        options["layout"] = LAYOUTS[case.rank]
        x = np.moveaxis(x, -1 - case.rank, -1)
    shape = [None if is_open and random.random() < 0.7 else n for n in x.shape]
    with af.Graph():
        tensors = [af.placeholder("float64", shape), *(af.placeholder("float64", each.shape) for each in rest)]
        y = getattr(af.nn, case.name)(*tensors, **options)
        y = af.moveaxis(y, -1, -1 - case.rank) if is_last else y
        grads = af.gradients(af.sum(y * weights), tensors)
        async with af.Session(devices=["cpu:0"]) as session:
            found, *slopes = await session.run([y, *grads], dict(zip(tensors, [x, *rest], strict=True)))
    return [found, np.moveaxis(slopes[0], -1, -1 - case.rank) if is_last else slopes[0], *slopes[1:]]


def by_torch(torch: Any, case: Case) -> list[np.ndarray[Any, Any]]:
    """The same of PyTorch's."""
    tensors = [torch.tensor(each, requires_grad=True) for each in case.arrays]
    y = getattr(torch.nn.functional, case.name)(*tensors, **case.options)
    grads = torch.autograd.grad((y * torch.tensor(weighed(tuple(y.shape)))).sum(), tensors)
    return [each.detach().numpy() for each in (y, *grads)]


if __name__ == "__main__":
    asyncio.run(main(*map(int, [*sys.argv[1:], "2000", "0"][:2])))
