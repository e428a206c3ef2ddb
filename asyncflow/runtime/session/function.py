"""`@function`: a Python function traced into a graph once and awaited like any coroutine."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import itertools
import sys
import warnings
from collections.abc import AsyncGenerator, Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, MethodType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, overload
from weakref import WeakKeyDictionary, ref

from asyncflow.errors import GraphError, SourceLocation, located_at, user_location
from asyncflow.graph.building.build import as_tensor
from asyncflow.graph.graph import Graph, current_graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values import nest
from asyncflow.runtime.session.arguments import Arguments, Parameters, explain_changes
from asyncflow.runtime.session.session import Session, current_session
from asyncflow.values import Nest, Value

_MOST_TRACES = 256
"""Maximum number of graphs that a function keeps; the least recently used goes first."""

_MANY_TRACES = 32
"""A function that has been traced so often probably is not meant to be."""

_uses = itertools.count(1)


@dataclass(slots=True)
class Traced:
    """A function as a graph, for one kind of arguments."""

    graph: Graph
    inputs: list[Tensor]
    """One placeholder per array or number among the arguments, named after its parameter."""
    outputs: Nest
    """The nest the function returned, of tensors and nodes."""
    used: int = 0
    """Time of the last use."""


P = ParamSpec("P")
Q = ParamSpec("Q")


class Function(Generic[P]):
    """A Python function that runs as a graph; made by `function`.

    Awaiting ``f(x)`` runs it in the session of the caller's ``async with`` block. Without one it runs in a session that
    lives as long as the event loop. Called while a graph is being built, it is inlined into that graph.
    """

    __name__: str
    __qualname__: str

    def __init__(
        self, fn: Callable[P, object], effects: Literal["ordered", "unordered"], seed: int | None, atomic: bool
    ) -> None:
        if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
            raise GraphError(
                f"@af.function takes a plain function, which builds a graph; {fn.__qualname__} is a coroutine or a "
                f"generator. For a coroutine as a node use @af.op"
            )
        if isinstance(fn, classmethod):
            raise GraphError(f"@classmethod stands above @af.function, not below it: {fn.__func__.__qualname__}")
        functools.update_wrapper(self, fn)
        # Around a static method, the function is one, too.
        self._binds = not isinstance(fn, staticmethod)
        self.fn = fn
        self._effects: Literal["ordered", "unordered"] = effects
        self._seed = seed
        self._atomic = atomic
        self._parameters = Parameters(_signature(fn), fn.__qualname__)
        self._traces: dict[Hashable, Traced] = {}
        self._of_instances: dict[int, tuple[ref[object], dict[Hashable, Traced]]] = {}

    def __repr__(self) -> str:
        return f"<Function {self.fn.__qualname__}>"

    # The signature is the function's, whose parameters are tensors; outside a graph it is given their values. The
    # result is the nest itself in a graph and to be awaited elsewhere, which no type says.
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Nest: ...
    @overload
    def __call__(self, *args: object, **kwargs: object) -> Nest: ...

    def __call__(self, *args: object, **kwargs: object) -> Nest:
        """The result, to be awaited; or the symbolic result, inside a graph being built."""
        if current_graph() is not None:
            return self._inlined(args, kwargs)
        caller = sys._getframe(1)
        return self._run(caller.f_code, caller.f_lineno, args, kwargs)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self: Function[Concatenate[Any, Q]], instance: object, owner: type | None = None) -> Function[Q]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Nest:
        return self if instance is None or not self._binds else self._bound(instance)

    def trace(self, *args: object, **kwargs: object) -> Traced:
        """Return the graph that runs for such arguments: a call's arguments, or `spec`s in the place of arrays."""
        return self._traced(self._parameters.read(args, kwargs))

    def with_body(self, fn: Callable[..., object]) -> Function[P]:
        """The same with another function inside, which takes the same arguments."""
        changed = copy.copy(self)
        functools.update_wrapper(changed, fn)
        changed.fn, changed._traces, changed._of_instances = fn, {}, {}
        return changed

    def _bound(self, instance: object) -> Function[...]:
        """The function as a method of `instance`, which is no argument: it has traces of its own."""
        bound: Function[...] = copy.copy(self)
        bound.fn = MethodType(self.fn, instance)
        bound._parameters = self._parameters.without_first()
        bound._traces = self._traces_of(instance)
        return bound

    def _traces_of(self, instance: object) -> dict[Hashable, Traced]:
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

    async def _run(self, code: CodeType, line: int, args: tuple[object, ...], kwargs: dict[str, object]) -> Nest:
        arguments = self._parameters.read(args, kwargs)
        if arguments.key in self._traces:
            traced = self._traced(arguments)
        else:
            # A new task has no user line in its call stack. Locating every call would slow calls by a third.
            with located_at(SourceLocation(code.co_filename, line, code.co_name)):
                traced = self._traced(arguments)
        session = current_session()
        if session is None or not session.is_bound_here():
            session = await _loop_session()
        feeds = dict(zip(traced.inputs, arguments.arrays(), strict=True))
        return await session.run_function(traced.graph, traced.outputs, feeds, atomic=self._atomic)

    def _traced(self, arguments: Arguments) -> Traced:
        traces, key = self._traces, arguments.key
        traced = traces.get(key)
        if traced is None:
            traced = self._trace(arguments)
            if len(traces) >= _MOST_TRACES:
                del traces[min(traces, key=lambda other: traces[other].used)]
            traces[key] = traced
            if len(traces) == _MANY_TRACES:
                self._warn_of_traces()
        traced.used = next(_uses)
        return traced

    def _warn_of_traces(self) -> None:
        place = user_location()
        message = (
            f"{self.fn.__qualname__} has been traced {_MANY_TRACES} times, and each time compiles a graph: "
            f"{explain_changes(self._traces)}. Each value of a static argument has a graph of its own: pass what "
            f"changes from call to call as a number or an array; annotate a list with af.spec(dtype, shape)"
        )
        warnings.warn_explicit(message, RuntimeWarning, place.file, place.line)

    def _trace(self, arguments: Arguments) -> Traced:
        with located_at(self.fn), Graph(effects=self._effects, seed=self._seed) as graph:
            inputs, returned = arguments.call(lambda *args, **kwargs: self._inlined(args, kwargs))
            try:
                leaves, structure = nest.flatten(returned)
            except GraphError:
                raise GraphError(
                    f"what {self.fn.__qualname__} returned is nested too deep, or contains itself"
                ) from None
            outputs = structure.unflatten([_output(leaf) for leaf in leaves])
        return Traced(graph, inputs, outputs)

    def _inlined(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Nest:
        """The nodes that the function builds in the current graph."""
        inside = _being_built.get()
        code = getattr(self.fn, "__func__", self.fn)
        token = _being_built.set((*inside, code))
        try:
            return self.fn(*args, **kwargs)
        except RecursionError:
            # Recursion that ends, on a Python number say, is allowed: only a stack overflow reveals endless recursion.
            if code not in inside:
                raise
            raise GraphError(
                f"{self.fn.__qualname__} calls itself without end while it is traced: all branches of a cond are "
                f"traced, whatever the predicate; write the recursion as a while_loop"
            ) from None
        finally:
            _being_built.reset(token)


def _output(leaf: Value) -> Tensor | Node:
    return leaf if isinstance(leaf, Tensor | Node) else as_tensor(leaf)


def _signature(fn: Callable[..., object]) -> inspect.Signature:
    try:
        return inspect.signature(fn, eval_str=True)
    except (NameError, TypeError, SyntaxError):
        return inspect.signature(fn)  # annotations that cannot be evaluated describe no arguments


_being_built: ContextVar[tuple[Callable[..., object], ...]] = ContextVar("asyncflow_being_built", default=())
"""The functions whose calls are being traced, outermost first."""

_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[AsyncGenerator[Session], Session]] = WeakKeyDictionary()


