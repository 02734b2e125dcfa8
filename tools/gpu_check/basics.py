"""Whether PyCUDA, torch and the driver work together as the GPU worker takes for granted, and how fast the link is."""

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Iterator

import numpy as np
import torch

from gpu_worker.device.cuda import Card
from gpu_worker.device.torch_on_card import TorchOnCard
from tools.gpu_check.figures import Figure, held, seconds_of

LINK_BYTES_S = 55e9  # PCIe 5.0 x16 in one direction, as others measure it
REGION_BYTES = 256 << 20
SLAB_BYTES = 64 << 20


def versions(card: Card) -> Iterator[Figure]:
    """Which card and which software; the import alone has bound PyCUDA's symbols."""
    driver = ctypes.c_int()
    card.call("cuDriverGetVersion", ctypes.byref(driver))
    yield Figure("card", f"{card.name}, sm_{card.architecture}, {card.memory()[1] >> 30} GiB")
    yield Figure("software", f"Python {platform.python_version()}, torch {torch.__version__}, driver API {driver.value}")


def sharing(card: Card, tensors: TorchOnCard) -> Iterator[Figure]:
    """One context, one stream: torch's products and our copies in turn, without an event between them."""
    current = ctypes.c_void_p()
    card.call("cuCtxGetCurrent", ctypes.byref(current))
    mine = ctypes.c_void_p()
    card.call("cuDevicePrimaryCtxRetain", ctypes.byref(mine), card.index)
    card.call("cuDevicePrimaryCtxRelease_v2", card.index)
    yield held("torch and PyCUDA have one context", current.value == mine.value)
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.init.orthogonal_(torch.empty(256, 256), generator=generator).bfloat16()
    rows = torch.randn(64, 256, generator=generator).bfloat16()
    w, first = tensors.upload(weight), tensors.upload(rows)
    x, y = (tensors.upload(torch.zeros_like(rows)) for _ in range(2))
    found = []
    for waits in (False, True):
        card.drv.memcpy_dtod_async(x.data_ptr(), first.data_ptr(), x.nbytes, card.compute)
        for _ in range(1000):
            with tensors.streaming():
                tensors.linear(x, w, None, y)
            card.drv.memcpy_dtod_async(x.data_ptr(), y.data_ptr(), x.nbytes, card.compute)
            if waits:
                card.synchronize()
        found.append(tensors.download(x))
    yield held("1000 products and copies in turn on one stream", torch.equal(*found))


def graphs(card: Card, tensors: TorchOnCard) -> Iterator[Figure]:
    """A captured product and copy, replayed."""
    w, bias = tensors.upload(torch.eye(256).bfloat16() * 2), tensors.upload(torch.zeros(256).bfloat16())
    x, y = (tensors.upload(torch.ones(64, 256).bfloat16()) for _ in range(2))

    def double() -> None:
        tensors.linear(x, w, None, y)
        tensors.linear(x, w, bias, y)  # products with a bias have a workspace of their own
        card.drv.memcpy_dtod_async(x.data_ptr(), y.data_ptr(), x.nbytes, card.compute)

    with tensors.streaming():
        double()  # makes the workspace of the products before anything is captured
        card.compute.synchronize()
        with card.capture() as captured:
            double()
        for _ in range(5):
            captured[0].launch()
        card.compute.synchronize()
    yield held("a graph of a product and a copy repeats them", bool((tensors.download(x) == 64).all()))
    seconds = seconds_of(captured[0].launch, card.compute.synchronize, 200)
    yield Figure("replay of a graph of two", f"{seconds * 1e6:.1f} us", data=seconds * 1e6)
    captured[0].close()


def links(card: Card, tensors: TorchOnCard) -> Iterator[Figure]:
    """Page-locking of a memfd, and copies between it and the card by size, each direction and both."""
    fd = os.memfd_create("gpu-check", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, REGION_BYTES)
    region = mmap.mmap(fd, REGION_BYTES)
    os.close(fd)
    host = np.frombuffer(region, np.uint8)
    started = time.perf_counter()
    for at in range(0, REGION_BYTES, SLAB_BYTES):
        card.register(host.ctypes.data + at, SLAB_BYTES)
    seconds = (time.perf_counter() - started) * 2**30 / REGION_BYTES
    yield Figure("page-locking of the arena", f"{seconds:.2f} s/GiB", data=seconds)
    there = tensors.zeros(REGION_BYTES)
    for size in (256 << 10, 800 << 10, 4 << 20, 32 << 20):
        starts = range(0, SLAB_BYTES - size + 1, size)

        def out(size: int = size, starts: range = starts) -> None:
            for at in starts:
                card.to_host(host[at : at + size], there.data_ptr() + at, card.saving)

        def back(size: int = size, starts: range = starts) -> None:
            for at in starts:
                card.to_card(there.data_ptr() + SLAB_BYTES + at, host[SLAB_BYTES + at : SLAB_BYTES + at + size], card.loading)

        def both(out: object = out, back: object = back) -> None:
            out()
            back()

        moved = size * len(starts)
        for name, work, share in (("to the host", out, 1), ("to the card", back, 1), ("both ways", both, 2)):
            seconds = seconds_of(work, card.synchronize, 3, warm=1)
            found = share * moved / seconds
            wanted = size >= 800 << 10 and share == 1
            yield Figure(
                f"copies of {size >> 10} KiB {name}", f"{found / 1e9:.1f} GB/s", "80% of 55 GB/s" if wanted else "",
                found >= 0.8 * LINK_BYTES_S if wanted else None, found / 1e9,
            )  # fmt: skip
    for at in range(0, REGION_BYTES, SLAB_BYTES):
        card.unregister(host.ctypes.data + at)
