"""One GPU through PyCUDA: context, streams, modules, launches, events, copies, page-locked memory and graphs. It knows no model.

PyCUDA is imported here and nowhere else, when a card is opened. What it lacks (graphs) or has broken
(`register_host_memory` ends the process with SIGSEGV) goes through ctypes to the libcuda that it has loaded.

Everything of a Card belongs to the thread that opened it, except `register` and `unregister`.
"""

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from ctypes import byref, c_size_t, c_uint, c_void_p
from typing import Any

import numpy as np

from wire.config import ConfigError

Stream = Any  # pycuda.driver.Stream
Event = Any  # pycuda.driver.Event
Function = Any  # pycuda.driver.Function

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the legacy default stream, like torch's own streams
_CAPTURE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: calls of other threads may not break a capture
_DEFAULT_SHARED_BYTES = 48 << 10  # dynamic shared memory that a kernel may have without asking


class CardError(RuntimeError):
    """A call to the driver failed."""


class Graph:
    """Launches of one stream that were captured once and are repeated as they were."""

    def __init__(self, card: "Card", graph: c_void_p, executable: c_void_p) -> None:
        self._card, self._graph, self._executable = card, graph, executable

    def launch(self) -> None:
        """Enqueue all of it on the compute stream."""
        self._card.call("cuGraphLaunch", self._executable, c_void_p(self._card.compute.handle))

    def close(self) -> None:
        """Give it back. Nothing of it may be under way."""
        self._card.call("cuGraphExecDestroy", self._executable)
        self._card.call("cuGraphDestroy", self._graph)


