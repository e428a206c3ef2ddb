"""Run a user's program inside this process as if alone: arguments, search path, exit code and traceback."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

from asyncflow.cli.target import Target, TargetError
from asyncflow.graph.graph import Graph
from asyncflow.streams.loop import run

FAILED = 1
INTERRUPTED = 130
TERMINATED = 143

_HERE = str(Path(__file__).resolve().parent)
_IMPORT_SYSTEM = ("<frozen importlib", importlib.__file__)


def run_program(
    target: Target,
    arguments: Sequence[str],
    observed: AbstractContextManager[object],
    on_graph: Callable[[Graph], object] | None = None,
) -> int:
    """Load and call the target, and return the exit code.

    Args:
        target: the callable; an awaitable result is awaited.
        arguments: the program's ``sys.argv[1:]``.
        observed: what the call stands in, such as a `Trace` that every graph run of the program is added to.
        on_graph: called with a graph that the target names; None if the target must be callable.

    Returns:
        0; 1 if the program raised, after printing its traceback; its own code if it raised `SystemExit`; 130 if it was
        interrupted, and 143 if it was terminated (SIGTERM), which ends it in the same way.

    Raises:
        TargetError: the target names nothing that can be called without arguments.
    """
    with _as_program(target, arguments), _interrupted_by_sigterm() as terminated:
        try:
            call = target.load(on_graph)
            with observed:
                result = call()
                if inspect.isawaitable(result):
                    run(_awaited(result))
        except TargetError:
            raise
        except SystemExit as error:
            return _exit_code(error)
        except KeyboardInterrupt:
            print("terminated" if terminated else "interrupted", file=sys.stderr)
            return TERMINATED if terminated else INTERRUPTED
        except (Exception, asyncio.CancelledError) as error:
            _print_traceback(error)
            return FAILED
    return 0


async def _awaited(result: Awaitable[object]) -> object:
    return await result


@contextmanager
def _as_program(target: Target, arguments: Sequence[str]) -> Iterator[None]:
    """Give the program its own ``sys.argv`` and ``sys.path`` inside the block."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [target.program, *arguments], [target.search_path, *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


@contextmanager
def _interrupted_by_sigterm() -> Iterator[list[int]]:
    """Turn SIGTERM into SIGINT inside the block, unless the program handles it; yield the signals received.

    Otherwise the process would end at once, and the observations of the program would be lost.
    """
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        signal.raise_signal(signal.SIGINT)

    def interrupt_if_terminated(number: int, frame: FrameType | None) -> None:
        if received:
            signal.default_int_handler(number, frame)

    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield received
        return
    # A shell has the jobs in its background ignore SIGINT, and an ignored signal would interrupt nothing.
    ignores_sigint = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, interrupt)
    if ignores_sigint:
        signal.signal(signal.SIGINT, interrupt_if_terminated)
    try:
        yield received
    finally:
        if ignores_sigint and signal.getsignal(signal.SIGINT) is interrupt_if_terminated:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if signal.getsignal(signal.SIGTERM) is interrupt:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_code(error: SystemExit) -> int:
    """Return Python's exit code for the error: a number is the code; any other object is printed and means failure."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return FAILED


def _print_traceback(error: BaseException) -> None:
    """The traceback from the program's first line on; the frames before it are ours and the import system's."""
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = [index for index, (frame, _) in enumerate(frames) if frame.f_code.co_filename.startswith(_HERE)]
    first = ours[-1] + 1 if ours else 0
    while first < len(frames) and frames[first][0].f_code.co_filename.startswith(_IMPORT_SYSTEM):
        first += 1
    shown = error.__traceback__
    for _ in range(first):
        assert shown is not None
        shown = shown.tb_next
    traceback.print_exception(error.with_traceback(shown))
