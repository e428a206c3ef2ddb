"""`@function`: a Python function traced into a graph once and awaited like any coroutine."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary, ref

from asyncflow.errors import GraphError
from asyncflow.graph import nest
from asyncflow.graph.build import as_array, as_tensor, placeholder
from asyncflow.graph.graph import Graph, current_graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.spec import Spec
from asyncflow.runtime.session import Session, current_session


@dataclass(frozen=True, slots=True)
class Traced:
    """A function as a graph, for one kind of arguments."""

    graph: Graph
    inputs: list[Tensor]
    """One placeholder per argument leaf."""
    outputs: Any
    """The nest the function returned, of tensors and nodes."""


class Function:
    """A Python function that runs as a graph; made by `function`.

    Awaiting ``f(x)`` runs it in the session whose ``async with`` block the caller is in, or else in one that lives as
    long as the event loop. Called while a graph is being built, it is inlined into that graph.
    """

    def __init__(self, fn: Callable[..., Any], effects: Literal["ordered", "unordered"], seed: int | None) -> None:
        if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
            raise GraphError(
                f"@af.function takes a plain function, which builds a graph; {fn.__qualname__} is a coroutine or a "
                f"generator. For a coroutine as a node use @af.op"
            )
        functools.update_wrapper(self, fn)
        self.fn = fn
        self._effects: Literal["ordered", "unordered"] = effects
        self._seed = seed
        self._signature = _signature(fn)
        self._traces: dict[Any, Traced] = {}
        self._of_instances: dict[int, tuple[ref[object], dict[Any, Traced]]] = {}

    def __repr__(self) -> str:
        return f"<Function {self.fn.__qualname__}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result, to be awaited; or the symbolic result, inside a graph being built."""
        if current_graph() is not None:
            return self.fn(*args, **kwargs)
        return self._run(args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else self._bound(instance)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The graph that runs for such arguments: arrays, numbers or `spec`s."""
        return self._traced(*self._leaves(args, kwargs))

    def _bound(self, instance: object) -> Function:
        """The function as a method of `instance`, which is no argument: it has traces of its own."""
        bound = copy.copy(self)
        bound.fn = MethodType(self.fn, instance)
        bound._signature = self._signature.replace(parameters=list(self._signature.parameters.values())[1:])
        bound._traces = self._traces_of(instance)
        return bound

    def _traces_of(self, instance: object) -> dict[Any, Traced]:
        # By identity, because an instance need not be hashable; weakly, because the class outlives it.
        key = id(instance)
        if key not in self._of_instances:
            try:
                watch = ref(instance, lambda _: self._of_instances.pop(key, None))
            except TypeError:
                raise GraphError(
                    f"{self.fn.__qualname__} keeps its graphs as long as the instance lives, which needs weak "
                    f"references to {type(instance).__name__}: add __weakref__ to its slots (weakref_slot=True for a "
                    f"dataclass)"
                ) from None
            self._of_instances[key] = watch, {}
        return self._of_instances[key][1]

    async def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = self._leaves(args, kwargs)
        traced = self._traced(leaves, structure)
        session = current_session()
        if session is None or not session.is_bound_here():
            session = await _loop_session()
        feeds = dict(zip(traced.inputs, leaves, strict=True))
        return await session.run_function(traced.graph, traced.outputs, feeds)

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], nest.Structure]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return nest.flatten(dict(bound.arguments))

    def _traced(self, leaves: list[Any], structure: nest.Structure) -> Traced:
        specs = self._specs(leaves, structure)
        key = (structure, tuple(specs))
        if key not in self._traces:
            self._traces[key] = self._trace(specs, structure)
        return self._traces[key]

    def _specs(self, leaves: list[Any], structure: nest.Structure) -> list[Spec]:
        """What each argument leaf is traced as: its annotation, or its dtype and rank."""
        specs = []
        for path, leaf in zip(structure.paths(), leaves, strict=True):
            parameter = path.split("]", 1)[0].strip("['")
            annotation = self._signature.parameters[parameter].annotation
            if isinstance(annotation, Spec):
                specs.append(annotation)
            elif isinstance(leaf, Spec):
                specs.append(leaf)
            else:
                array = leaf if hasattr(leaf, "dtype") and hasattr(leaf, "shape") else as_array(leaf, None)
                specs.append(Spec(array.dtype, (None,) * len(array.shape)))
        return specs

    def _trace(self, specs: list[Spec], structure: nest.Structure) -> Traced:
        with Graph(effects=self._effects, seed=self._seed) as graph:
            inputs = [placeholder(spec.dtype, spec.shape, name="argument") for spec in specs]
            arguments = structure.unflatten(inputs)
            positional, keywords = _split(self._signature, arguments)
            outputs = nest.map_leaves(_output, self.fn(*positional, **keywords))
        return Traced(graph, inputs, outputs)


def _output(leaf: Any) -> Tensor | Node:
    return leaf if isinstance(leaf, Tensor | Node) else as_tensor(leaf)


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(fn, eval_str=True)
    except (NameError, TypeError, SyntaxError):
        return inspect.signature(fn)  # annotations that cannot be evaluated describe no arguments


def _split(signature: inspect.Signature, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    bound = inspect.BoundArguments(signature, arguments)
    return bound.args, bound.kwargs


_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncGenerator[Session]] = WeakKeyDictionary()
_open: WeakKeyDictionary[asyncio.AbstractEventLoop, Session] = WeakKeyDictionary()


async def _loop_session() -> Session:
    """The session of functions awaited outside any session: it lives as long as the event loop."""
    loop = asyncio.get_running_loop()
    session = _open.get(loop)
    if session is None:
        generator = _sessions[loop] = _session_until_loop_ends(loop)
        session = await anext(generator)
    return session


async def _session_until_loop_ends(loop: asyncio.AbstractEventLoop) -> AsyncGenerator[Session]:
    # `asyncio.run` and its like finish asynchronous generators before they close the loop: the one hook a library
    # has to end with the loop.
    session = _open[loop] = Session()
    try:
        yield session
    finally:
        del _open[loop]
        del _sessions[loop]
        await session.aclose()


@overload
def function(fn: Callable[..., Any], /) -> Function: ...


@overload
def function(
    *, effects: Literal["ordered", "unordered"] = "ordered", seed: int | None = None
) -> Callable[[Callable[..., Any]], Function]: ...


def function(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    effects: Literal["ordered", "unordered"] = "ordered",
    seed: int | None = None,
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Makes a Python function run as a graph: ``await f(x)``.

    The function is called once per kind of arguments (nest, dtypes and ranks; extents are unknown) to build the graph.
    A parameter annotated with ``af.spec(dtype, shape)`` is traced as that. All effects in it run, in order. A method
    has graphs of its own for each instance, which is no argument.

    Args:
        fn: takes and returns any nest of tensors.
        effects: as in `Graph`.
        seed: as in `Graph`.

    >>> import asyncflow as af
    >>> @af.function
    ... def hypotenuse(a, b):
    ...     return af.sqrt(a * a + b * b)
    >>> async def main():
    ...     return await hypotenuse(3.0, 4.0)
    >>> af.run(main())
    np.float64(5.0)
    """
    if fn is None:
        return lambda wrapped: Function(wrapped, effects, seed)
    return Function(fn, effects, seed)
