"""Arguments of a traced function: which arguments become tensors, and which are part of the trace."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from asyncflow.errors import FeedError, GraphError, a_kind, told
from asyncflow.graph.building.build import as_array, is_symbolic, placeholder
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import DType, as_dtype
from asyncflow.graph.values.spec import Spec, spec_of
from asyncflow.runtime.values.foreign_feeds import NotExchangeable, exchanged, is_exchangeable
from asyncflow.values import Nest, Value

_NUMPY = (np.ndarray, np.generic)

_STATIC_TYPES = (int, float, bool, str)
"""Types of annotated parameters that are part of the trace."""


class Static(NamedTuple):
    """A static argument: calls share a graph if such values are equal and of one type."""

    kind: type
    value: Hashable


class _Structures(NamedTuple):
    names: tuple[str, ...]
    nests: tuple[nest.Structure, ...]


Kind: TypeAlias = Spec | Static
"""The meaning of a leaf to the trace: a tensor described so, or itself."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call, taken apart."""

    signature: inspect.Signature
    leaves: list[Value]
    kinds: tuple[Kind, ...]
    structures: _Structures

    @property
    def key(self) -> Hashable:
        """Calls with equal keys run the same graph."""
        return self.structures, self.kinds

    def arrays(self) -> list[Value]:
        """The leaves that are fed, in order."""
        return [leaf for leaf, kind in zip(self.leaves, self.kinds, strict=True) if isinstance(kind, Spec)]

    def paths(self) -> list[str]:
        """Return the path of each leaf, such as ``x`` or ``x['state'][0]``."""
        return [path for name, nested in zip(*self.structures, strict=True) for path in nested.paths(name)]

    def call(self, fn: Callable[..., object]) -> tuple[list[Tensor], Nest]:
        """Call `fn` with a placeholder, named after its parameter, for each array; return the placeholders and the
        result.
        """
        inputs: list[Tensor] = []
        values = []
        for path, leaf, kind in zip(self.paths(), self.leaves, self.kinds, strict=True):
            if isinstance(kind, Spec):
                leaf = placeholder(kind.dtype, kind.shape, name=re.sub(r"\W+", "_", path).strip("_") or "argument")
                inputs.append(leaf)
            values.append(leaf)
        arguments = {}
        start = 0
        for name, nested in zip(*self.structures, strict=True):
            arguments[name] = nested.unflatten(values[start : start + nested.size])
            start += nested.size
        bound = inspect.BoundArguments(self.signature, arguments)
        return inputs, fn(*bound.args, **bound.kwargs)


