"""A stand-in for `torch` on the cards of a `FakeCupy`: its streams are real ones, its tensors can add and multiply.

It computes on its current stream, and fails if CuPy has another one then: nothing would order the two.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.fake_cupy import FakeCupy
    from tests.fake_cupy.arrays import Capsule


class TorchOnCards:
    """The module."""

    float32, float64, bfloat16 = "torch.float32", "torch.float64", "torch.bfloat16"

    def __init__(self, fake: FakeCupy) -> None:
        self.fake = fake
        self.current = SimpleNamespace(cuda_stream=0)
        self.waits = 0
        self.nn = SimpleNamespace(Module=type("Module", (), {}))
        self.Tensor = TensorOnCard
        self.no_grad = self.enable_grad = nullcontext
        self.autograd = SimpleNamespace(grad=self._grad)
        self.cuda = SimpleNamespace(
            ExternalStream=lambda pointer, device: SimpleNamespace(cuda_stream=pointer, device=device),
            device=fake.cuda.Device,
            stream=self._stream,
            is_available=lambda: True,
            is_initialized=lambda: True,
            current_stream=lambda card: self.current,
            get_rng_state=lambda: b"",
        )

    @contextmanager
    def _stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def from_dlpack(self, array: Any) -> TensorOnCard:
        """A tensor in the memory of an array; PyTorch aborts the process where it has a negative stride."""
        assert min(array.strides, default=0) >= 0, array.strides
        assert array.size, "CuPy asks CUDA where the memory is, and there is none"
        return TensorOnCard(self, array.__dlpack__(stream=self.current.cuda_stream or 1).array)

    def _grad(
        self,
        ys: Sequence[TensorOnCard],
        at: Sequence[TensorOnCard],
        grads: Sequence[TensorOnCard],
        *,
        allow_unused: bool,
    ) -> list[TensorOnCard | None]:
        """Gradients of sums and products, on the current stream."""
        totals: dict[TensorOnCard, TensorOnCard] = {}

        def go_back(tensor: TensorOnCard, grad: TensorOnCard) -> None:
            if tensor in at:
                totals[tensor] = totals[tensor] + grad if tensor in totals else grad
            for operand, other in tensor.made_of:
                if operand.requires_grad:
                    go_back(operand, (grad if other is None else grad * other).summed_to(operand.shape))

        for y, grad in zip(ys, grads, strict=True):
            go_back(y, grad)
        return [totals.get(each) for each in at]

    def equal(self, a: object, b: object) -> bool:
        return a == b

    def zeros_like(self, tensor: TensorOnCard) -> TensorOnCard:
        return TensorOnCard(self, self.fake.zeros_like(tensor.array))

    def full(self, shape: tuple[int, ...], value: float, *, dtype: str, device: str) -> TensorOnCard:
        """A tensor filled by a kernel."""
        return TensorOnCard(self, self.fake.full(shape, value, dtype=np.dtype(dtype.rpartition(".")[2])))


class TensorOnCard:
    """A tensor; a result has memory of its own."""

    _version = 0
    device = "cuda"

    def __init__(
        self, torch: TorchOnCards, array: Any, made_of: Sequence[tuple[TensorOnCard, TensorOnCard | None]] = ()
    ) -> None:
        self.made_of = made_of
        """Operands, each with the factor of its gradient; None is 1."""
        self.requires_grad: bool = any(operand.requires_grad for operand, _ in made_of)
        self.torch = torch
        self.array = array
        self.dtype = f"torch.{array.dtype.name}"
        self.shape = array.shape

    def _result(self, array: Any, *made_of: tuple[TensorOnCard, TensorOnCard | None]) -> TensorOnCard:
        assert self.torch.current.cuda_stream == self.torch.fake.cuda.get_current_stream().ptr != 0
        return TensorOnCard(self.torch, array, made_of)

    def __mul__(self, other: TensorOnCard) -> TensorOnCard:
        return self._result(self.array * other.array, (self, other), (other, self))

    def __add__(self, other: TensorOnCard) -> TensorOnCard:
        return self._result(self.array + other.array, (self, None), (other, None))

    def summed_to(self, shape: tuple[int, ...]) -> TensorOnCard:
        return self if shape == self.shape else self._result(self.array.sum())

    def detach(self) -> TensorOnCard:
        return TensorOnCard(self.torch, self.array)

    def requires_grad_(self) -> TensorOnCard:
        self.requires_grad = True
        return self

    def clone(self) -> TensorOnCard:
        return self._result(self.array.copy())

    def itself(self) -> TensorOnCard:
        return self

    resolve_conj = resolve_neg = contiguous = itself

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self.array.data.ptr)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Capsule:
        """Makes the consumer's stream wait for torch's current one, which has to be another for that."""
        if stream not in (None, -1, self.torch.current.cuda_stream or 1):
            self.torch.waits += 1
        capsule: Capsule = self.array.__dlpack__(stream=-1)
        return capsule
