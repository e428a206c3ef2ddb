"""`case` and `switch_case`: one of many branches, compiled to a balanced tree of `cond`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncflow.control.body import as_predicate, result_tensor, user_functions
from asyncflow.control.cond import cond, effects_advice
from asyncflow.control.primitives.switch import check_predicate
from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for, group, identity, is_symbolic
from asyncflow.graph.building.scopes import control_dependencies
from asyncflow.graph.graph import has_side_effect
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import OPAQUE, define, inputs_from
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import dtype_name, int64
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.logic import less
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.searching.searching import where

if TYPE_CHECKING:
    from asyncflow.values import Array, Kernel, Namespace, Nest, Value

    Branch = Callable[[], Nest]


def _index_spec(*preds: Spec, exclusive: bool, has_default: bool) -> Spec:
    for pred in preds:
        check_predicate(pred)
    return Spec(int64, ())


def _index_kernel(xp: Namespace, *, exclusive: bool, has_default: bool) -> Kernel:
    def kernel(*preds: Array) -> Value:
        holding = [index for index, pred in enumerate(preds) if pred]
        if exclusive and len(holding) > 1:
            listed = " and ".join(map(str, holding))
            raise ValueError(
                f"predicates {listed} of {len(preds)} hold (counted from 0), but this case is exclusive: at most one "
                f"may hold; leave out exclusive=True to take the first"
            )
        if not holding and not has_default:
            raise ValueError(f"none of the {len(preds)} predicates holds, and this case has no default")
        index = holding[0] if holding else len(preds)
        return np.int64(index)

    return kernel


CASE_INDEX = define("case_index", _index_spec, _index_kernel, host_inputs=inputs_from(0), traits=OPAQUE)
"""The number of the branch of a `case` that is taken; for the default, that of predicates."""


def case(
    pred_fn_pairs: Sequence[tuple[TensorLike, Branch]],
    default: Branch | None = None,
    exclusive: bool = False,
    *,
    name: str | None = None,
) -> Nest:
    """The results of the first branch whose predicate holds; only that branch's nodes run.

    Each function is called once, while the graph is built.

    Args:
        pred_fn_pairs: ``(predicate, function)``; a predicate is a boolean with one element, and all of them are
            computed.
        default: the branch taken if no predicate holds. None: that fails the run.
        exclusive: fail the run if several predicates hold, even though the first would be taken.
        name: of the node.

    Returns:
        What the branches return, as from `cond`: one nest, with equal dtypes.

    Raises:
        GraphError, DTypeError: there is no pair, or branches do not match; the message counts branches from 0, the
            default last.
        ValueError: (in the run, as the cause of a KernelError) several predicates of an exclusive case hold, and
            which; or none does, and there is no default.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     x = af.placeholder("float32", ())
    ...     af.case([(x < 0, lambda: -x), (x > 1, lambda: x)], default=lambda: x * x)
    <Tensor case:0 float32[]>
    """
    pairs: list[Any] = _listed(pred_fn_pairs, "case takes a list of pairs (predicate, function)")
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise GraphError(f"case takes at least one pair (predicate, function); got {pairs!r}")
    branches = user_functions((branch for _, branch in pairs), default)
    with graph_for(*(pred for pred, _ in pairs)):
        preds = [as_predicate(pred, "a predicate of case") for pred, _ in pairs]
        index = apply(CASE_INDEX, *preds, exclusive=bool(exclusive), has_default=default is not None)[0]
        return _Branches("case", branches).choose(index, name)


def switch_case(
    index: TensorLike, branches: Sequence[Branch], default: Branch | None = None, *, name: str | None = None
) -> Nest:
    """The results of ``branches[index]``; only that branch's nodes run.

    Each function is called once, while the graph is built. It takes about log2 of their number decisions to reach one.

    Args:
        index: an integer scalar.
        branches: functions without arguments.
        default: the branch taken if `index` is below 0 or past the end; None: the last of `branches`.
        name: of the node.

    Returns:
        What the branches return, as from `cond`: one nest, with equal dtypes.

    Raises:
        GraphError, DTypeError: there is no branch, or branches do not match; the message counts them from 0, the
            default last.
        ShapeError: `index` is not a scalar.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     i = af.placeholder("int32", ())
    ...     af.switch_case(i, [lambda: 1.0, lambda: 2.0, lambda: 4.0])
    <Tensor switch_case:0 float64[]>
    """
    listed = user_functions(_listed(branches, "switch_case takes a list of functions"), default)
    if not listed:
        raise GraphError("switch_case needs at least one branch")
    with graph_for(index):
        tensor = as_tensor(index)
        if tensor.dtype.kind not in "iu":
            raise DTypeError(f"the index of switch_case is an integer scalar; got {tensor!r}")
        if tensor.shape != ():
            raise ShapeError(f"the index of switch_case is an integer scalar; got {tensor!r}; use af.reshape")
        # An index past the end takes the last branch by itself; an index below 0 is sent there, too.
        wide = tensor if tensor.dtype == int64 else astype(tensor, int64)
        position = wide if len(listed) == 1 else where(less(wide, 0), len(listed) - 1, wide)
        return _Branches("switch_case", listed).choose(position, name)


def _listed(items: object, rule: str) -> list[Any]:
    if is_symbolic(items) or not isinstance(items, Iterable):
        raise GraphError(f"{rule}; got {items!r}")
    return list(items)


class _Branches:
    """The branches, called in their order, and held against the first."""

    def __init__(self, what: str, functions: Sequence[Branch]) -> None:
        self.what = what
        self.functions = functions
        self.first: tuple[list[Nest], nest.Structure] | None = None
        self.first_returned: Nest = None

    def choose(self, index: Tensor, name: str | None) -> Nest:
        """Return the results of branch number `index`, or of the last branch if the index is too large."""
        if len(self.functions) == 1:
            return self.only(index, name)
        return self.between(0, len(self.functions), index, self.what if name is None else name)

    def only(self, index: Tensor, name: str | None) -> Nest:
        """The results of the only branch: it waits for the index, which may fail, and they for all its effects."""
        graph = graph_for(index)
        with control_dependencies([index]):
            first = len(graph.nodes)
            leaves, structure = nest.flatten(self.call(0))
            effects = [node for node in graph.nodes[first:] if has_side_effect(node)]
            with control_dependencies(effects if graph.effects == "ordered" else []):
                name = self.what if name is None else name
                if not leaves:
                    return group(name=name)
                return structure.unflatten([identity(result_tensor(graph, leaf), name=name) for leaf in leaves])

    def between(self, start: int, end: int, index: Tensor, name: str | None = None) -> Nest:
        """The results of one of the branches `start` to `end`, the latter excluded."""
        if end - start == 1:
            return self.call(start)
        middle = (start + end) // 2
        returned = cond(
            less(index, middle),
            lambda: self.between(start, middle, index),
            lambda: self.between(middle, end, index),
            name=name,
        )
        is_inner = name is None
        return None if is_inner and isinstance(returned, Node) else returned

    def call(self, position: int) -> Nest:
        """The results of the branch.

        Raises:
            GraphError, DTypeError: it is unlike the first branch.
        """
        returned = self.functions[position]()
        if self.first is None:
            self.first = nest.flatten(returned)
            self.first_returned = returned
            return returned
        leaves, structure = self.first
        rule = f"branches 0 and {position} of {self.what} return different nests"
        others = nest.match(structure, returned, rule, advice=effects_advice((self.first_returned, returned)))
        for path, a, b in zip(structure.paths("result"), leaves, others, strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype != b.dtype:
                raise DTypeError(
                    f"{path} of {self.what} is {dtype_name(a.dtype)} in branch 0 and {dtype_name(b.dtype)} in branch "
                    f"{position}; convert one with af.astype"
                )
        return returned
