"""Makes a model that can run from a model's files: weights in the wanted format, on the native library or in torch."""

import ctypes
import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor

from gpu_worker.device import native as library
from gpu_worker.device import reference
from gpu_worker.device.reference import DenseLinear
from gpu_worker.model.decoder import TorchModel
from gpu_worker.model.layers import AttentionLayer, DeltaLayer, Fused, Layer, Mlp, MtpHead
from gpu_worker.model.native_model import NativeModel, fits
from gpu_worker.model.rope import RopeTable
from gpu_worker.model.toy import ToyModel
from gpu_worker.model.weights import Quantised, Weights
from wire.model_files import ModelFiles
from wire.model_spec import ModelSpec

Model = NativeModel | TorchModel | ToyModel
PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down", "in_qkv", "in_z", "out")  # that decide whether a model is in 4 bits


def load_model(
    files: ModelFiles,
    dtype: str = "auto",
    exact: bool = True,
    threads: int | None = None,
    native: bool = True,
    mtp: bool = True,
) -> Model:
    """A model for the CPU; its own `spec` counts, not that of `files`.

    `dtype`: auto (4-bit weights stay in 4 bits, and natively the head that drafts follows them; bf16 elsewhere), bf16 or f32.
    `exact`: a row's result depends on its own sequence only (the native library gives that for nothing, torch pads rows).
    `threads` None: as many as there are processors for this process. `native` False: in torch even if the library is there.
    `mtp` False: without the head that drafts.
    """
    if files.kind == "toy":
        torch.set_num_threads(1)
        return ToyModel(files.spec)
    threads = threads or available_processors()
    spec = files.spec if mtp else structs.replace(files.spec, mtp=None)
    weights = Weights(files)
    name = _dtype_name(weights, spec.num_layers, dtype)
    lib = library.load() if native and fits(spec) else None
    torch.set_num_threads(1 if lib else threads)  # two teams of threads would take the processors from each other
    model = NativeModel(lib, weights, spec, name, dtype == "auto", threads) if lib else torch_model(spec, weights, name, exact)
    _give_memory_back()
    return model


def available_processors() -> int:
    """Processors that this process may use, by affinity and by the control group's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return count if quota == "max" else max(1, min(count, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return count


def _dtype_name(weights: Weights, num_layers: int, dtype: str) -> str:
    if dtype != "auto":
        return dtype
    products = [f"layers.{i}.{part}" for i in range(num_layers) for part in PRODUCTS]
    return "int4" if any(weights.has(product) and weights.is_four_bit(product) for product in products) else "bf16"


def torch_model(spec: ModelSpec, weights: Weights, name: str, exact: bool) -> TorchModel:
    """In torch, `name` f32, bf16 or int4."""
    dtype = torch.float32 if name == "f32" else torch.bfloat16
    embed = weights.dense("embed", torch.float32 if spec.tied else dtype)
    head = DenseLinear(embed if spec.tied else weights.dense("head", torch.float32), exact=exact)
    load = _Loader(spec, weights, name, dtype, exact)
    layers = [load.layer(i) for i in range(spec.num_layers)]
    mtp = load.mtp(head) if spec.mtp else None
    rope = RopeTable(spec.rope, spec.rotary_dim or spec.head_dim, spec.max_context)
    return TorchModel(spec, name, embed, layers, load.vector("norm"), head, mtp, rope, exact)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Makes the parts of a TorchModel."""

    spec: ModelSpec
    weights: Weights
    name: str
    dtype: torch.dtype
    exact: bool

    def layer(self, index: int) -> Layer:
        prefix = f"layers.{index}."
        return self._delta(prefix) if self.spec.delta and index in self.spec.delta.layers else self._attention(prefix)

    def mtp(self, head: DenseLinear) -> MtpHead:
        ids = self.weights.dense("mtp.draft_ids", torch.int64) if self.weights.has("mtp.draft_ids") else None
        return MtpHead(
            embed_norm=self.vector("mtp.embed_norm"),
            hidden_norm=self.vector("mtp.hidden_norm"),
            fc=self._product("mtp.", "fc"),
            layer=self._attention("mtp.layer."),
            norm=self.vector("mtp.norm"),
            logits=head if ids is None else DenseLinear(head.weight[ids], exact=self.exact),
            draft_ids=ids,
        )

    def vector(self, name: str) -> Tensor:
        """Whatever is no product: float32."""
        return self.weights.dense(name, torch.float32)

    def _attention(self, prefix: str) -> AttentionLayer:
        has = self.weights.has
        return AttentionLayer(
            norm=self.vector(prefix + "attn_norm"),
            q=self._product(prefix, *(("q", "q_gate") if self.spec.attn_gate else ("q",))),
            kv=self._product(prefix, "k", "v"),
            q_norm=self.vector(prefix + "q_norm") if has(prefix + "q_norm") else None,
            k_norm=self.vector(prefix + "k_norm") if has(prefix + "k_norm") else None,
            o=self._product(prefix, "o")[0],
            mlp=self._mlp(prefix),
        )

    def _delta(self, prefix: str) -> DeltaLayer:
        return DeltaLayer(
            norm=self.vector(prefix + "attn_norm"),
            qkvz=self._product(prefix, "in_qkv", "in_z"),
            ab=self._product(prefix, "in_a", "in_b"),
            conv=self.vector(prefix + "conv"),
            dt_bias=self.vector(prefix + "dt_bias"),
            decay=self.vector(prefix + "decay"),
            state_norm=self.vector(prefix + "state_norm"),
            out=self._product(prefix, "out")[0],
            mlp=self._mlp(prefix),
        )

    def _mlp(self, prefix: str) -> Mlp:
        return Mlp(
            norm=self.vector(prefix + "mlp_norm"),
            gate_up=self._product(prefix, "gate", "up"),
            down=self._product(prefix, "down")[0],
        )

    def _product(self, prefix: str, *names: str) -> Fused:
        """One fused product: in 4 bits if all its parts are, else dense. A part without a bias of its own has zeros."""
        weights, dtype, parts = self.weights, self.dtype, [prefix + name for name in names]
        sizes = [weights.shape(part)[0] for part in parts]
        bias = None
        if any(weights.has(f"{part}_bias") for part in parts):
            biases = ((f"{part}_bias", size) for part, size in zip(parts, sizes))
            bias = torch.cat([weights.dense(b, dtype) if weights.has(b) else torch.zeros(n, dtype=dtype) for b, n in biases])
        if self.name == "int4" and all(weights.is_four_bit(part) for part in parts) and sum(sizes) % 16 == 0:
            quantised = [rows for part in parts for _, rows in weights.quants(part)]
            return (reference.int4_linear(*_joined(quantised), bias),)
        return (DenseLinear(torch.cat([weights.dense(part, dtype) for part in parts]), bias, self.exact),)


def _joined(parts: list[Quantised]) -> tuple[Tensor, Tensor, Tensor]:
    def join(name: str) -> Tensor:
        return torch.cat([torch.from_numpy(getattr(part, name)) for part in parts])

    return join("quants"), join("scale"), join("minimum")


def _give_memory_back() -> None:
    """Loading leaves freed heap behind; glibc returns it to the system only when asked."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
