"""A producer that is a coroutine of the application's, and consumers that are runs, with a queue between them.

Sentences of different lengths go into a padding queue, which keeps sentences of similar length together. Two trainers
take batches from it, each in runs of its own, and wait if it is empty; the producer waits if the queue is full. Closing
the queue ends both: they take the rest, and then get an error that no more will come.

    python examples/producer_and_consumers.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np

import asyncflow as af

BATCH = 8


def sentences(count: int, seed: int = 0) -> Iterable[np.ndarray]:
    """Word numbers of sentences of 3 to 40 words; a real producer would read them from somewhere, and await that."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield rng.integers(1, 1000, size=rng.integers(3, 41))


async def produce(queue: af.Queue, count: int) -> None:
    """Puts sentences in, as fast as they are taken, and closes the queue."""
    for sentence in sentences(count):
        await queue.put(sentence)
    queue.close_nowait()


async def train(session: af.Session, step: af.Tensor) -> tuple[int, int]:
    """Runs steps until the queue is closed and empty; how many, and how many words they have seen."""
    steps = words = 0
    while True:
        try:
            words += int(await session.run(step))
        except af.QueueClosedError as closed:
            print(f"closed, {closed.left} left")
            return steps, words
        steps += 1


async def main(count: int = 200) -> list[tuple[int, int]]:
    """Two trainers and a producer; what the trainers have seen."""
    queue = af.PaddingQueue(4 * BATCH, af.spec("int64", (None,)), bucket_by=lambda x: len(x) // 8, name="sentences")
    with af.Graph() as graph:
        batch, lengths = queue.dequeue_up_to(BATCH)
        step = af.sum(lengths) + 0 * af.sum(batch)  # a model would learn from the batch here
    async with af.Session(graph) as session, asyncio.TaskGroup() as group:
        trainers = [group.create_task(train(session, step)) for _ in range(2)]
        group.create_task(produce(queue, count))
    return [trainer.result() for trainer in trainers]


if __name__ == "__main__":
    for number, (steps, words) in enumerate(af.run(main())):
        print(f"trainer {number}: {steps} steps, {words} words")
