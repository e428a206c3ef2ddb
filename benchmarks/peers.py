"""The peers: TensorFlow (graphs of version 1, functions and eager ops of version 2), PyTorch and JAX, where installed.

Each works with one thread inside an op, as asyncflow does. Their modules are untyped here, so values are `Any` from
here on.
"""

from __future__ import annotations

import gc
import os
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

TENSORFLOW_1: Final = "tensorflow 1"
TENSORFLOW_2: Final = "tensorflow 2 function"
TENSORFLOW_EAGER: Final = "tensorflow 2 eager"
TORCH: Final = "torch eager"
JAX: Final = "jax jit"
DYNET: Final = "dynet autobatch"
NUMPY: Final = "numpy"
PYTHON: Final = "python"
"""Names in tables; the last two are the same work written by hand."""


class TensorFlow:
    """Both of TensorFlow's interfaces."""

    def __init__(self, module: ModuleType) -> None:
        self.v2: Any = module
        self.v1: Any = module.compat.v1
        # `while_loop` becomes Enter, Merge, Switch, NextIteration and Exit: the design that asyncflow follows, and the
        # faster of TensorFlow's two.
        self.v1.disable_control_flow_v2()
        self.v2.config.threading.set_intra_op_parallelism_threads(1)
        self.v2.config.threading.set_inter_op_parallelism_threads(1)

    def graph(self) -> AbstractContextManager[Any]:
        """A new graph of version 1 to build in."""
        context: AbstractContextManager[Any] = self.v1.Graph().as_default()
        return context

    def session(self, graph: Any, *, threads: int) -> Any:
        """Open a session with a pool of `threads` threads between ops, and one inside an op; 0 leaves the choice to
        it.
        """
        config = self.v1.ConfigProto(
            intra_op_parallelism_threads=1,
            inter_op_parallelism_threads=threads,
            use_per_session_threads=True,
        )
        return self.v1.Session(graph=graph, config=config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Systems that take part; None if one is not installed, or left out."""

    tensorflow: TensorFlow | None = None
    torch: Any = None
    jax: Any = None
    dynet: Any = None

    @property
    def present(self) -> list[str]:
        """Names of the packages that take part."""
        return [name for name in self.__slots__ if getattr(self, name) is not None]

    @property
    def missing(self) -> list[str]:
        """Names of systems that do not take part."""
        return [name for name in self.__slots__ if getattr(self, name) is None]


NO_PEERS: Final = Peers()


def load_peers() -> Peers:
    """Every peer that is installed, set to one thread."""
    peers = Peers(
        tensorflow=_load(load_tensorflow), torch=_load(load_torch), jax=_load(load_jax), dynet=_load(load_dynet)
    )
    # They keep hundreds of thousands of objects alive, which the collector would look at during other systems' trials.
    gc.collect()
    gc.freeze()
    return peers


def _load(peer: Callable[[], Any]) -> Any:
    try:
        return peer()
    except ImportError:
        return None


def load_tensorflow() -> TensorFlow:
    """TensorFlow, or ImportError."""
    # Fewer greetings on stderr; errors still show.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow

    return TensorFlow(tensorflow)


def load_torch() -> Any:
    """PyTorch, or ImportError."""
    import torch

    torch.set_num_threads(1)
    return torch


def load_jax() -> Any:
    """JAX, on the CPU unless asked otherwise, or ImportError."""
    # Where it has a card, it would take three quarters of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    with _environment("NPROC", "1"):
        # XLA reads there how many threads to start, once, and starts them with the first device.
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    return jax


def load_dynet() -> Any:
    """Return DyNet, which batches equal work by itself, or raise ImportError: it is on the registry as dyNET38."""
    import dynet_config

    dynet_config.set(autobatch=1, mem=2048, random_seed=1)
    import dynet

    return dynet


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
