"""`SessionStatistics`: what a session holds at one moment."""

from __future__ import annotations

from typing import NamedTuple


class SessionStatistics(NamedTuple):
    """Counts of what a session holds at one moment.

    Attributes:
        runs: runs in flight, streams that are iterated over among them.
        plans: compiled plans that are kept, one for each set of fetches and fed tensors.
        completed: runs that have ended, in whatever way.
        used_bytes: bytes held in the memory of each device, by its name, as ``memory_limit`` counts them. On a CUDA
            device that is all of this session there, in pieces of 512 bytes: values of runs, constants, variables,
            captured CUDA graphs, and values fetched by `on_device`, until the first run after their last reference is
            gone. On a CPU it is arrays of 4 KiB or more that runs have made; and, with a limit, all that TensorArrays
            and loops with gradients keep, with what Python takes for each value.
        queued: with `max_runs`, runs that wait for their turn.
        refused: with `max_runs`, runs that were not started, because there were too many or it was too late.
    """

    runs: int
    plans: int
    completed: int
    used_bytes: dict[str, int]
    queued: int = 0
    refused: int = 0


__all__ = ["SessionStatistics"]
