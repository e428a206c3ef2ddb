"""The order in which an asynchronous device is given its work: a kernel that waits for a copy holds up its stream."""

from __future__ import annotations

import numpy as np

import asyncflow as af
from asyncflow.testing import virtual_clock

SIZE = 2048
KERNELS = 6


def _seconds(*, first: str) -> float:
    """Return the time of two chains of products on two cards, both summed on the second; the copy is asked for first or
    last.
    """
    with af.Graph() as graph:
        x = af.placeholder("float32", (SIZE, SIZE))
        ends = []
        for device in ("sim:0", "sim:1"):
            with af.device(device):
                y = x
                for _ in range(KERNELS):
                    y = y @ x
                ends.append(y)
        with af.device("sim:1"):
            sums = [af.sum(end) for end in (ends if first == "other" else reversed(ends))]

    async def main() -> None:
        async with af.Session(graph) as session:
            await session.run(sums, {x: np.zeros((SIZE, SIZE), np.float32)})

    with virtual_clock("2 x v100, nvlink2", shapes_only=True, host="c++") as clock:
        clock.run(main())
        return clock.now_s


def test_ready_kernels_do_not_queue_behind_a_waiting_copy() -> None:
    product_s = 2 * SIZE**3 / 15.7e12
    for first in ("other", "own"):
        # The chains run side by side: one after the other they would take twice as long.
        assert _seconds(first=first) < 1.5 * KERNELS * product_s


def test_a_loop_that_is_always_ready_does_not_keep_out_what_arrives() -> None:
    """Arriving values go to the scheduler whenever the device has to catch up with its launches."""
    done: dict[str, float] = {}

    @af.op(outputs=af.spec("int32", ()))
    async def note(value: int, *, name: str) -> int:
        done[name] = clock.now_s
        return value

    with af.Graph() as graph:
        x = af.placeholder("float32", (256, 256))
        with af.device("sim:0"):
            sent = x @ x
        with af.device("sim:1"):
            received = af.sum(sent)
            count, y = af.while_loop(lambda i, y: i < 150, lambda i, y: (i + 1, y @ x @ x @ x @ x), (np.int32(0), x))
        fetches = [note(af.astype(received, "int32"), name="received"), note(count, name="loop"), y]

    async def main() -> None:
        async with af.Session(graph) as session:
            await session.run(fetches, {x: np.zeros((256, 256), np.float32)})

    with virtual_clock("2 x v100, nvlink2") as clock:
        clock.run(main())
    assert done["received"] < 0.25 * clock.now_s
