"""Values that flow through a graph on CUDA devices: arrays that know in the order of which stream they are valid.

Anything that is neither a `CudaArray` nor a `CudaOpaque` is a *host value*: counters, predicates, shapes, strings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from asyncflow.devices.values import DeviceArray, DeviceValue, DType
from asyncflow.errors import FetchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncflow.devices.protocol import Deliver, Placed, Shape
    from asyncflow.streams.cuda.cupy_types import CupyArray
    from asyncflow.streams.cuda.stream import CudaEvent, CudaStream
    from asyncflow.values import Index, Value


@dataclass(slots=True, eq=False, repr=False)
class Landing:
    """Memory that a copy fills: a ticket of the copy keeps it, since its home stream must not use it again before.

    Once the home stream waits for the copy, its order protects the memory as it does any other. The ticket then has
    nothing more to keep. So a copied array takes memory until its users are launched, and not until the copy is done.
    The host may be far ahead of the copy.

    Attributes:
        array: CuPy's; None once the home stream waits.
        home: the home stream.
    """

    array: CupyArray
    home: CudaStream

    def awaited_by(self, stream: CudaStream) -> None:
        """Take note that work given to `stream` from now on comes after the copy."""
        if stream is self.home:
            self.array = None


class ToHost(Protocol):
    """The copies of a device, as values ask for them: `CudaCopies`."""

    def fetch(self, value: CudaArray, deliver: Deliver, /) -> None:
        """Copy a device value to the host."""

    def told(self, read: Callable[[], Placed], deliver: Deliver, /) -> Callable[[BaseException | None], None]:
        """Return a notice that delivers the result of ``read()``."""


class Lender(Protocol):
    """The exchange of a device, as values ask for it: `Exchange`."""

    def lend(self, value: CudaArray, /) -> CupyArray:
        """Return the array itself, for other code."""


class CudaHome(Protocol):
    """The device of a value, as the value sees it: a `CudaDevice`."""

    @property
    def name(self) -> str:
        """Name of the logical device."""

    @property
    def copies(self) -> ToHost:
        """Copies to the host."""

    @property
    def exchange(self) -> Lender:
        """Exchange with other libraries."""

    @property
    def compute(self) -> CudaStream:
        """Stream of the device's kernels."""


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class CudaArray(DeviceArray):
    """An array in a CUDA device's memory.

    Invariant: work given to `stream` from now on finds the array written. Work given to any other stream does once that
    stream has waited for `written`.

    Attributes:
        array: CuPy's.
        home: the logical device it is on.
        stream: in whose order it is valid.
        name: of the node that made it.
    """

    array: CupyArray
    home: CudaHome
    stream: CudaStream
    name: str
    _event: CudaEvent | None = None
    _landing: Landing | None = None
    _followers: tuple[CudaStream, ...] = ()  # streams that wait for `_event` already
    can_lend = True

    @property
    def device(self) -> str:
        """The name of the logical device it is on."""
        return self.home.name

    def to_host(self, deliver: Deliver) -> None:
        """Copy the array to the host, on ``d2h``; see `Copies.fetch`."""
        self.home.copies.fetch(self, deliver)

    def lend(self) -> Placed:
        """CuPy's array; see `Exchange.lend`."""
        return self.home.exchange.lend(self)

    def __getitem__(self, key: Index) -> CudaArray:
        """A view of a part, valid when all of it is."""
        part, of = self.array[key], (self._event, self._landing, self._followers)
        return CudaArray(part, self.home, self.stream, self.name, *of)

    @property
    def written(self) -> CudaEvent:
        """An event that completes when the array is written; recorded when it is first asked for."""
        if self._event is None:
            self._event = self.stream.record()
        return self._event

    @property
    def is_recorded(self) -> bool:
        """True if `written` has an event already: later work of the stream is not before it."""
        return self._event is not None

    def order(self, stream: CudaStream) -> None:
        """Let work given to `stream` from now on find the array written."""
        if self.stream is not stream and stream not in self._followers:
            stream.wait(self.written)
            self._followers += (stream,)
            if self._landing is not None:
                self._landing.awaited_by(stream)

    def settle(self, stream: CudaStream) -> None:
        """`order`, for a compute stream of the array's device that a copy was not made on: the array is valid there.

        Later users of that stream need not wait again.
        """
        self.order(stream)
        self.stream = stream
        self.renew()

    def renew(self) -> None:
        """Forget an event recorded earlier: more work on `stream` belongs to the array now."""
        self._event = None
        self._followers = ()

    @property
    def dtype(self) -> DType:
        """Of the elements."""
        dtype: DType = self.array.dtype
        return dtype

    @property
    def shape(self) -> Shape:
        """The extents."""
        shape: Shape = self.array.shape
        return shape

    def _unseen(self, who: str) -> FetchError:
        return FetchError(f"{who} reads {self.name!r}, which is in the memory of {self.device}; fetch the value first")


@dataclass(slots=True, eq=False, repr=False)
class CudaOpaque(DeviceValue):
    """An object that holds arrays, such as a state of a TensorArray or a store of saved values.

    Attributes:
        value: the object.
        home: the logical device it is on.
        stream: in whose order its arrays are valid.
        is_foreign: another device may have made it, in whose order its memory is used again.
    """

    value: Value
    home: CudaHome
    stream: CudaStream
    is_foreign: bool = False
    _event: CudaEvent | None = None
    _followers: tuple[CudaStream, ...] = ()  # streams that wait for `_event` already

    def order(self, stream: CudaStream) -> None:
        """Order later work of `stream` behind the writers of the arrays."""
        if self.stream is not stream and stream not in self._followers:
            self._event = self._event or self.stream.record()
            stream.wait(self._event)
            self._followers += (stream,)

    def to_host(self, deliver: Deliver) -> None:
        """Deliver the object once all earlier work of the stream is done."""
        self.stream.notify(self.home.copies.told(lambda: self.value, deliver))

    def __repr__(self) -> str:
        return f"<CudaOpaque {self.value!r}>"
