"""gpu_worker/device/torch_on_card.py on the fake driver: CPU tensors in memory that the driver counts as the card's.

Matrix products are operations of the fake driver (products.cpp), enqueued on the compute stream and captured like kernels.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import byref, c_int, c_int64, c_size_t, c_void_p

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device.cuda import Card, CardError

# What may be asked of a tensor on the card: its shape, and other views of it.
_VIEWS = {"view", "view_as", "unflatten", "narrow", "t", "transpose", "permute", "select", "split", "chunk", "unbind"}
_VIEWS |= {"squeeze", "unsqueeze", "expand", "as_strided", "as_subclass", "detach", "__getitem__"}
_LOOKS = {"__get__", "data_ptr", "stride", "size", "numel", "element_size", "dim", "storage_offset", "is_contiguous", "__len__"}


class OnCard(Tensor):
    """A tensor on the card. Whatever else torch does with it, it would do on a stream of its own, which waits for nobody; that
    would come out right here, where its memory is the host's, so it is refused. `in_host_memory` is for tests."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__name__
        index = args[1] if name == "__getitem__" else ()
        basic = all(isinstance(i, int | slice) for i in (index if isinstance(index, tuple) else (index,)))
        if name not in _VIEWS | _LOOKS or not basic:
            raise CardError(f"torch's {name} on memory of the card: it is not ordered with the compute stream")
        return super().__torch_function__(function, types, args, kwargs or {})

    def __repr__(self) -> str:
        return f"<on the card at {self.data_ptr():#x}: {tuple(self.shape)} {self.dtype}>"


def in_host_memory(tensor: Tensor) -> Tensor:
    """The same memory, for a test that looks into the card behind its back."""
    return tensor.as_subclass(Tensor)


def prepare(index: int) -> None:
    """The real one refuses where torch has no CUDA."""


class TorchOnCard:
    """Tensors and products of one card."""

    def __init__(self, card: Card) -> None:
        self.device = torch.device("cpu")
        self._card = card
        self._libcuda = ctypes.CDLL("libcuda.so.1")
        self._streaming = False

    def zeros(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], zeroed; what follows it is watched."""
        return torch.from_numpy(np.asarray(_Memory(self._libcuda, self._card.index, nbytes))).as_subclass(OnCard)

    def upload(self, tensor: Tensor) -> Tensor:
        """A copy on the card, complete when this returns."""
        self._card.synchronize()
        there = self.zeros(max(1, tensor.nbytes))[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        in_host_memory(there).copy_(tensor)
        return there

    def download(self, tensor: Tensor) -> Tensor:
        """A copy in host memory of what the compute stream's work so far leaves there. It does not wait for copies of images."""
        self._card.compute.synchronize()
        return in_host_memory(tensor).clone()

    def put(self, target: Tensor, rows: Tensor) -> None:
        """Copy `rows` into the first rows of `target` on the card, after all work enqueued so far."""
        self._card.synchronize()
        in_host_memory(target)[: len(rows)].copy_(rows)

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """`linear` is to be called within this: outside, torch would use a stream of its own."""
        before, self._streaming = self._streaming, True
        try:
            yield
        finally:
            self._streaming = before

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """As the real one; CardError if something does not lie on the card."""
        assert self._streaming, "linear outside streaming()"
        (m, k), (n, _) = x.shape, weight.shape
        assert weight.shape == (n, k) and out.shape == (m, n) and (bias is None or bias.shape == (n,))
        assert x.dtype == weight.dtype == torch.bfloat16 and out.dtype in (torch.bfloat16, torch.float32)
        assert bias is None or bias.dtype == out.dtype == torch.bfloat16
        assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
        self._card.call(
            "fakecuda_linear",
            c_void_p(self._card.compute.handle),
            *(c_void_p(out.data_ptr()), c_int64(out.stride(0)), c_int(out.dtype == torch.float32)),
            *(c_void_p(x.data_ptr()), c_int64(x.stride(0)), c_void_p(weight.data_ptr()), c_int64(weight.stride(0))),
            c_void_p(0 if bias is None else bias.data_ptr()),
            *(c_int(m), c_int(n), c_int(k)),
        )


class _Memory:
    """Memory of the card, given back with the last tensor that uses it."""

    def __init__(self, libcuda: ctypes.CDLL, card: int, nbytes: int) -> None:
        self._libcuda, self._address = libcuda, c_void_p()
        status = libcuda.fakecuda_zeros(c_int(card), byref(self._address), c_size_t(nbytes))
        if status == 2:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes. (the fake driver)")
        if status:
            raise CardError(f"an allocation of {nbytes} bytes: error {status} of the fake driver")
        self.__array_interface__ = {"data": (self._address.value, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if self._address.value:
            self._libcuda.cuMemFree_v2(self._address)
