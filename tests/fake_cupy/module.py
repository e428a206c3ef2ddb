"""`FakeCupy`: what a test passes where the module `cupy` is expected, and the controls of the fake GPU."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.fake_cupy.arrays import Array, Capsule
from tests.fake_cupy.bindings import Bindings
from tests.fake_cupy.cublas import FakeCublas
from tests.fake_cupy.elementwise import ElementwiseKernel
from tests.fake_cupy.engine import Engine, Kind
from tests.fake_cupy.errors import CompileException, CUDADriverError, PerformanceWarning
from tests.fake_cupy.functions import BoundSignature, Functions, Namespace, Ufunc, parts_of, tables
from tests.fake_cupy.graphs import Graph, RawModule
from tests.fake_cupy.kernels import Kernels
from tests.fake_cupy.memory_map import MemoryMap
from tests.fake_cupy.pinned import pinned_module
from tests.fake_cupy.pool import Platform, memory_module
from tests.fake_cupy.raw_kernels import LoadedKernel, RawKernel
from tests.fake_cupy.runtime import Runtime
from tests.fake_cupy.streams import Device, Event, Stream, stream_classes

MEMORY_NAMES = (
    "BaseMemory",
    "Memory",
    "MemoryPointer",
    "MemoryPool",
    "UnownedMemory",
    "alloc",
    "get_allocator",
    "set_allocator",
    "using_allocator",
)
PINNED_NAMES = ("PinnedMemory", "PinnedMemoryPointer", "PinnedMemoryPool", "alloc_pinned_memory")


class Cuda:
    """`cupy.cuda`."""

    def __init__(self, engine: Engine, memory_map: MemoryMap, runtime: Runtime) -> None:
        self.runtime = runtime
        self.driver = SimpleNamespace(CUDADriverError=CUDADriverError)
        device, stream, event, self._streams = stream_classes(runtime)
        self.platform = Platform(engine, memory_map, runtime, device, self._streams)
        self.memory = memory_module(self.platform)
        self.pinned_memory = pinned_module(runtime, memory_map.host)
        self.stream = SimpleNamespace(Stream=stream, Event=event, get_current_stream=self.get_current_stream)
        self.device = SimpleNamespace(Device=device)
        self.compiler = SimpleNamespace(CompileException=CompileException)
        for name in MEMORY_NAMES:
            setattr(self, name, getattr(self.memory, name))
        for name in PINNED_NAMES:
            setattr(self, name, getattr(self.pinned_memory, name))
        self.Device: type[Device] = device
        self.Stream: type[Stream] = stream
        self.Event: type[Event] = event
        self.Graph = Graph

    def is_available(self) -> bool:
        return self.runtime.getDeviceCount() > 0

    def get_device_id(self) -> int:
        return self.runtime.getDevice()

    def get_current_stream(self, device_id: int = -1) -> Stream:
        return self._streams.current[self.runtime.getDevice() if device_id == -1 else device_id]

    def get_elapsed_time(self, start_event: Event, end_event: Event) -> float:
        return self.runtime.eventElapsedTime(start_event.ptr, end_event.ptr)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"cupy.cuda.{name} is not covered by the fake")


class FakeCupy:
    """Stands in for the module `cupy`.

    Args:
        devices: how many CUDA devices there are.
        nbytes: the memory of each.
        seed: of the order in which ready streams are served.
        peers: whether devices can access one another's memory.
        launch_limit: pending items of a stream after which giving more blocks.
        name: of every device.
    """

    __version__ = "14.2.0"

    def __init__(
        self,
        devices: int = 1,
        nbytes: int = 64 << 20,
        *,
        seed: int = 0,
        peers: bool = True,
        launch_limit: int = 1024,
        name: str = "Fake H200",
    ) -> None:
        self.engine = Engine(devices, seed, launch_limit)
        self.memory_map = MemoryMap(devices, nbytes)
        runtime = Runtime(self.engine, self.memory_map, peers=peers, name=name)
        self.cuda = Cuda(self.engine, self.memory_map, runtime)
        self.tables = tables()
        kernels = Kernels(self.cuda.platform)
        self._functions = Functions(kernels)
        self.ndarray: Any = type("ndarray", (Array,), {"_kernels": kernels, "_fake": self})
        kernels.ndarray = self.ndarray
        self.ElementwiseKernel: type[ElementwiseKernel] = type(
            "ElementwiseKernel", (ElementwiseKernel,), {"_kernels": kernels}
        )
        self.raw_kernels: dict[int, LoadedKernel] = {}
        self.RawKernel: type[RawKernel] = type(
            "RawKernel", (RawKernel,), {"_kernels": kernels, "_loaded": self.raw_kernels}
        )
        self.RawModule: type[RawModule] = type("RawModule", (RawModule,), {"_kernels": kernels})
        self.bindings = Bindings(self)
        self.cublas = FakeCublas(self)
        self.ufunc = Ufunc
        self.linalg = Namespace(self._functions, "linalg")
        self.fft = Namespace(self._functions, "fft")
        self._util = SimpleNamespace(PerformanceWarning=PerformanceWarning)

    # What `cupy` has

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        thing = self._functions.find("", name)
        setattr(self, name, thing)
        return thing

    def method(self, array: Any, name: str, signature: str) -> Any:
        """The bound method `name` of an array, by the function of that name."""
        if signature.startswith("<") or not hasattr(np.ndarray, name):
            raise AttributeError(f"cupy.ndarray.{name} is not covered by the fake")
        bound = BoundSignature.parse(f"self {signature}")

        def call(*args: Any, **kwargs: Any) -> Any:
            bound.check(f"ndarray.{name}", (array, *args), kwargs)
            if name in ("sort", "partition", "put"):
                array._kernels.mutate(name, getattr(np.ndarray, name), array, args, kwargs)
                return None
            return self._functions.call(name, getattr(np.ndarray, name), (array, *args), kwargs)

        return call

    def is_available(self) -> bool:
        return self.cuda.is_available()

    def array(
        self,
        obj: Any,
        dtype: Any = None,
        copy: bool | None = True,
        order: str = "K",
        subok: bool = False,
        ndmin: int = 0,
        *,
        blocking: bool = False,
    ) -> Any:
        """A device array of another one, or of values on the host, which are copied on the current stream."""
        if isinstance(obj, self.ndarray):
            wanted = obj.dtype if dtype is None else np.dtype(dtype)
            result = obj.astype(wanted, order=order or "K", copy=bool(copy))
        elif hasattr(obj, "__cuda_array_interface__"):
            result = self._of_interface(obj)
        elif isinstance(obj, (list, tuple)) and any(isinstance(part, self.ndarray) for part in parts_of(obj)):
            result = self.stack([self.array(part, dtype) for part in obj])
        else:
            result = self.ndarray.of(np.asarray(obj, dtype), order or "K")
            if blocking:
                self.cuda.get_current_stream().synchronize()
        missing = ndmin - result.ndim
        return result[(None,) * missing] if missing > 0 else result

    def _of_interface(self, obj: Any) -> Any:
        """An array in the memory that `obj` describes; waits for a stream that it names, as CuPy does by default."""
        face = obj.__cuda_array_interface__
        if face.get("stream") is not None:
            self.cuda.runtime.streamSynchronize(face["stream"])
        dtype = np.dtype(face["typestr"])
        memory = self.cuda.memory.UnownedMemory(face["data"][0], math.prod(face["shape"]) * dtype.itemsize, obj)
        return self.ndarray(face["shape"], dtype, self.cuda.memory.MemoryPointer(memory, 0), face.get("strides"))

    def asarray(
        self, a: Any, dtype: Any = None, order: str | None = None, *, copy: bool | None = None, blocking: bool = False
    ) -> Any:
        return self.array(a, dtype, copy=bool(copy), order=order or "K", blocking=blocking)

    asanyarray = asarray

    def ascontiguousarray(self, a: Any, dtype: Any = None) -> Any:
        if isinstance(a, self.ndarray) and a.flags.c_contiguous and dtype in (None, a.dtype):
            return a if a.ndim else a.reshape(1)
        return self.array(a, dtype, order="C")

    def asnumpy(
        self, a: Any, stream: Stream | None = None, order: str = "C", out: Any = None, *, blocking: bool = True
    ) -> Any:
        """A copy on the host; waits for it unless `out` is pinned and ``blocking=False``."""
        if isinstance(a, self.ndarray):
            return a.get(stream, order, out, blocking)
        return np.asarray(a)

    def astype(self, x: Any, dtype: Any, /, *, copy: bool = True) -> Any:
        return x.astype(dtype, copy=copy)

    def copy(self, a: Any, order: str = "K") -> Any:
        return a.copy(order=order)

    def from_dlpack(self, array: Any, *, device: Any = None, copy: bool | None = None) -> Any:
        """A view of what another library has in the memory of this fake, ordered with CuPy's current stream."""
        kind, card = array.__dlpack_device__()
        if kind != 2:
            raise BufferError(f"the fake has no memory of DLPack's type {kind}")
        with self.cuda.Device(card):
            capsule = array.__dlpack__(stream=self.cuda.get_current_stream().ptr or 1)
        if not isinstance(capsule, Capsule):
            raise BufferError(f"the fake exchanges arrays in its own memory only, not {type(array).__name__}")
        return capsule.array.copy() if copy else capsule.array.view()

    def get_array_module(self, *args: Any) -> Any:
        return self if any(isinstance(a, self.ndarray) for a in args) else np

    def get_default_memory_pool(self) -> Any:
        return self.cuda.memory.default_pool

    def get_default_pinned_memory_pool(self) -> Any:
        return self.cuda.pinned_memory.default_pool

    # Controls, which `cupy` does not have

    @property
    def calls(self) -> list[tuple[int, str]]:
        """``(thread id, name)`` of every blocking call so far."""
        return self.engine.calls

    def blocking(self, thread: int | None = None) -> list[str]:
        """The blocking calls of a thread, by default of the calling one."""
        ident = threading.get_ident() if thread is None else thread
        return [name for caller, name in list(self.engine.calls) if caller == ident]

    @property
    def errors(self) -> list[BaseException]:
        """Errors that kernels raised on the GPU thread; `close` raises them unless the test clears them."""
        return self.engine.errors

    def pause(self) -> None:
        """Execute nothing from here on; the running item is finished first."""
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    def step(self, count: int = 1) -> int:
        """While paused: execute up to `count` items and return how many were executed."""
        return self.engine.step(count)

    def wait_idle(self) -> None:
        """Wait until all work is done, without it counting as a blocking call."""
        self.engine.wait_idle()

    def pending(self, stream: Stream) -> int:
        """Return how many items given to `stream` are not done."""
        return self.engine.queue(stream.ptr, max(stream.device_id, 0)).pending(Kind.WORK, Kind.SLEEPER, Kind.MARK)

    def fail_next(self, code: int, call: str | None = None) -> None:
        """Make the next call of the runtime (or of its function `call`) give the error `code`.

        A sticky error (700, 719, ... see `errors.STICKY`) also loses the device. A launch is ``"launchKernel"``.
        """
        self.engine.fail_next(code, call)

    def fail_stream(self, stream: Stream, code: int = 700) -> None:
        """Give `stream` work that loses its device with `code` when it is executed."""
        device = max(stream.device_id, 0)
        self.engine.give(
            self.engine.queue(stream.ptr, device), "fault", lambda: self.engine.lose(device, code), internal=True
        )

    def fail_device(self, device: int, code: int = 700) -> None:
        """Lose `device` at once: its work is dropped, every later call about it raises `code`."""
        self.engine.lose(device, code)

    def close(self) -> None:
        """Stop the GPU thread, and give the memory back.

        Raises:
            ExceptionGroup: kernels raised on it.
        """
        self.engine.close()
        self.memory_map.give_back()
        errors, self.engine.errors = self.engine.errors, []
        if errors:
            raise BaseExceptionGroup("kernels failed on the fake GPU", errors)

    def __enter__(self) -> FakeCupy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
