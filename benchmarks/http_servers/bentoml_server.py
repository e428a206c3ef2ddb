"""BentoML, JSON; it learns how long to wait. It imports the service by this module's name."""

from __future__ import annotations

import os
import sys
from typing import Any

import bentoml
import numpy as np

from benchmarks.http_servers.lstm import MOST, model


@bentoml.service(workers=1, traffic={"timeout": 60, "max_concurrency": 2 * MOST})
class BentoLstm:
    """Takes and gives JSON."""

    @bentoml.api(batchable=True, max_batch_size=MOST, max_latency_ms=60_000)
    def predict(self, x: list[Any]) -> list[Any]:
        """A batch."""
        found: list[Any] = model(np.asarray(x, np.float32)).tolist()
        return found


if __name__ == "__main__":
    service = "benchmarks.http_servers.bentoml_server:BentoLstm"
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", "serve", service, "--port", sys.argv[1]])
