"""Runs a straight plan: one short call in which nothing can wait, so that it needs neither scheduler nor scope."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from asyncflow.runtime.provenance import as_kernel_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.compiler.straight import Straight


def run_straight(straight: Straight, device: str, feeds: Sequence[Any]) -> list[Any]:
    """The fetched values for these fed ones.

    Raises:
        KernelError: the kernel failed.
    """
    inputs = straight.inputs(feeds)
    node = straight.node
    try:
        with np.errstate(all="ignore"):
            output = node.kernel(*inputs)  # type: ignore[misc]
    except BaseException as error:
        failure = as_kernel_error(error, node, "", inputs, device)
        raise failure from failure.__cause__
    return straight.results(output)
