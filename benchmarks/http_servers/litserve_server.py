"""LitServe: FastAPI, JSON, and one worker process."""

from __future__ import annotations

import sys
from typing import Any

import litserve
import numpy as np

from benchmarks.http_servers.lstm import MOST, WAIT_S, model


class LitServeLstm(litserve.LitAPI):
    """Takes and gives JSON."""

    def setup(self, device: str) -> None:
        """Does nothing."""

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # it reads the annotation
        """One row."""
        return np.asarray(request["x"], np.float32)

    def batch(self, inputs: Any) -> Any:
        """Rows together."""
        return np.stack(inputs)

    def predict(self, x: Any) -> Any:
        """A batch."""
        return model(x)

    def unbatch(self, output: Any) -> Any:
        """Its rows."""
        return list(output)

    def encode_response(self, output: Any) -> Any:
        """One result."""
        return {"y": output.tolist()}


if __name__ == "__main__":
    api = LitServeLstm(max_batch_size=MOST, batch_timeout=WAIT_S)
    litserve.LitServer(api, accelerator="cpu").run(port=int(sys.argv[1]), generate_client_file=False, log_level="error")
