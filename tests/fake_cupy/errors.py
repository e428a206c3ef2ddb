"""The errors of CUDA and CuPy that the fake raises."""

from __future__ import annotations

import re
from typing import Final

ERRORS: Final = {
    1: "cudaErrorInvalidValue: invalid argument",
    2: "cudaErrorMemoryAllocation: out of memory",
    3: "cudaErrorInitializationError: initialization error",
    35: "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    214: "cudaErrorECCUncorrectable: uncorrectable ECC error encountered",
    217: "cudaErrorPeerAccessUnsupported: peer access is not supported between these two devices",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    600: "cudaErrorNotReady: device not ready",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    701: "cudaErrorLaunchOutOfResources: too many resources requested for launch",
    702: "cudaErrorLaunchTimeout: the launch timed out and was terminated",
    704: "cudaErrorPeerAccessAlreadyEnabled: peer access is already enabled",
    705: "cudaErrorPeerAccessNotEnabled: peer access has not been enabled",
    710: "cudaErrorAssert: device-side assert triggered",
    714: "cudaErrorHardwareStackError: hardware stack error",
    715: "cudaErrorIllegalInstruction: an illegal instruction was encountered",
    716: "cudaErrorMisalignedAddress: misaligned address",
    718: "cudaErrorInvalidPc: invalid program counter",
    719: "cudaErrorLaunchFailure: unspecified launch failure",
    801: "cudaErrorNotSupported: operation not supported",
    900: "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing",
    901: "cudaErrorStreamCaptureInvalidated: operation failed due to a previous error during capture",
    905: "cudaErrorStreamCaptureIsolation: dependency created on uncaptured work in another stream",
    907: "cudaErrorCapturedEvent: operation not permitted on an event last recorded in a capturing stream",
    908: "cudaErrorStreamCaptureWrongThread: attempt to terminate a thread-local capture sequence from another thread",
    999: "cudaErrorUnknown: unknown error",
}

STICKY: Final = frozenset({214, 700, 702, 710, 714, 715, 716, 718, 719, 999})
"""The errors that leave a context unusable."""


class CUDARuntimeError(RuntimeError):
    """An error of the CUDA runtime; `status` is its code."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(ERRORS.get(status, f"cudaError {status}: unrecognized error code"))


def driver_name(status: int) -> str:
    """The name that the driver has for an error, whose names of the runtime are in `ERRORS`."""
    name = ERRORS.get(status, f"cudaError{status}").partition(": ")[0]
    return f"CUDA_ERROR_{re.sub(r'(?<=[a-z])(?=[A-Z])', '_', name.removeprefix('cudaError')).upper()}"


class CUDADriverError(RuntimeError):
    """An error of the CUDA driver, of which CuPy launches kernels; no kind of `CUDARuntimeError`."""

    def __init__(self, status: int) -> None:
        self.status = status
        text = ERRORS.get(status, f"cudaError {status}: unrecognized error code").partition(": ")[2]
        super().__init__(f"{driver_name(status)}: {text}")


class OutOfMemoryError(MemoryError):
    """No room on the device, or the pool's limit is reached."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        self._size, self._total, self._limit = size, total, limit
        text = f"Out of memory allocating {size:,} bytes"
        if limit:
            text += f" (allocated so far: {total:,} bytes, limit set to: {limit:,} bytes)."
        elif total != -1:
            text += f" (allocated so far: {total:,} bytes)."
        super().__init__(text)


class CompileException(Exception):
    """The source of a kernel does not compile."""

    def __init__(self, msg: str, source: str, name: str, options: tuple[str, ...], backend: str = "nvrtc") -> None:
        self._msg = msg
        self.source, self.name, self.options, self.backend = source, name, options, backend
        super().__init__(msg)

    def __str__(self) -> str:
        return self._msg

    def get_message(self) -> str:
        return self._msg


class PerformanceWarning(RuntimeWarning):
    """CuPy's warning of something slow, as `cupy._util.PerformanceWarning`."""


class DeviceFault(Exception):
    """Raised by work on the GPU thread: it loses its device with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(ERRORS.get(code, str(code)))
        self.code = code


class WouldBlockForEverError(AssertionError):
    """A test thread paused the fake and then made a call that blocks: the test is wrong, or found a bug."""
