"""Ray Serve: a proxy, and one replica process."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.http_servers.lstm import MOST, WAIT_S, model


class RayLstm:
    """Takes and gives bytes."""

    @serve.batch(max_batch_size=MOST, batch_wait_timeout_s=WAIT_S)
    async def predict(self, rows: list[Any]) -> list[Any]:
        """A batch."""
        return list(model(np.stack(rows)))

    async def __call__(self, request: Request) -> Response:
        """One request."""
        return Response((await self.predict(np.frombuffer(await request.body(), np.float32))).tobytes())


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=2)
    serve.start(http_options={"port": int(sys.argv[1])})
    deployment: Any = serve.deployment(max_ongoing_requests=2 * MOST)(RayLstm)
    serve.run(deployment.bind(), blocking=True)
