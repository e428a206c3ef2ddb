"""Another library with arrays on the cards of a `FakeCupy`, and with current streams of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fake_cupy import FakeCupy
    from tests.fake_cupy.arrays import Capsule


class Library:
    """As PyTorch: it writes to arrays in the order of its current stream, one a card."""

    def __init__(self, fake: FakeCupy) -> None:
        self.fake = fake
        self.streams = []
        for card in range(fake.cuda.runtime.getDeviceCount()):
            with fake.cuda.Device(card):
                self.streams.append(fake.cuda.Stream(non_blocking=True))

    def tensor(self, values: Any, card: int = 0) -> Tensor:
        """A tensor, which is written in the order of the current stream."""
        with self.fake.cuda.Device(card), self.streams[card]:
            return Tensor(self, self.fake.asarray(values))

    def module(self) -> Any:
        """A module in `sys.modules` by the name of torch, with its streams."""
        cuda = SimpleNamespace(
            is_initialized=lambda: True,
            current_stream=lambda card: SimpleNamespace(cuda_stream=self.streams[card].ptr),
        )
        return SimpleNamespace(Tensor=Tensor, cuda=cuda, bfloat16=object())


class Tensor:
    """A tensor whose dtype is no NumPy's."""

    requires_grad = False

    def __init__(self, library: Library, array: Any) -> None:
        self.library = library
        self.array = array

    @property
    def dtype(self) -> str:
        return f"library.{self.array.dtype.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.array.shape
        return shape

    @property
    def card(self) -> int:
        card: int = self.array.data.device_id
        return card

    def fill_(self, value: float) -> None:
        """Write to it, in the order of the current stream."""
        with self.library.fake.cuda.Device(self.card), self.library.streams[self.card]:
            self.array.fill(value)

    def copy(self) -> Tensor:
        """A copy, in the order of the current stream."""
        with self.library.fake.cuda.Device(self.card), self.library.streams[self.card]:
            return Tensor(self.library, self.array.copy())

    clone = copy

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.card

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Capsule:
        """Makes the consumer's stream wait for the library's current one."""
        with self.library.fake.cuda.Device(self.card), self.library.streams[self.card]:
            capsule: Capsule = self.array.__dlpack__(stream=stream, **options)
        return capsule
