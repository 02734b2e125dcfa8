"""The kernels of cuda/*.cu as Python sees them: the file of each, what it is launched with, how its arguments are packed.

A launch is prepared once, with all its arguments, and then costs one call: what varies between steps lies in arrays on the
card (`device/step_buffers.py`), never in the arguments.
"""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from gpu_worker.device import nvrtc
from gpu_worker.device.cuda import Card, Stream

Call = Callable[[], None]  # enqueues one piece of work


@dataclass(frozen=True, slots=True)
class Kernel:
    """`arguments` as struct.pack takes them: P an address (0: null), i int32, q int64, f float32; in the order of the kernel's
    own. Native alignment is that of its parameters."""

    file: str
    block: int  # threads
    arguments: str
    shared_bytes: int = 0  # dynamic shared memory


_POOL = "Pqq"  # pool, block_bytes, hidden_at
KERNELS: dict[str, Kernel] = {
    "embed": Kernel("norm.cu", 256, "PPPi"),
    "rms_norm": Kernel("norm.cu", 256, "6Pif"),
    "pair": Kernel("norm.cu", 256, "7Pi" + _POOL + "4Pif"),
    "pair_draft": Kernel("norm.cu", 256, "6Pi" + _POOL + "4Piif"),
    "keep_hidden": Kernel("norm.cu", 256, _POOL + "7Pii"),
    "keep_accepted": Kernel("norm.cu", 256, _POOL + "8Pii"),
    "silu_mul": Kernel("mlp.cu", 256, "PPii"),
    "checksum": Kernel("image.cu", 256, "5Pi"),
    "draw": Kernel("sample.cu", 1024, "PPi8P"),
    "draw_draft": Kernel("sample.cu", 1024, "PPiPPi3Pi"),
    "accept": Kernel("sample.cu", 128, "7Pi"),
    "delta_check": Kernel("delta.cu", 1, "Pqq6P"),
    "delta_log": Kernel("delta.cu", 256, "P4qiiPi6P4i"),
    "delta_gate": Kernel("delta.cu", 256, "3Pii2Piif"),
    "delta_finish": Kernel("delta.cu", 1, "Pqq6P"),
}
for _dim in (64, 96, 128, 256):
    _attend_bytes = 16 * (5 * 4 * (_dim + 8) + 2 * (_dim + 8) + 32) + 16
    KERNELS[f"write_cells_d{_dim}"] = Kernel("cells.cu", 256, "PPqP4i4Pi2Pi2P3if")
    KERNELS[f"attend_d{_dim}"] = Kernel("attention.cu", 128, "3PqPi6Pi4if3P", _attend_bytes)
for _dim in (32, 64, 128):
    KERNELS[f"delta_inputs_k{_dim}"] = Kernel("delta.cu", 256, "6PqqiP3i7P4i")
    KERNELS[f"delta_rule_k{_dim}"] = Kernel("delta_rule.cu", 128, "7P6qi5P3i")


class Ops:
    """Some kernels, compiled for one card."""

    def __init__(self, card: Card, names: Iterable[str]) -> None:
        """Compiles the files that hold `names`, or takes them from the cache. ConfigError if they cannot be compiled."""
        self._card = card
        self._functions = {}
        names = list(names)
        for file in sorted({KERNELS[name].file for name in names}):
            wanted = {name: KERNELS[name].shared_bytes for name in names if KERNELS[name].file == file}
            self._functions |= card.functions(nvrtc.compiled(file, card.architecture), wanted)

    def prepare(self, name: str, grid: tuple[int, ...], *arguments: int | float, stream: Stream = None) -> Call:
        """A launch on `stream` (None: the compute stream) with `grid` blocks (up to three numbers)."""
        kernel = KERNELS[name]
        packed = struct.pack(kernel.arguments, *arguments)
        x, y, z = (*grid, 1, 1)[:3]
        launch = self._functions[name]._launch_kernel
        return partial(launch, (x, y, z), (kernel.block, 1, 1), packed, kernel.shared_bytes, stream or self._card.compute)