class Card:
    """A GPU and its three streams. Close it on the thread that opened it: a context that is left behind aborts the process."""

    def __init__(self, index: int) -> None:
        """ConfigError, in one line, if there is no such card, no driver or no PyCUDA."""
        self.index = index
        self.drv = _driver(index)
        self._libcuda = ctypes.CDLL("libcuda.so.1")
        device = self.drv.Device(index)
        self.name: str = device.name()
        self.capability: tuple[int, int] = device.compute_capability()
        self._context = device.retain_primary_context()  # torch's own
        self._context.push()
        self.compute: Stream = self.drv.Stream(_NON_BLOCKING)
        self.saving: Stream = self.drv.Stream(_NON_BLOCKING)
        self.loading: Stream = self.drv.Stream(_NON_BLOCKING)
        self._modules: list[Any] = []
        self._registered: dict[int, int] = {}  # address -> bytes
        self._register_lock = threading.Lock()
        self._pinned: list[np.ndarray] = []

    @property
    def architecture(self) -> int:
        """90 for compute capability 9.0."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def driver(self) -> int:
        """The version of CUDA that the driver knows: 13000 for 13.0."""
        return self.drv.get_driver_version()

    def memory(self) -> tuple[int, int]:
        """(free bytes, all bytes)"""
        return self.drv.mem_get_info()

    # kernels ----------------------------------------------------------------------------------------------------------
    def functions(self, image: bytes, shared_bytes: dict[str, int]) -> dict[str, Function]:
        """The kernels of a compiled module by name; `shared_bytes`: the dynamic shared memory that each is launched with."""
        module = self.drv.module_from_buffer(image)
        self._modules.append(module)
        found = {}
        for name, nbytes in shared_bytes.items():
            found[name] = function = module.get_function(name)
            if nbytes > _DEFAULT_SHARED_BYTES:
                function.set_attribute(self.drv.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, nbytes)
        return found

    def launch(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: bytes,
        shared_bytes: int = 0,
        stream: Stream = None,
    ) -> None:
        """Enqueue a kernel on `stream` (None: the compute stream). `arguments` are packed as struct.pack does natively."""
        function._launch_kernel(grid, block, arguments, shared_bytes, stream or self.compute)

    # order ------------------------------------------------------------------------------------------------------------
    def event(self) -> Event:
        """A new event without timing."""
        return self.drv.Event(self.drv.event_flags.DISABLE_TIMING)

    def record(self, stream: Stream) -> Event:
        """An event that is over when all that was enqueued on `stream` so far is: `event.query()`, `event.synchronize()`."""
        event = self.event()
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """What is enqueued on `stream` from now on begins when the event is over."""
        stream.wait_for_event(event)

    # copies -----------------------------------------------------------------------------------------------------------
    def to_host(self, target: np.ndarray, address: int, stream: Stream) -> None:
        """Enqueue a copy from the card. `target` must be page-locked and stay until the copy is over."""
        self.drv.memcpy_dtoh_async(target, address, stream)

    def to_card(self, address: int, source: np.ndarray, stream: Stream) -> None:
        """Enqueue a copy to the card. `source` must be page-locked and stay as it is until the copy is over."""
        self.drv.memcpy_htod_async(address, source, stream)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Page-locked host memory, uint8 [nbytes], zeroed, for the life of the card."""
        array = self.drv.pagelocked_zeros(nbytes, np.uint8)
        self._pinned.append(array)
        return array

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory that somebody else maps: whole pages that nobody has registered. From any thread."""
        with self._register_lock:
            self.call("cuMemHostRegister_v2", c_void_p(address), c_size_t(nbytes), c_uint(0))
            self._registered[address] = nbytes

    def unregister(self, address: int) -> None:
        """Undo `register` before the memory is unmapped or given back; no copy may be under way there. From any thread."""
        with self._register_lock:
            self.call("cuMemHostUnregister", c_void_p(address))
            del self._registered[address]

    @property
    def registered_bytes(self) -> int:
        """What is registered now."""
        return sum(self._registered.values())

    # graphs -----------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Graph]]:
        """Nothing enqueued on the compute stream meanwhile runs: it becomes the one Graph in the list, filled at the end."""
        graphs: list[Graph] = []
        stream = c_void_p(self.compute.handle)
        graph, executable = c_void_p(), c_void_p()
        self.call("cuStreamBeginCapture_v2", stream, c_uint(_CAPTURE_THREAD_LOCAL))
        try:
            yield graphs
        finally:
            self.call("cuStreamEndCapture", stream, byref(graph))
        self.call("cuGraphInstantiateWithFlags", byref(executable), graph, ctypes.c_ulonglong(0))
        graphs.append(Graph(self, graph, executable))

    # the driver -------------------------------------------------------------------------------------------------------
    def call(self, name: str, *arguments: Any) -> None:
        """A function of libcuda; CardError if it fails."""
        status = getattr(self._libcuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._libcuda.cuGetErrorString(status, byref(text))
            raise CardError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")

    def use_in_this_thread(self) -> None:
        """Make the card's context current in another thread, for `register` and `unregister`."""
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), ctypes.c_int(self.index))
        self.call("cuCtxSetCurrent", context)
        self.call("cuDevicePrimaryCtxRelease_v2", ctypes.c_int(self.index))  # the card's own hold keeps it

    def synchronize(self) -> None:
        """Wait for everything on the card."""
        self._context.synchronize()

    def close(self) -> None:
        """Give everything back. Functions, events and graphs of this card must be gone."""
        try:
            self.synchronize()
            for address in list(self._registered):
                self.unregister(address)
        finally:  # after a kernel that failed, too: a context that is left behind aborts the process
            self.compute = self.saving = self.loading = None
            self._modules.clear()
            self._pinned.clear()
            self._context.pop()
            self._context.detach()


def _driver(index: int) -> Any:
    """pycuda.driver, initialised, with a card `index`."""
    device = f"--device cuda:{index}"
    try:
        import pycuda.driver as drv
    except ModuleNotFoundError:
        raise ConfigError(f'{device}: PyCUDA is not installed; pip install "parkade[cuda]", or choose --device cpu') from None
    except ImportError as error:
        raise ConfigError(
            f"{device}: the NVIDIA driver is missing or older than PyCUDA: {error}; or choose --device cpu"
        ) from None
    try:
        drv.init()
        count = drv.Device.count()
    except drv.Error as error:
        raise ConfigError(f"{device}: {error}; or choose --device cpu") from None
    if not index < count:
        raise ConfigError(f"{device}: this machine has {count} card(s), counted from cuda:0; or choose --device cpu")
    return drv
