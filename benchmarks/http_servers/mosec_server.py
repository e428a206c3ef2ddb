"""Mosec: its front end in Rust, and one worker process."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from mosec import Server, Worker

from benchmarks.http_servers.lstm import MOST, WAIT_S, model, small_model


class MosecWorker(Worker):
    """Takes and gives bytes."""

    def deserialize(self, data: bytes) -> Any:
        """One row."""
        return np.frombuffer(data, np.float32)

    def serialize(self, data: Any) -> bytes:
        """The bytes of a result."""
        return bytes(data.tobytes())

    def forward(self, data: Any) -> Any:
        """A batch."""
        return list(model(np.stack(data)))


class SmallMosecWorker(MosecWorker):
    """Computes the small model."""

    def forward(self, data: Any) -> Any:
        """A batch."""
        return list(small_model(np.stack(data)))


if __name__ == "__main__":
    worker = SmallMosecWorker if "small" in sys.argv else MosecWorker
    sys.argv = ["mosec", "--port", sys.argv[1]]
    server = Server()
    server.append_worker(worker, max_batch_size=MOST, max_wait_time=int(1000 * WAIT_S))
    server.run()
