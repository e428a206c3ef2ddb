"""A plain ASGI application on uvicorn, with httptools and uvloop where they are installed.

``unbatched`` behind the port has every request computed by itself.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import uvicorn

import asyncflow as af
from asyncflow import serving
from benchmarks.http_servers.lstm import MOST, SIZE, STEPS, WEIGHTS

HEADERS = [(b"content-length", str(4 * SIZE).encode())]


def main() -> None:
    """Serves."""
    weights = af.Variable(WEIGHTS, name="weights")

    def lstm(x: af.Tensor) -> af.Tensor:
        h = c = af.zeros((SIZE,), dtype="float32")
        for _ in range(STEPS):
            i, f, o, g = af.split(af.concat([x, h]) @ weights, 4)
            c = af.sigmoid(f) * c + af.sigmoid(i) * af.tanh(g)
            h = af.sigmoid(o) * af.tanh(c)
        return h

    with af.Graph() as graph:
        x = af.placeholder("float32", (SIZE,))
        y = lstm(x) if "unbatched" in sys.argv else af.batched(lstm, max_size=MOST)(x)
    session = af.Session(graph)
    predict = session.prepare(y, [x])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        found = await serving.run_or_disconnect(receive, predict(np.frombuffer(body, np.float32)))
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": np.asarray(found).tobytes()})

    uvicorn.run(serving.lifespan(session).around(app), port=int(sys.argv[1]), log_level="error", access_log=False)


if __name__ == "__main__":
    main()
