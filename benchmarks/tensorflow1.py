"""The peer: TensorFlow's graphs, sessions and control-flow primitives, as in its version 1."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Final

TENSORFLOW: Final = "tensorflow 1"
"""Its name in tables."""


class TensorFlow1:
    """What the benchmarks use of TensorFlow. Its own modules are untyped, so values are `Any` from here on."""

    def __init__(self, module: ModuleType) -> None:
        self.v1: Any = module.compat.v1
        # `while_loop` becomes Enter, Merge, Switch, NextIteration and Exit: the design that asyncflow follows, and the
        # faster of TensorFlow's two.
        self.v1.disable_control_flow_v2()

    def graph(self) -> AbstractContextManager[Any]:
        """A new graph to build in."""
        context: AbstractContextManager[Any] = self.v1.Graph().as_default()
        return context

    def session(self, graph: Any, *, threads: int) -> Any:
        """A session with a pool of so many threads between ops, and one inside an op; 0 leaves the choice to it."""
        config = self.v1.ConfigProto(
            intra_op_parallelism_threads=1,
            inter_op_parallelism_threads=threads,
            use_per_session_threads=True,
        )
        return self.v1.Session(graph=graph, config=config)


def load_tensorflow() -> TensorFlow1 | None:
    """TensorFlow, or None where it is not installed."""
    # Fewer greetings on stderr; errors still show.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow
    except ImportError:
        return None
    return TensorFlow1(tensorflow)
