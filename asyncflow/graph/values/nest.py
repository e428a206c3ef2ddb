"""Nests: trees of tuples, lists, dicts, namedtuples, dataclasses and attrs classes whose leaves are values.

Loop variables, branch results, feeds and fetches may be any nest. ``None`` is an empty nest. A leaf is anything that
is not one of the containers; a class can join the containers through `register`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncflow.errors import GraphError, a_kind, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from asyncflow.values import Nest

    Unpack = Callable[[Any], tuple[tuple[Hashable, ...], tuple[object, ...], Hashable]]
    Pack = Callable[[Hashable, Sequence[Any]], object]

_registered: dict[type, tuple[Unpack, Pack]] = {}
_leaf_types: set[type] = set()


def register(kind: type, unpack: Unpack, pack: Pack) -> None:
    """Makes instances of `kind` containers.

    ``unpack(x)`` gives ``(keys, children, aux)``; ``pack(aux, children)`` rebuilds. Two nests match when `aux` match.
    """
    _registered[kind] = (unpack, pack)


def register_leaf(kind: type) -> None:
    """Makes instances of a dataclass or tuple type leaves."""
    _leaf_types.add(kind)


class StructureMismatch(Exception):
    """Two nests differ; the message names the place and both sides."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure of a nest without leaves. ``kind is None`` for a leaf."""

    kind: type | None
    keys: tuple[Hashable, ...] = ()
    children: tuple[Structure, ...] = ()
    aux: Hashable = None

    @property
    def size(self) -> int:
        """Number of leaves."""
        return 1 if self.kind is None else sum(child.size for child in self.children)

    def unflatten(self, leaves: Sequence[object]) -> Nest:
        """Return the nest of this structure with these leaves."""
        if len(leaves) != self.size:
            raise ValueError(f"{len(leaves)} leaves for a structure with {self.size}")
        return self._build(iter(leaves))

    def _build(self, leaves: Iterator[object]) -> Nest:
        if self.kind is None:
            return next(leaves)
        children = [child._build(leaves) for child in self.children]
        if self.kind is type(None):
            return None
        if self.kind in _registered:
            return _registered[self.kind][1](self.aux, children)
        if self.kind in (tuple, list):
            return self.kind(children)
        if issubclass(self.kind, dict):
            make: Callable[..., Nest] = self.kind
            items = dict(zip(self.keys, children, strict=True))
            return make(self.aux, items) if issubclass(self.kind, defaultdict) else make(items)
        if issubclass(self.kind, tuple):
            return self.kind(*children)
        fields = getattr(self.kind, "__attrs_attrs__", ())  # a private field has another name where it is given
        names = [field.alias for field in fields] or map(str, self.keys)
        return self.kind(**dict(zip(names, children, strict=True)))

    def paths(self, root: str = "") -> Iterator[str]:
        """Yield the path of each leaf, such as ``['state'].h[0]``."""
        if self.kind is None:
            yield root
            return
        for key, child in zip(self.keys, self.children, strict=True):
            yield from child.paths(root + _step(self.kind, key))

    def __str__(self) -> str:
        if self.kind is None:
            return "*"
        inner = ", ".join(f"{key}: {child}" for key, child in zip(self.keys, self.children, strict=True))
        if self.kind in (tuple, list):
            inner = ", ".join(map(str, self.children))
            return f"[{inner}]" if self.kind is list else f"({inner})"
        return "None" if self.kind is type(None) else f"{self.kind.__name__}({inner})"


LEAF = Structure(None)


def _step(kind: type, key: Hashable) -> str:
    if kind in (tuple, list):
        return f"[{key}]"
    return f"[{key!r}]" if issubclass(kind, dict) else f".{key}"


def _open(nest: Nest) -> tuple[tuple[Hashable, ...], tuple[Nest, ...], Hashable] | None:
    """Keys, children and aux of a container; None for a leaf."""
    kind = type(nest)
    if kind in _registered:
        return _registered[kind][0](nest)
    if kind in _leaf_types:
        return None
    if nest is None:
        return (), (), None
    if kind in (tuple, list):
        return tuple(range(len(nest))), tuple(nest), None
    if isinstance(nest, dict):
        return tuple(nest), tuple(nest.values()), nest.default_factory if isinstance(nest, defaultdict) else None
    if isinstance(nest, tuple) and hasattr(kind, "_fields"):
        return kind._fields, tuple(nest), None
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        names = tuple(field.name for field in dataclasses.fields(nest))
        return names, tuple(getattr(nest, name) for name in names), None
    if (fields := getattr(kind, "__attrs_attrs__", None)) is not None:
        names = tuple(field.name for field in fields)
        return names, tuple(getattr(nest, name) for name in names), None
    return None


