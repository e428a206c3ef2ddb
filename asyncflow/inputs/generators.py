"""Inputs whose elements the user's own code makes."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import numpy as np

from asyncflow.errors import GraphError
from asyncflow.graph.values import nest
from asyncflow.inputs.input import Input, new_input
from asyncflow.inputs.stages import Element, as_value
from asyncflow.state.variables.immutable import LARGE_BYTES, immutable
from asyncflow.streams.beside import call_beside
from asyncflow.values import Nest


def from_async_generator(
    fn: Callable[[], AsyncIterator[Nest]], spec: Nest, *, prefetch: int = 4, name: str = "generated"
) -> Input:
    """Elements of an asynchronous generator, which runs as a task on the session's event loop.

    Args:
        fn: an async generator function without arguments; called for each pass, and again after a restore.
        spec: of an element: a `Spec`, or a nest of them.
        prefetch: how many elements are made before they are asked for, 1 or more.
        name: for messages and nodes.

    Raises:
        GraphError: `fn` is no async generator function.
    """
    if not inspect.isasyncgenfunction(fn):
        raise GraphError(
            f"from_async_generator takes an async generator function, `async def` with `yield`; got {fn!r}"
        )
    leaves, structure = nest.flatten(spec)
    labels = [f"element{path} of {name!r}" for path in structure.paths()]

    async def elements() -> AsyncGenerator[Element]:
        made = fn()
        try:
            async for element in made:
                found = nest.match(structure, element, f"element of {name!r}", nested_leaves=True)
                values = [as_value(*each) for each in zip(found, leaves, labels, strict=True)]
                is_large = sum(value.nbytes for value in values if isinstance(value, np.ndarray)) > LARGE_BYTES
                yield await call_beside(_kept, values) if is_large else _kept(values)
        finally:
            await made.aclose()

    return new_input(elements, spec, prefetch=prefetch, name=name)


def _kept(values: list[Nest]) -> Element:
    return tuple(map(immutable, values))
