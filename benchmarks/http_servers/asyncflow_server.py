"""A plain ASGI application on uvicorn, with httptools and uvloop where they are installed.

Words behind the port: ``unbatched`` has every request computed by itself, ``small`` computes the small model, ``tuned``
spares the garbage collector work, ``limited`` limits the runs in flight and in line, ``shed`` refuses further ones
before they are read, and ``limited-by-uvicorn`` has uvicorn count requests.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import uvicorn

import asyncflow as af
from asyncflow import serving
from benchmarks.http_servers.lstm import MOST, SIZE, SMALL_WEIGHTS, STEPS, WEIGHTS

HEADERS = [(b"content-length", str(4 * SIZE).encode())]


def main() -> None:
    """Serves."""
    is_small = "small" in sys.argv
    weights = af.Variable(SMALL_WEIGHTS if is_small else WEIGHTS, name="weights")

    def small(x: af.Tensor) -> af.Tensor:
        return af.tanh(x @ weights)

    def lstm(x: af.Tensor) -> af.Tensor:
        h = c = af.zeros((SIZE,), dtype="float32")
        for _ in range(STEPS):
            i, f, o, g = af.split(af.concat([x, h]) @ weights, 4)
            c = af.sigmoid(f) * c + af.sigmoid(i) * af.tanh(g)
            h = af.sigmoid(o) * af.tanh(c)
        return h

    with af.Graph() as graph:
        x = af.placeholder("float32", (SIZE,))
        model = small if is_small else lstm
        y = model(x) if "unbatched" in sys.argv else af.batched(model, max_size=MOST)(x)
    limits: dict[str, Any] = {"max_runs": MOST, "max_queued": MOST} if "limited" in sys.argv else {}
    session = af.Session(graph, **limits)
    predict = session.prepare(y, [x])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        try:
            found = await serving.run_or_disconnect(receive, predict(np.frombuffer(body, np.float32)))
        except af.AsyncflowError as error:
            await serving.error_response(error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": np.asarray(found).tobytes()})

    async def warm_up(session: af.Session) -> None:
        await session.warm_up(y, {x: np.zeros(SIZE, np.float32)}, sizes=[1, MOST])
        if "tuned" in sys.argv:
            gc.freeze()
            gc.set_threshold(10_000, 10, 10)

    life = serving.lifespan(session, warm_up=warm_up)
    uvicorn.run(
        life.around(life.shed(app) if "shed" in sys.argv else app),
        port=int(sys.argv[1]),
        log_level="critical",
        access_log=False,
        limit_concurrency=2 * MOST if "limited-by-uvicorn" in sys.argv else None,
    )


if __name__ == "__main__":
    main()
