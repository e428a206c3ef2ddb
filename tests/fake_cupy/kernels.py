"""Conversion of functions of arrays to queued work: types and shapes now, values when the GPU thread gets there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tests.fake_cupy.memory_map import Operand
from tests.fake_cupy.pool import Platform

if TYPE_CHECKING:
    from tests.fake_cupy.arrays import Array
    from tests.fake_cupy.engine import Queue

MEGABYTE = 1 << 20
"""A host copy of at least this many bytes is logged as blocking."""


CUBLAS = {"dot", "einsum", "inner", "kron", "matmul", "tensordot", "vdot"}
"""Functions that may call cuBLAS, which CuPy refuses while the stream captures."""

METADATA = {
    *("broadcast_shapes", "can_cast", "common_type", "iscomplexobj", "isrealobj", "isscalar", "min_scalar_type"),
    *("ndim", "promote_types", "result_type", "shape", "size", "typename"),
}
"""Functions whose results say nothing of the values of their arguments."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of the i-th array in a tree of arguments."""

    index: int


def take_out(tree: Any, kinds: tuple[type, ...], found: list[Any]) -> Any:
    """The tree with slots for the instances of `kinds`, which are appended to `found`."""
    if isinstance(tree, kinds):
        found.append(tree)
        return Slot(len(found) - 1)
    if type(tree) in (tuple, list):
        return type(tree)(take_out(part, kinds, found) for part in tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(take_out(part, kinds, found) for part in tree))
    if type(tree) is dict:
        return {key: take_out(part, kinds, found) for key, part in tree.items()}
    return tree


def put_in(tree: Any, values: Sequence[Any]) -> Any:
    """The inverse of `take_out`."""
    if isinstance(tree, Slot):
        return values[tree.index]
    if type(tree) in (tuple, list):
        return type(tree)(put_in(part, values) for part in tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(put_in(part, values) for part in tree))
    if type(tree) is dict:
        return {key: put_in(part, values) for key, part in tree.items()}
    return tree


def leaves_of(result: Any) -> list[Any]:
    """The arrays and NumPy scalars in what a NumPy function returned."""
    found: list[Any] = []
    take_out(result, (np.ndarray, np.generic), found)
    return found


@lru_cache(maxsize=512)
def _filled(shape: tuple[int, ...], dtype: np.dtype[Any], order: Literal["C", "F"]) -> np.ndarray:
    """Return an array whose values are valid indices and divisors; it is read-only."""
    made = (np.zeros if dtype.kind in "biu" else np.ones)(shape, dtype, order)
    made.flags.writeable = False
    return made


def stand_in(array: Array) -> np.ndarray:
    """A NumPy array of the same type, shape and memory order, to find out what a function gives."""
    return _filled(array.shape, array.dtype, "F" if array.flags.fnc else "C")