async def _loop_session() -> Session:
    """The session of functions awaited outside any session: it lives as long as the event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        generator = _session_until_loop_ends(loop)
        _sessions[loop] = generator, await anext(generator)
    return _sessions[loop][1]


async def _session_until_loop_ends(loop: asyncio.AbstractEventLoop) -> AsyncGenerator[Session]:
    # `asyncio.run` finishes asynchronous generators before it closes the loop: the only hook for a library.
    session = Session()
    try:
        yield session
    finally:
        del _sessions[loop]
        await session.aclose()


@overload
def function(fn: Callable[P, object], /) -> Function[P]: ...


@overload
def function(
    *, effects: Literal["ordered", "unordered"] = "ordered", seed: int | None = None, atomic: bool = False
) -> Callable[[Callable[P, object]], Function[P]]: ...


def function(
    fn: Callable[..., object] | None = None,
    /,
    *,
    effects: Literal["ordered", "unordered"] = "ordered",
    seed: int | None = None,
    atomic: bool = False,
) -> Function[...] | Callable[[Callable[..., object]], Function[...]]:
    """Makes a Python function run as a graph: ``await f(x)``.

    The function is called once per kind of arguments (nest, dtypes and ranks; extents are unknown) to build the graph.
    All effects in it run, in order. A method has graphs of its own for each instance, which is no argument.

    Arrays and numbers (int, float, complex, NumPy's own, also ``np.bool_``) arrive in the function as tensors. A bool,
    a str, None, an enum, a dtype, a type, a function and any other hashable object is *static*: it arrives as it is, so
    Python's ``if`` may look at it, and each value has a graph of its own. Containers are taken apart, so a list of
    numbers arrives as a list of tensors. An annotation decides otherwise:

    - ``x: Annotated[af.Tensor, af.spec(dtype, shape)]``, or the spec alone where no type checker looks: the whole
      argument, be it a list, is one array of that dtype and shape.
    - ``n: int`` (``float``, ``bool``, ``str``, and one of them or None): static.

    Args:
        fn: takes any nest of arrays and static objects, and returns any nest of tensors.
        effects: as in `Graph`.
        seed: as in `Graph`.
        atomic: as in `Session.run`.

    Raises:
        GraphError: an argument is neither an array nor hashable (when called), or `fn` is a coroutine function.
        FeedError: an array does not fit its parameter's annotation (when awaited).

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
        return lambda wrapped: Function(wrapped, effects, seed, atomic)
    return Function(fn, effects, seed, atomic)
