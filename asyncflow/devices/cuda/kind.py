"""The kind ``cuda``: cards of NVIDIA's, where there are a driver and CuPy."""

from __future__ import annotations

from asyncflow.devices.cuda.backend import cuda_backend
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.kinds import DeviceDescription, DeviceKind, DeviceOptions


class CudaKind(DeviceKind):
    """Logical CUDA devices. Those beyond the number of cards share them in turn."""

    name = "cuda"

    def open(self, index: int, options: DeviceOptions) -> CudaDevice:
        """The device ``cuda:<index>``; CUDA itself is left alone until it starts."""
        backend = cuda_backend()
        return CudaDevice(
            backend.cupy,
            index,
            physical=index % len(backend.cards),
            memory_limit=options.memory_limit,
            compute_streams=options.compute_streams,
            host=options.host,
            spill_directory=options.spill_directory,
        )

    def why_not(self, index: int) -> str | None:
        """Return the reason why CUDA is off."""
        backend = cuda_backend()
        return None if backend.cupy is not None else f"CUDA is off on this machine: {backend.reason}"

    def describe(self) -> tuple[DeviceDescription, ...]:
        """The cards, or why CUDA is off."""
        backend = cuda_backend()
        if backend.cupy is None:
            return (DeviceDescription(name="cuda", available=False, detail=f"off: {backend.reason}"),)
        return tuple(
            DeviceDescription(name=f"cuda:{card}", available=True, detail=line)
            for card, line in enumerate(backend.cards)
        )
