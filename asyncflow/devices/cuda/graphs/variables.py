"""Variables in CUDA graphs: a graph reads and writes them at fixed addresses.

A variable has up to two buffers on a compute stream. A captured region writes to one of them in place, so in a steady
state nothing is copied and the address never changes. Values that readers hold never change. So before a launch nothing
else may refer to the value in a buffer that the graph writes to. If a fetch or a checkpoint still holds one, all
variables that the region writes are copied to their second buffers. The graph of those addresses is captured, or
launched if there is one. If both buffers are held, the region runs without a graph.

A value that came from elsewhere (a restore, an assignment outside graphs, another session) is copied into a buffer
first. Freed memory is used again in the order of its stream, and so is a buffer: it may be written to as soon as the
last reference to its value has gone. Work of other streams holds a reference until it is done, as to all memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from asyncflow.devices.captures import NotCapturableError
from asyncflow.devices.cuda.memory import active_requests
from asyncflow.devices.memory import MemoryLimitExceeded

if TYPE_CHECKING:
    from asyncflow.devices.captures import GraphVariable
    from asyncflow.devices.cuda.transfers.buffers import BuffersByVariable, VariableBuffer, VariableBuffers
    from asyncflow.devices.values import ArraySpec
    from asyncflow.streams.cuda.cupy_types import Cupy, CupyArray, Raw
    from asyncflow.streams.cuda.stream import CudaStream
    from asyncflow.values import Value

Buffers: TypeAlias = "tuple[VariableBuffer, ...]"
"""Buffers of a region's variables, in their order: the addresses of one graph."""


@dataclass(slots=True, eq=False, repr=False)
class RegionVariables:
    """The variables of a captured region.

    Attributes:
        cupy: the module.
        stream: the compute stream that the region runs on.
        buffers: memory of the device's variables; None without variables.
        variables: that it reads or writes.
    """

    cupy: Cupy
    stream: CudaStream
    buffers: BuffersByVariable | None
    variables: Sequence[GraphVariable]
    _turn: int = 0

    def kinds(self) -> tuple[ArraySpec | None, ...] | None:
        """Return the part of a graph's key that the variables decide; None if one of them has no value yet."""
        kinds = tuple([variable.kind for variable in self.variables])
        return None if None in kinds else kinds

    def choose(self) -> Buffers | None:
        """Return the buffers for the next launch, while the stream is active; None if there is no graph for now."""
        found = []
        for variable in self.variables:
            kind = variable.kind
            assert kind is not None and self.buffers is not None, "the caller has asked for the kinds"
            found.append(self.buffers.get(variable.key, self.stream, kind, variable.name))
        preferred = self._present_turn(found)
        for turn in (preferred, 1 - preferred):
            buffers = self._buffers(found, turn)
            if buffers is not None:
                self._turn = turn
                return buffers
        return None

    def _present_turn(self, found: Sequence[VariableBuffers]) -> int:
        """Return the turn of the first written variable that is in a buffer; the last one if none is."""
        for variable, buffers in zip(self.variables, found, strict=True):
            turn = buffers.turn_of(variable.handle) if variable.is_written else None
            if turn is not None:
                return turn
        return self._turn

    def _buffers(self, found: Sequence[VariableBuffers], turn: int) -> Buffers | None:
        """Return the buffers of `turn` for written variables, and the present ones of others.

        None if a buffer is held, or finds no room.
        """
        chosen = []
        for variable, buffers in zip(self.variables, found, strict=True):
            present = buffers.turn_of(variable.handle)
            turns = (turn,) if variable.is_written else (0, 1) if present is None else (present,)
            try:
                buffer = next((x for x in map(buffers.get, turns) if self._may_use(variable, x)), None)
            except MemoryLimitExceeded:
                return None
            if buffer is None:
                return None
            chosen.append(buffer)
        return tuple(chosen)

    def _may_use(self, variable: GraphVariable, buffer: VariableBuffer) -> bool:
        is_there = variable.handle is buffer.handle
        if is_there and not variable.is_written:
            return True
        return not buffer.is_held(int(is_there)) and (not is_there or variable.is_alone)

    def take(self, buffers: Buffers) -> bool:
        """Bring the values into the buffers, and make values that the launch will write the present ones.

        The caller holds `capturing`, until the launch. Returns False if the graph must not be launched: another thread
        holds a value, or there is no room for one. The values of variables then stay the same.
        """
        # Local names must not refer to a handle or a value: references are counted.
        for variable, buffer in zip(self.variables, buffers, strict=True):
            present = variable.present()
            if variable.handle is not buffer.handle and not self._bring(variable, buffer):
                return False
            if variable.is_written:
                if not variable.replace(buffer.handle, present):
                    return False
                del present
                if buffer.is_held(1):
                    return False
                buffer.handle.renew()
        return True

    def _bring(self, variable: GraphVariable, buffer: VariableBuffer) -> bool:
        if buffer.is_held(0):
            return False
        try:
            value = variable.given()
        except MemoryLimitExceeded:  # it is elsewhere: the usual code reports the node that reads it
            return False
        if isinstance(value, np.generic):
            buffer.array.fill(value)
        else:
            store(self.cupy, buffer.array, value, self.stream.raw)
        if not variable.is_written:
            buffer.handle.renew()
            variable.move(buffer.handle)
        return True


def stored(cupy: Cupy, raw: Raw, buffers: Buffers, outputs: Sequence[Value], ends: Sequence[Value]) -> list[Value]:
    """Store the last values of variables in their buffers, and return the outputs, none of them in a buffer.

    While a region is captured, a write only notes the new value, in memory of the graph. So a value that was read
    before a write stays the same to the end of the region.

    Args:
        cupy: the module.
        raw: the CuPy stream, which captures.
        buffers: of the variables.
        outputs: of the region.
        ends: a value for each variable; None if it was not written.

    Raises:
        NotCapturableError: a value has another shape than the one before.
    """
    inside = {id(buffer.array.data.mem) for buffer in buffers}

    def apart(value: CupyArray) -> CupyArray:
        is_inside = isinstance(value, cupy.ndarray) and id(value.data.mem) in inside
        return value.copy() if is_inside else value

    # Make all copies before the first store: a variable may have another one's value.
    kept, values = [apart(value) for value in outputs], [apart(value) for value in ends]
    for value, buffer in zip(values, buffers, strict=True):
        if value is None:
            continue
        if isinstance(value, np.generic):
            buffer.array.fill(value)
        elif value.shape == buffer.array.shape:
            store(cupy, buffer.array, value, raw)
        else:
            raise NotCapturableError(f"it writes a value of shape {value.shape} over one of {buffer.array.shape}")
    return kept


def store(cupy: Cupy, target: CupyArray, source: CupyArray, raw: Raw) -> None:
    """Copy an array of the same dtype and shape into one in C order, by the stream `raw`, which is active."""
    if not source.nbytes:
        return
    if not source.flags.c_contiguous:
        source = cupy.ascontiguousarray(source)
    runtime = cupy.cuda.runtime
    runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, runtime.memcpyDeviceToDevice, raw.ptr)
    active_requests().copies += 1
