"""Python functions of kernels that feed one another in a straight line.

They are generated, as the functions of regions are (`asyncflow.compiler.regions.code.codegen`, which writes branches
and loops as well), but know nothing of nodes: values have numbers. Lines of one form share their code, so that making
the next one costs a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from asyncflow.values import Kernel


class LineStep(NamedTuple):
    """One kernel of a line.

    Attributes:
        kernel: the kernel to call.
        operands: numbers of the values it takes: first come the inputs of the line, then the results of each step.
        n_results: length of the tuple that it returns; None if it returns one value by itself.
    """

    kernel: Kernel
    operands: tuple[int, ...]
    n_results: int | None = None


def straight_line(n_inputs: int, steps: Sequence[LineStep], results: int | Sequence[int]) -> Kernel:
    """Return a function that runs `steps` in their order.

    Args:
        n_inputs: how many values it takes.
        steps: each uses inputs and the results of earlier steps.
        results: number of the value that it returns, or numbers of the values in the tuple that it returns.
    """
    form = tuple([step[1:] for step in steps])
    make = _maker(n_inputs, form, results if isinstance(results, int) else tuple(results))
    return make(*[step.kernel for step in steps])


@lru_cache(maxsize=256)
def _maker(
    n_inputs: int, form: tuple[tuple[tuple[int, ...], int | None], ...], results: int | tuple[int, ...]
) -> Callable[..., Kernel]:
    """A function that takes the kernels, and returns the line that calls them."""
    lines = []
    n_values = n_inputs
    for place, (operands, n_results) in enumerate(form):
        made = range(n_values, n_values + (1 if n_results is None else n_results))
        targets = f"v{n_values}" if n_results is None else f"[{_listed('v', made)}]"
        lines.append(f"        {targets} = k{place}({_listed('v', operands)})")
        n_values = made.stop
    head = f"def make({_listed('k', range(len(form)))}):\n    def line({_listed('v', range(n_inputs))}):"
    returned = f"v{results}" if isinstance(results, int) else f"({_listed('v', results)})"
    source = "\n".join((head, *lines, f"        return {returned}", "    return line"))
    namespace: dict[str, Callable[..., Kernel]] = {}
    exec(compile(source, "<asyncflow straight line>", "exec"), namespace)
    return namespace["make"]


def _listed(letter: str, numbers: Sequence[int]) -> str:
    return "".join(f"{letter}{number}, " for number in numbers)
