"""The process of a remote device: it keeps arrays by their numbers, and runs kernels on them with NumPy.

It reads messages from its standard input, in the order in which they were sent, and answers requests. A message is
``(freed, verb, *arguments)``; `freed` has the numbers of arrays without references.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

import asyncflow  # noqa: F401 - which registers the ops
from asyncflow.graph.op import bound_kernel, find_op
from asyncflow.pickling import portable
from asyncflow.values import Kernel


class Failure:
    """A mark in the place of an array that a kernel did not make."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Worker:
    """The arrays and kernels of one device; each public method is what the message of its name asks for."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._kernels: list[tuple[str, Kernel]] = []

    def forget(self, numbers: Sequence[int]) -> None:
        """Free arrays."""
        for number in numbers:
            del self._values[number]

    def bind(self, name: str, op: str, attrs: Mapping[str, Any]) -> None:
        """Make a kernel; its number is how many were made before."""
        self._kernels.append((name, bound_kernel(find_op(op), np, attrs, of_scalars=False)))

    def put(self, number: int, value: Any) -> None:
        """Keep an array that the host sends."""
        self._values[number] = value

    def call(self, kernel: int, arguments: Sequence[tuple[bool, Any]], numbers: Sequence[int]) -> None:
        """Run a kernel; an argument is the number of an array here, or ``(False, value)``."""
        name, function = self._kernels[kernel]
        inputs = [self._values[x] if is_here else x for is_here, x in arguments]
        failure = next((x for x in inputs if isinstance(x, Failure)), None)
        if failure is None:
            try:
                results = function(*inputs)
            except Exception as error:  # whoever asks for the outputs is told
                error.add_note(f"raised by {name}, in the process of the device")
                failure = Failure(error)
            else:
                made = results if isinstance(results, tuple) else (results,)
                self._values.update(zip(numbers, made, strict=True))
        if failure is not None:
            self._values.update(dict.fromkeys(numbers, failure))

    def get(self, number: int) -> tuple[Any, BaseException | None]:
        """An array, or the error of the kernel that should have made it."""
        value = self._values[number]
        return (None, portable(value.error)) if isinstance(value, Failure) else (np.asarray(value), None)

    def wait(self) -> tuple[None, None]:
        """Nothing, once all that was asked before is done."""
        return None, None


def serve(source: IO[bytes], answers: IO[bytes]) -> None:
    """Do what messages ask for, until there are no more."""
    worker = Worker()
    while True:
        try:
            freed, verb, *arguments = pickle.load(source)
        except EOFError:
            return
        worker.forget(freed)
        answer = getattr(worker, verb)(*arguments)
        if answer is not None:
            pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
            answers.flush()


def main() -> None:
    """Serve the process that started this one; what kernels print goes to the standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with np.errstate(all="ignore"):  # in a graph, infinities and NaN are values
        serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
