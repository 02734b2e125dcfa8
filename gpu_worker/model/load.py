"""Makes a model that can run from a model's files: weights in the wanted format, on the native library or in torch."""

import ctypes
import gc
import os
from pathlib import Path

import torch
from torch import Tensor

from gpu_worker.device import native as library
from gpu_worker.device import reference
from gpu_worker.device.reference import DenseLinear, Linear
from gpu_worker.model.decoder import Layer, TorchModel
from gpu_worker.model.native_model import NativeModel, fits
from gpu_worker.model.rope import RopeTable
from gpu_worker.model.weights import Quantised, Weights
from wire.model_files import ModelFiles

Model = NativeModel | TorchModel


def load_model(
    files: ModelFiles, dtype: str = "auto", exact: bool = True, threads: int | None = None, native: bool = True
) -> Model:
    """A model for the CPU. `dtype`: auto (4-bit weights stay in 4 bits, bf16 elsewhere), bf16 or f32.

    `exact`: a row's result depends on its own sequence only (the native library gives that for nothing, torch pads rows).
    `threads` None: as many as there are processors for this process. `native` False: in torch even if the library is there.
    """
    threads = threads or available_processors()
    weights = Weights(files)
    name = _dtype_name(weights, files.spec.num_layers, dtype)
    lib = library.load() if native and fits(files.spec) else None
    torch.set_num_threads(1 if lib else threads)  # two teams of threads would take the processors from each other
    model = (
        NativeModel(lib, weights, files.spec, name, dtype == "auto", threads)
        if lib
        else _torch_model(files, weights, name, exact)
    )
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
    products = [f"layers.{i}.{part}" for i in range(num_layers) for part in ("q", "k", "v", "o", "gate", "up", "down")]
    return "int4" if any(weights.is_four_bit(product) for product in products) else "bf16"


def _torch_model(files: ModelFiles, weights: Weights, name: str, exact: bool) -> TorchModel:
    spec = files.spec
    dtype = torch.float32 if name == "f32" else torch.bfloat16
    embed = weights.dense("embed", torch.float32 if spec.tied else dtype)
    head = DenseLinear(embed if spec.tied else weights.dense("head", torch.float32))
    layers = [_torch_layer(weights, f"layers.{i}.", name, dtype) for i in range(spec.num_layers)]
    rope = RopeTable(spec.rope, spec.head_dim, spec.max_context)
    return TorchModel(spec, name, embed, layers, weights.dense("norm", torch.float32), head, rope, exact)


def _torch_layer(weights: Weights, prefix: str, name: str, dtype: torch.dtype) -> Layer:
    def vector(part: str) -> Tensor | None:
        return weights.dense(prefix + part, torch.float32) if weights.has(prefix + part) else None

    def product(*parts: str) -> tuple[Linear, ...]:
        return _torch_product(weights, [prefix + part for part in parts], name, dtype)

    return Layer(
        attn_norm=weights.dense(prefix + "attn_norm", torch.float32),
        qkv=product("q", "k", "v"),
        q_norm=vector("q_norm"),
        k_norm=vector("k_norm"),
        o=product("o")[0],
        mlp_norm=weights.dense(prefix + "mlp_norm", torch.float32),
        gate_up=product("gate", "up"),
        down=product("down")[0],
    )


def _torch_product(weights: Weights, parts: list[str], name: str, dtype: torch.dtype) -> tuple[Linear, ...]:
    """One fused product: in 4 bits if all its parts are, else dense."""
    biases = [weights.dense(f"{part}_bias", dtype) if weights.has(f"{part}_bias") else None for part in parts]
    bias = torch.cat(biases) if biases[0] is not None else None  # type: ignore[arg-type]  # all or none
    if name == "int4" and all(weights.is_four_bit(part) for part in parts) and sum(weights.shape(p)[0] for p in parts) % 16 == 0:
        quantised = [rows for part in parts for _, rows in weights.quants(part)]
        return (reference.int4_linear(*_joined(quantised), bias),)
    return (DenseLinear(torch.cat([weights.dense(part, dtype) for part in parts]), bias),)


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