class Kernels:
    """Launches work of one fake on the current stream."""

    ndarray: type[Array]

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    # Launching

    def check_devices(self, arrays: Sequence[Array]) -> int:
        """The current device, which all arrays must be on."""
        current = self.platform.runtime.getDevice()
        for array in arrays:
            if array.data.device_id != current:
                raise ValueError(
                    "Array device must be same as the current device: "
                    f"array device = {array.data.device_id} while current = {current}"
                )
        return current

    def enqueue(self, name: str, work: Callable[[], None], addresses: Sequence[int]) -> None:
        """Give `work` on memory at these addresses to the current stream."""
        engine = self.platform.engine
        engine.enter("launchKernel", self.platform.runtime.getDevice())
        engine.give(self.current_queue(), name, work, addresses=addresses)

    def current_queue(self) -> Queue:
        """The work of the current stream."""
        return self.platform.engine.queue(self.platform.current_stream().ptr, self.platform.runtime.getDevice())

    def launch(
        self,
        name: str,
        compute: Callable[..., Sequence[Any] | None],
        reads: Sequence[Array],
        writes: Sequence[Array] = (),
    ) -> None:
        """Compute on views of `reads` when executed, and write what that gives to `writes`."""
        self.check_devices([*reads, *writes])
        sources, targets = [a.operand for a in reads], [a.operand for a in writes]
        addresses = [operand.ptr for operand in (*sources, *targets) if operand.size]
        self.enqueue(name, lambda: self._execute(compute, sources, targets), addresses)

    def _execute(
        self, compute: Callable[..., Sequence[Any] | None], sources: list[Operand], targets: list[Operand]
    ) -> None:
        view = self.platform.memory.view
        with np.errstate(all="ignore"):
            results = compute(*map(view, sources))
            for target, result in zip(targets, results or (), strict=True):
                np.copyto(view(target), result, casting="unsafe")

    def synchronize(self, name: str) -> None:
        """Wait for the current stream, logged as `name`."""
        engine, device = self.platform.engine, self.platform.runtime.getDevice()
        engine.enter(name, device)
        queue = self.current_queue()
        if queue.capture is not None:
            raise queue.capture.break_with(900)
        engine.block(name, lambda: queue.idle, device)

    # Functions

    def call(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any = None, *, now: bool = False) -> Any:
        """``function(*args, **kwargs)`` of NumPy, for arguments with device arrays in them.

        Args:
            name: what the launch is called.
            function: takes and gives NumPy arrays.
            args: may hold device arrays, also in lists and tuples.
            kwargs: likewise; ``out`` is an array or a tuple of arrays to write to.
            now: the shapes depend on the values, so the stream is waited for first, which is logged.

        Returns:
            What the function does, with new device arrays in place of NumPy's.
        """
        kwargs = dict(kwargs or {})
        out = kwargs.pop("out", None)
        outs = [] if out is None else list(out) if isinstance(out, tuple) else [out]
        if name in CUBLAS and self.platform.current_stream().is_capturing():
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
        for target in outs:
            if not isinstance(target, self.ndarray):
                raise TypeError(f"return arrays must be of ndarray, not {type(target).__name__}")
        reads: list[Array] = []
        tree = take_out((args, kwargs), (self.ndarray,), reads)
        self.check_devices([*reads, *outs])

        def run(*values: Any) -> Any:
            arguments, keywords = put_in(tree, values)
            return function(*arguments, **keywords)

        if now:
            self.synchronize(name)
            values: Iterator[np.ndarray] = (self.platform.memory.view(a.operand).copy() for a in reads)
        else:
            values = map(stand_in, reads)
        with np.errstate(all="ignore"):
            result = run(*values)
        found: list[Any] = []
        shape = take_out(result, (np.ndarray, np.generic), found)
        if not found:
            if reads and name not in METADATA:
                raise NotImplementedError(f"cupy.{name} gives no array and is not covered by the fake")
            return result
        writes = self._outputs(found, outs)
        if any(array.size for array in writes):
            if now:
                self.launch(name, lambda: found, (), writes)
            else:
                self.launch(name, lambda *values: leaves_of(run(*values)), reads, writes)
        return put_in(shape, writes)

    def _outputs(self, found: list[Any], outs: list[Array]) -> list[Array]:
        """Return new arrays for the results, or the given ones, which must fit."""
        if not outs:
            return [self.empty_as(leaf) for leaf in found]
        for leaf, target in zip(found, outs, strict=True):
            if target.shape != leaf.shape:
                raise ValueError(f"non-broadcastable output operand with shape {target.shape}, expected {leaf.shape}")
            if not np.can_cast(leaf.dtype, target.dtype, "same_kind"):
                raise TypeError(
                    f"output (typecode '{leaf.dtype.char}') could not be coerced to provided output parameter "
                    f"(typecode '{target.dtype.char}') according to the casting rule \"same_kind\""
                )
        return outs

    def empty_as(self, leaf: Any) -> Array:
        """A new array like the NumPy array or scalar `leaf`."""
        flags = leaf.flags
        order = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
        return self.ndarray(leaf.shape, leaf.dtype, order=order)

    def mutate(self, name: str, function: Callable[..., Any], target: Array, args: Any, kwargs: Any = None) -> None:
        """``function(target, *args, **kwargs)``, which changes `target`."""
        reads: list[Array] = []
        tree = take_out((args, dict(kwargs or {})), (self.ndarray,), reads)

        def run(first: np.ndarray, *values: Any) -> None:
            arguments, keywords = put_in(tree, values)
            function(first, *arguments, **keywords)

        self.check_devices([target, *reads])
        with np.errstate(all="ignore"):
            # Raises here what is wrong with shapes and types.
            run(stand_in(target).copy("A"), *map(stand_in, reads))
        if target.size:
            self.launch(name, run, [target, *reads])

    def launch_mutation(self, name: str, function: Callable[..., Any], target: Array, args: Any) -> None:
        """`mutate` without the check on stand-ins: shapes depend on the values."""
        reads: list[Array] = []
        tree = take_out(args, (self.ndarray,), reads)
        self.launch(name, lambda first, *values: function(first, *put_in(tree, values)), [target, *reads])

    def view(self, array: Array, function: Callable[[np.ndarray], np.ndarray]) -> Array | None:
        """Return the result of `function` if it is a view of `array`; None if it is a copy.

        It runs on the array's real memory, so layouts are NumPy's; the values are not looked at.
        """
        memory = self.platform.memory.view(array.operand)
        result = function(memory)
        low, high = array.operand.bounds()
        address = int(result.__array_interface__["data"][0])
        if result.size == 0:
            return array.alias(result.shape, result.strides, 0, result.dtype)
        if not low <= address < high:
            return None
        return array.alias(result.shape, result.strides, address - array.data.ptr, result.dtype)

    # From and to the host

    def from_host(self, source: np.ndarray, target: Array, *, staged: bool = True) -> None:
        """Copy a NumPy array of the same shape into `target` on the current stream.

        Pinned memory is read when the copy is executed. Pageable memory is staged; unless `staged`, that counts as
        blocking whatever its size.
        """
        platform = self.platform
        if platform.current_stream().is_capturing():
            raise RuntimeError("copies between host and device memory are not supported during stream capture")
        self.check_devices([target])
        nbytes = source.nbytes
        pinned = nbytes > 0 and source.flags.forc and platform.memory.is_pinned(int(source.ctypes.data), nbytes)
        if not pinned:
            if nbytes >= MEGABYTE or not staged:
                platform.engine.log(f"host copy of {nbytes} bytes")
            source = source.copy()
        if nbytes:
            self.launch("copy from host", lambda: [source], (), [target])