def flatten(nest: Nest) -> tuple[list[Nest], Structure]:
    """Leaves, in order, and the structure that puts them back.

    Raises:
        GraphError: it contains itself.
    """
    leaves: list[Nest] = []
    try:
        return leaves, _flatten(nest, leaves)
    except RecursionError:
        raise GraphError(f"{a_kind(type(nest))} is nested too deep, or contains itself") from None


def _flatten(nest: Nest, leaves: list[Nest]) -> Structure:
    opened = _open(nest)
    if opened is None:
        leaves.append(nest)
        return LEAF
    keys, children, aux = opened
    return Structure(type(nest), keys, tuple(_flatten(child, leaves) for child in children), aux)


def flatten_like(structure: Structure, nest: Nest, *, nested_leaves: bool = False) -> list[Nest]:
    """Leaves of `nest` in the order of `structure`; dict keys match in any order.

    With `nested_leaves`, a container (a shape, say) may stand at a leaf of `structure`. None in the place of a
    registered container gives ``...`` for each of its leaves.

    Raises:
        StructureMismatch: `nest` is built differently; the message says where.
    """
    leaves: list[Nest] = []
    _flatten_like(structure, nest, "", leaves, nested_leaves)
    return leaves


def match(structure: Structure, nest: Nest, rule: str, *, nested_leaves: bool = False, advice: str = "") -> list[Nest]:
    """`flatten_like` for a nest that a user gives.

    Raises:
        GraphError: `nest` is built differently; the message begins with the `rule`, and ends with the `advice`.
    """
    try:
        return flatten_like(structure, nest, nested_leaves=nested_leaves)
    except StructureMismatch as error:
        raise GraphError(f"{rule}: {error}{advice}") from None


def _flatten_like(structure: Structure, nest: Nest, path: str, leaves: list[Nest], nested_leaves: bool) -> None:
    if structure.kind is None:
        if not nested_leaves and _open(nest) is not None:
            raise _mismatch(path, structure, nest)
        leaves.append(nest)
        return
    if nested_leaves and nest is None and structure.kind in _registered:
        leaves.extend([...] * structure.size)
        return
    if type(nest) is not structure.kind:
        raise _mismatch(path, structure, nest)
    keys, children, aux = _open(nest) or ((), (), None)
    if aux != structure.aux:
        expected = f"{describe(structure)} with {structure.aux!r}"
        raise StructureMismatch(f"{_prefix(path)}expected {expected}, got {aux!r}")
    if set(keys) != set(structure.keys):
        raise _mismatch(path, structure, nest)
    by_key = dict(zip(keys, children, strict=True))
    for key, child in zip(structure.keys, structure.children, strict=True):
        _flatten_like(child, by_key[key], path + _step(structure.kind, key), leaves, nested_leaves)


def _mismatch(path: str, structure: Structure, nest: Nest) -> StructureMismatch:
    return StructureMismatch(f"{_prefix(path)}expected {describe(structure)}, got {describe(flatten(nest)[1])}")


def _prefix(path: str) -> str:
    return f"{path}: " if path else ""


def describe(structure: Structure) -> str:
    """Describe a nest in words: ``a tuple of 2 values``."""
    kind = structure.kind
    if kind is None:
        return "one value"
    if kind is type(None):
        return "None"
    if kind in (tuple, list):
        count = len(structure.children)
        return f"{a_kind(kind)} of {counted(count, 'value')}" if count else f"an empty {kind.__name__}"
    if kind in _registered:
        return a_kind(kind)
    keys = ", ".join(map(repr if issubclass(kind, dict) else str, structure.keys))
    return f"{a_kind(kind)} with {'keys' if issubclass(kind, dict) else 'fields'} {keys or 'none'}"


def map_leaves(fn: Callable[[Any], object], nest: Nest) -> Nest:
    """`nest` with `fn` applied to each leaf."""
    leaves, structure = flatten(nest)
    return structure.unflatten([fn(leaf) for leaf in leaves])
