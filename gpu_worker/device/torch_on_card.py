"""What torch does on a card: tensors live there, and matrix products are enqueued on the card's own compute stream.

All of torch.cuda that Parkade uses stands in this file, so that tests can put another in its place where there is no GPU.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from gpu_worker.device.cuda import Card
from wire.config import ConfigError


def prepare(index: int) -> None:
    """Before a Card is opened: torch makes the context that both share. ConfigError, in one line, if it cannot."""
    device = f"--device cuda:{index}"
    if not torch.cuda.is_available():
        lacks = "finds no NVIDIA driver or no card" if torch.version.cuda else "is a build without CUDA; install one with it"
        raise ConfigError(f"{device}: torch {torch.__version__} {lacks}; or choose --device cpu")
    if not index < (count := torch.cuda.device_count()):
        raise ConfigError(f"{device}: this machine has {count} card(s), counted from cuda:0; or choose --device cpu")
    try:
        torch.cuda.init()
        torch.cuda.set_device(index)
    except RuntimeError as error:  # its memory is full, or another process has it for itself
        raise ConfigError(f"{device}: {str(error).splitlines()[0]}; or choose --device cpu") from None


class TorchOnCard:
    """Tensors and products of one card."""

    def __init__(self, card: Card) -> None:
        self.device = torch.device("cuda", card.index)
        self._stream = torch.cuda.ExternalStream(card.compute.handle, device=self.device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._make_workspace()

    def zeros(self, nbytes: int) -> Tensor:
        """Allocate of `device/memory.py`: uint8 [nbytes] on the card, zeroed when this returns."""
        return self._there(torch.zeros(nbytes, dtype=torch.uint8, device=self.device))

    def upload(self, tensor: Tensor) -> Tensor:
        """A copy on the card, complete when this returns."""
        return self._there(tensor.to(self.device, copy=True))

    def download(self, tensor: Tensor) -> Tensor:
        """A copy in host memory of what the compute stream's work so far leaves there. It does not wait for copies of images."""
        self._stream.synchronize()
        return tensor.cpu()

    def put(self, target: Tensor, rows: Tensor) -> None:
        """Copy `rows` into the first rows of `target` on the card, after all work enqueued so far; complete when this returns."""
        torch.cuda.synchronize(self.device)
        target[: len(rows)].copy_(rows)
        torch.cuda.synchronize(self.device)

    def streaming(self) -> AbstractContextManager:
        """`linear` is to be called within this."""
        return torch.cuda.stream(self._stream)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Enqueue out = x W^T + b on the compute stream. x bf16 [M, K], weight bf16 [N, K], bias bf16 [N] (only with a bf16
        out), out bf16 or float32 [M, N]. Sums are float32. It allocates nothing, so a graph may hold it: torch has one workspace
        for all products of a stream, unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0 asks for another one."""
        if bias is not None:
            torch.addmm(bias, x, weight.t(), out=out)
        elif out.dtype == torch.float32:
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        else:
            torch.mm(x, weight.t(), out=out)

    def _make_workspace(self) -> None:
        """With the first product: before anybody asks how much memory is free, and outside of graphs."""
        tile = torch.zeros(16, 16, dtype=torch.bfloat16, device=self.device)
        with self.streaming():
            self.linear(tile, tile, None, torch.empty_like(tile))
        torch.cuda.synchronize(self.device)

    def _there(self, tensor: Tensor) -> Tensor:
        torch.cuda.synchronize(self.device)
        return tensor
