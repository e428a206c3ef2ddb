"""Pass: lets nodes call the kernels that users have registered for the kind of their device.

A user's function without a kernel for a card is left to the host, with copies both ways, and the log says so once. The
plan says of each op with kernels of its own which of them it uses, and why.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from asyncflow.compiler.program.host_values import is_scalar_spec
from asyncflow.compiler.program.kernels.device_kernels import Kernels, call_kernel, has_strings
from asyncflow.devices.protocol import Device
from asyncflow.errors import counted
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node
from asyncflow.graph.op import Op, runs_on_host
from asyncflow.ops.rows.by_row import BY_ROW_OPS, called_op

_log = logging.getLogger("asyncflow.compiler")

_MOST_NAMED = 4
"""Nodes of one kernel that the plan names."""


def choose_kernels(
    graph: Graph, devices: Mapping[str, Device], kernels: Kernels, warned: set[tuple[Op, str]]
) -> tuple[str, ...]:
    """Give nodes the kernels of their devices, in place.

    Args:
        graph: with the device of every node.
        devices: of the session, by name.
        kernels: of the session.
        warned: ops, with kinds of device, that the log has told of; more are added.

    Returns:
        Lines for people.

    Raises:
        GraphError: a kernel does not take the arguments of a node.
    """
    uses: dict[str, list[str]] = {}
    for node in graph.walk():
        if node.op.kernel is None or node.device is None:
            continue
        device = devices[node.device]
        kernel = kernels.find(node, device.kind)
        if kernel is not None:
            call_kernel(node, kernel, on_card=device.xp is not np)
            uses.setdefault(f"on {node.device}: {kernel}", []).append(node.name)
        elif device.capabilities.own_memory and is_left_to_host(node):
            own, copies = called_op(node), _copies(node)
            why = f"no kernel for {device.kind!r} is registered, so the host calls its function, with {copies}"
            uses.setdefault(f"on {node.device}: {why}", []).append(node.name)
            if (own, device.kind) not in warned:
                warned.add((own, device.kind))
                _log.warning("%s (%s) on %s: %s\n  built at %s", node.name, own.name, node.device, why, node.location)
    return tuple(f"{_listed(names)} {use}" for use, names in uses.items())


def is_left_to_host(node: Node) -> bool:
    """Return True if a card would leave a user's function to the host, where a kernel could be registered for it."""
    own = called_op(node)
    is_plain = own.conduct.is_user and not own.conduct.is_async and own.effects is None
    return is_plain and runs_on_host(node) and not has_strings(node)


def _copies(node: Node) -> str:
    first = 1 if node.op in BY_ROW_OPS else 0  # row numbers are on the host
    ins = sum(not is_scalar_spec(x.spec) or x.dtype.kind == "f" for x in node.inputs[first:])
    outs = sum(not is_scalar_spec(x.spec) or x.dtype.kind == "f" for x in node.outputs)
    return f"up to {counted(ins, 'array')} copied to the host and {outs} back in each call"


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