class Parameters:
    """The parameters of a function, and how each takes its argument.

    Args:
        signature: of the function.
        owner: its name, for errors.
    """

    def __init__(self, signature: inspect.Signature, owner: str) -> None:
        self.signature = signature
        self.owner = owner
        described = {p.name: spec_of(p.annotation) for p in signature.parameters.values()}
        self._specs = {name: spec for name, spec in described.items() if spec is not None}
        self._optional = {
            name for name in self._specs if types.NoneType in typing.get_args(signature.parameters[name].annotation)
        }
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = tuple(p.name for p in signature.parameters.values() if p.kind in kinds)
        self._positional = names if len(names) == len(signature.parameters) else None
        self._static = {p.name for p in signature.parameters.values() if _is_static(p.annotation)}

    def without_first(self) -> Parameters:
        """Return the parameters of the function as a method of some instance."""
        rest = list(self.signature.parameters.values())[1:]
        return Parameters(self.signature.replace(parameters=rest), self.owner)

    def read(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Arguments:
        """The arguments of a call.

        Raises:
            TypeError: the function does not take them.
            GraphError, FeedError: one can be neither a tensor nor part of a trace; the message names it.
        """
        arguments = self._bound(args, kwargs)
        leaves: list[Value] = []
        kinds: list[Kind] = []
        nests = []
        for name, value in arguments.items():
            found, structure = self._taken_apart(name, value)
            nests.append(structure)
            leaves += found
            for index, leaf in enumerate(found):
                try:
                    kinds.append(self._kind(name, leaf))
                except (GraphError, FeedError) as error:
                    path = list(structure.paths(name))[index]
                    reason = error.reason if isinstance(error, GraphError) else error
                    raise type(error)(f"{self.owner}: argument {path}: {reason}") from error
                except Exception as error:  # an object's `__array__`, `__hash__` and the like may raise anything
                    kind = a_kind(type(leaf))
                    raise FeedError(f"{self.owner}: argument {name}: {kind} cannot be read: {told(error)}") from error
        return Arguments(self.signature, leaves, tuple(kinds), _Structures(tuple(arguments), tuple(nests)))

    def _bound(self, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, Nest]:
        """The argument of each parameter."""
        names = self._positional
        if names is not None and not kwargs and len(args) == len(names):  # most calls; binding the signature takes 2 us
            return dict(zip(names, args, strict=True))
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _taken_apart(self, name: str, value: Nest) -> tuple[list[Nest], nest.Structure]:
        if type(value) is np.ndarray:
            return [value], nest.LEAF
        if name not in self._specs:
            try:
                return nest.flatten(value)
            except GraphError:
                raise GraphError(f"{self.owner}: argument {name} is nested too deep, or contains itself") from None
        kind = self.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            return list(value), nest.Structure(tuple, tuple(range(len(value))), (nest.LEAF,) * len(value))
        if kind is inspect.Parameter.VAR_KEYWORD:
            return list(value.values()), nest.Structure(dict, tuple(value), (nest.LEAF,) * len(value))
        return [value], nest.LEAF

    def _kind(self, name: str, leaf: Value) -> Kind:
        spec = self._specs.get(name)
        if spec is not None:
            if leaf is None and name in self._optional:
                return _static(leaf, "it is None")
            if leaf is None:
                raise FeedError(f"it is annotated {spec}, so it takes an array; got None")
            return spec
        if name in self._static:
            annotation = inspect.formatannotation(self.signature.parameters[name].annotation)
            return _static(leaf, f"it is annotated {annotation}")
        return _kind(leaf)


def explain_changes(keys: Iterable[Hashable]) -> str:
    """Return the argument that differs most between calls with these keys, and its value in the last call."""
    seen: dict[str, dict[Hashable, str]] = {}
    for structures, kinds in cast("Iterable[tuple[_Structures, tuple[Kind, ...]]]", keys):
        start = 0
        for name, nested in zip(*structures, strict=True):
            those = kinds[start : start + nested.size]
            start += nested.size
            text = _kind_text(those[0]) if nested == nest.LEAF else str(nested)
            seen.setdefault(name, {})[nested, those] = text if len(text) <= 60 else f"{text[:57]}..."
    name, values = max(seen.items(), key=lambda item: len(item[1]))
    return f"argument {name} was of {len(values)} kinds, lately {', '.join(list(values.values())[-3:])}"


def _kind_text(kind: Kind) -> str:
    if isinstance(kind, Spec):
        return str(kind)
    return repr(float.fromhex(str(kind.value)) if kind.kind is float else kind.value)


def _is_static(annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Annotated:
        return _is_static(annotation.__origin__)
    if isinstance(annotation, str):  # an annotation that could not be evaluated
        return annotation in [kind.__name__ for kind in _STATIC_TYPES]
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return all(member in (*_STATIC_TYPES, types.NoneType) for member in typing.get_args(annotation))
    return annotation in _STATIC_TYPES if isinstance(annotation, type) else False


def _kind(leaf: Value) -> Kind:
    """The kind of an argument without an annotation: arrays and numbers are tensors, any other object is itself."""
    if isinstance(leaf, _NUMPY):
        return _array_spec(leaf.dtype, leaf.ndim)
    if isinstance(leaf, bool | str | Enum | type):
        return _static(leaf, "it is no array")
    if isinstance(leaf, int | float | complex):
        return Spec(as_array(leaf, None).dtype, ())
    if isinstance(leaf, Spec):
        return leaf
    if isinstance(leaf, Tensor):
        return leaf.spec  # the feed is refused later, with the usual message
    if is_symbolic(leaf):
        return _static(leaf, "it is no array")
    if is_exchangeable(leaf):
        try:
            found = exchanged(leaf)
        except NotExchangeable as error:
            raise FeedError(f"{a_kind(type(leaf))} is an array, and {error}") from error.__cause__
        return Spec(as_dtype(found.dtype), (None,) * found.ndim)
    if any(hasattr(leaf, name) for name in ("__array__", "__array_interface__")):
        array = np.asarray(leaf)
        return Spec(as_dtype(array.dtype), (None,) * array.ndim)
    return _static(leaf, "it is no array")


@lru_cache(maxsize=256)
def _array_spec(dtype: DType, ndim: int) -> Spec:
    return Spec(as_dtype(dtype), (None,) * ndim)


def _static(leaf: Value, why: str) -> Static:
    try:
        hash(leaf)
    except TypeError:
        kind = a_kind(type(leaf))
        raise GraphError(
            f"{why}, so its value is part of the trace and has to be hashable; got {kind}. Pass a hashable object, "
            f"or annotate the parameter with af.spec(dtype, shape) if it is an array"
        ) from None
    # Floats by their digits, as 0.0 == -0.0 and nan != nan.
    return Static(type(leaf), leaf.hex() if isinstance(leaf, float) else leaf)
