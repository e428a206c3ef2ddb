"""Training that is killed, again and again, and goes on: a two-layer network learns the sine, in steps that survive.

``python -m examples.goes_on`` trains in a process of its own, which is killed three times while it writes a checkpoint;
then training comes to its end. Each start begins with the latest checkpoint. Later steps are repeated with the same
random numbers, so the last loss is equal to the bit to the loss of an undisturbed training. These numbers depend on the
number of runs: this is why the saver is asked for the step, and not a run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import asyncflow as af

STEPS = 300
EVERY = 20
PATIENCE_S = 100.0


def build() -> tuple[af.Graph, list[af.Tensor | af.Node]]:
    """Build the graph, and a step: its loss, and its update of the weights."""
    rng = np.random.default_rng(0)
    with af.Graph(seed=7) as graph:
        first = af.Variable(rng.normal(size=(1, 32)).astype(np.float32), name="first")
        bias = af.Variable(np.zeros(32, np.float32), name="bias")
        second = af.Variable((rng.normal(size=(32, 1)) / 6).astype(np.float32), name="second")
        x = af.random.uniform((64, 1), dtype="float32") * np.float32(6) - np.float32(3)
        loss = af.mean(af.square(af.matmul(af.tanh(af.matmul(x, first) + bias), second) - af.sin(x)))
        weights = [first, bias, second]
        learned = af.optim.adam(zip(af.gradients(loss, weights), weights, strict=True), 0.01)
    return graph, [loss, learned]


async def train(root: Path, steps: int = STEPS, dies_after: int | None = None) -> str:
    """Train until `steps` steps have been made, earlier ones included, and return the last loss to the bit.

    Args:
        root: the directory of the checkpoints.
        steps: number of steps in all.
        dies_after: kill this process once it has begun to write this number of checkpoints.
    """
    graph, step = build()
    saver = af.Saver(root, every_steps=EVERY, keep=2)
    begun = 0
    async with af.Session(graph, restore=saver) as session:
        print(f"begins after step {saver.step}", flush=True)
        loss = np.float32(np.nan)
        for number in range(saver.step + 1, steps + 1):
            loss, _ = await session.run(step)
            if await saver.maybe_save(number):
                print(f"step {number}: loss {loss:.5f}", flush=True)
                begun += 1
                if begun == dies_after:
                    os.kill(os.getpid(), signal.SIGKILL)
    print(f"ends with a loss of {loss:.5f}", flush=True)
    return float(loss).hex()


def killed(root: Path, after: int, steps: int = STEPS) -> None:
    """Start the training as a process, which is killed once it has begun to write `after` checkpoints."""
    command = [sys.executable, "-m", "examples.goes_on", "--train", str(root), "--steps", str(steps)]
    command += ["--dies-after", str(after)]
    folder = Path(__file__).parents[1]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=folder, timeout=PATIENCE_S, check=False)
    print(done.stdout, end="")
    print("killed" if done.returncode == -signal.SIGKILL else f"ended with {done.returncode}", flush=True)


def main() -> None:
    """Kill a training three times, and compare its end with an undisturbed training."""
    parser = argparse.ArgumentParser(description="Training that is killed and goes on.")
    parser.add_argument("--train", type=Path, help="only train, from the checkpoints in this directory")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--dies-after", type=int, help="with --train: be killed at this checkpoint")
    options = parser.parse_args()
    if options.train is not None:
        af.run(train(options.train, options.steps, options.dies_after))
        return
    with tempfile.TemporaryDirectory() as folder:
        for after in (2, 1, 3):
            killed(Path(folder, "killed"), after, options.steps)
        found = asyncio.run(train(Path(folder, "killed"), options.steps))
        print("and the same, from the beginning:")
        expected = asyncio.run(train(Path(folder, "whole"), options.steps))
    print("the same loss, to the bit" if found == expected else f"{found} is not {expected}")


if __name__ == "__main__":
    main()
