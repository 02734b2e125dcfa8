"""Which formats a model is loaded in, and what it costs in memory."""

import subprocess
import sys

import psutil
import pytest
import torch

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model import load
from gpu_worker.model.batch import Batch
from gpu_worker.model.exactness import prove
from gpu_worker.model.load import available_processors, load_model
from gpu_worker.model.weights import Weights
from tests.device.library import require_native
from tests.make_models import write_gguf, write_hf
from wire.model_files import find_model

BACKENDS = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])


@BACKENDS
@pytest.mark.parametrize(
    ("quant", "dtype", "name", "cells"),
    [
        ("Q4_0", "auto", "int4", torch.bfloat16),
        ("Q4_1", "auto", "int4", torch.bfloat16),
        ("Q4_1", "bf16", "bf16", torch.bfloat16),
        ("Q4_1", "f32", "f32", torch.float32),
        ("Q8_0", "auto", "bf16", torch.bfloat16),
        ("F32", "auto", "bf16", torch.bfloat16),
    ],
)
def test_formats(tmp_path, quant, dtype, name, cells, native):
    if native:
        require_native()
    files = find_model(str(write_gguf(tmp_path / "m.gguf", "llama", quant=quant)))
    model = load_model(files, dtype, native=native)
    assert (model.dtype_name, model.kv_dtype) == (name, cells)
    kv = KvCache(files.spec, 2, 16, model.kv_dtype)
    logits = model.logits(model.forward(Batch.of([([1, 2, 3], 0, [1])]), kv))
    assert logits.dtype == torch.float32 and logits.shape == (1, files.spec.vocab) and logits.isfinite().all()


class MixedWeights(Weights):
    """As in Q4_K_M files: v is finer than q and k."""

    def is_four_bit(self, name: str) -> bool:
        return super().is_four_bit(name) and not name.endswith((".v", "0.down"))


@BACKENDS
def test_products_of_mixed_types(tmp_path, monkeypatch, native):
    if native:
        require_native()
    monkeypatch.setattr(load, "Weights", MixedWeights)
    files = find_model(str(write_gguf(tmp_path / "m.gguf", "qwen2", quant="Q4_1")))
    model, truth = load_model(files, "auto", native=native), load_model(files, "f32", native=False)
    assert model.dtype_name == "int4" and len(model.distinct_layers()) == 2
    assert prove(model) == (True, "")
    batch = Batch.of([(list(range(3, 60)), 0, [0, 1, 2, 3])], last_only=False)
    a, b = (m.logits(m.forward(batch, KvCache(files.spec, 4, 16, m.kv_dtype))) for m in (model, truth))
    assert (a - b).norm() / b.norm() < 0.02


@BACKENDS
@pytest.mark.parametrize(("quant", "dtype", "name"), [("Q4_1", "auto", "int4"), ("Q8_0", "auto", "bf16"), ("F32", "f32", "f32")])
def test_formats_of_a_hybrid_with_a_head(tmp_path, quant, dtype, name, native):
    if native:
        require_native()
    shape = {"layers": 4, "key_dim": 32, "value_dim": 32, "mtp": True}
    files = find_model(str(write_gguf(tmp_path / "m.gguf", "qwen35", quant=quant, **shape)))
    model, truth = (load_model(files, each, threads=1, native=native) for each in (dtype, "f32"))
    assert model.dtype_name == name and len(model.distinct_layers()) == 2  # a recurrent one and one with attention
    assert prove(model) == (True, "")
    found = []
    for each in (model, truth):
        kv = KvCache(each.spec, 4, 16, each.kv_dtype)
        rows = each.logits(each.forward(Batch.of([(list(range(3, 60)), 0, [0, 1, 2, 3])], last_only=False), kv))
        one, table = torch.tensor([57], dtype=torch.int32), torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
        draft = each.draft_logits(each.draft(one.long(), one, kv.hidden[[3]], table, kv))
        found.append(torch.cat([rows, draft]))
    assert (found[0] - found[1]).norm() / found[1].norm() < (0.1 if name == "int4" else 0.03)


@BACKENDS
@pytest.mark.parametrize(("arch", "options"), [("llama", {}), ("qwen35", {"layers": 4, "mtp": True})])
def test_weight_bytes_are_what_is_held(tmp_path, arch, options, native):
    if native:
        require_native()
    files = find_model(str(write_hf(tmp_path / "m", arch, tied=True, **options)))
    held = load_model(files, "f32", native=native).weight_bytes
    values = sum(t.nbytes for t in files.tensors.values())
    assert values <= held <= 1.05 * values  # rows of products are filled up to a multiple of 16


def test_processors_that_this_process_may_use():
    assert 1 <= available_processors() <= (psutil.cpu_count() or 1)


SCRIPT = """
import sys, psutil
from wire.model_files import find_model
from gpu_worker.model.batch import Batch
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model.load import load_model
files = find_model("smollm2")
model = load_model(files, "auto", threads=1, native=sys.argv[1] == "native")  # no second thread that spins
kv = KvCache(files.spec, 128, 16, model.kv_dtype)
kv.tensor.fill_(0.25)
tokens = list(range(100, 356))
for at in (0, 256, 512):
    model.logits(model.forward(Batch.of([(tokens, at, list(range(50)))], last_only=True), kv))
memory = psutil.Process().memory_info()
print(memory.rss - memory.shared - model.weight_bytes - kv.bytes)
"""


@BACKENDS
def test_memory_beside_weights_and_pool(native):
    """At most 500 MiB, which the whole worker has to keep."""
    if native:
        require_native()
    argument = "native" if native else "torch"
    done = subprocess.run([sys.executable, "-c", SCRIPT, argument], capture_output=True, text=True, timeout=100, check=True)
    beside = int(done.stdout) / 2**20
    print(f"{argument}: {beside:.0f} MiB beside weights and pool")
    assert beside < 400
