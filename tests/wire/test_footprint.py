"""What a model is said to take is what the worker takes: the same functions of its shape, with and without torch."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from gpu_worker import __main__ as worker
from gpu_worker.device import kv_cache, state_cache
from gpu_worker.image import Layout
from gpu_worker.on_card import weight_bytes
from wire import footprint
from wire.model_files import SHIPPED, find_model
from wire.model_spec import DeltaSpec, ModelSpec

BARD = find_model("bard").spec
SMOLLM2 = find_model("smollm2").spec
ODD = DeltaSpec(layers=(0, 1, 2), key_heads=3, value_heads=9, key_dim=20, value_dim=12, kernel=5)
SPECS = {
    "bard": BARD,
    "smollm2": SMOLLM2,
    "no head": structs.replace(SMOLLM2, mtp=None),
    "odd": structs.replace(BARD, delta=ODD, num_layers=5, head_dim=24, hidden=200, num_kv_heads=1),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("drafts", [0, 1, 2, 7])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_blocks_states_and_images_are_the_workers(spec: ModelSpec, drafts: int, dtype: torch.dtype, size: int) -> None:
    found = footprint.footprint(spec, size, drafts)
    kept = spec if drafts else structs.replace(spec, mtp=None)
    assert found.block_bytes == kv_cache.block_bytes(kept, footprint.BLOCK_SIZE, dtype)
    assert found.state_bytes == state_cache.state_bytes(kept, drafts)
    store = SimpleNamespace(block_bytes=found.block_bytes, state_bytes=found.state_bytes)
    layout = Layout(store, "worker")
    assert found.unit_bytes == layout.unit_bytes
    assert found.image_bytes(33) == (3 + layout.state_units) * layout.unit_bytes
    assert found.image_bytes(32) == (2 + layout.state_units) * layout.unit_bytes


def test_the_constants_are_the_workers() -> None:
    ours = (footprint.BLOCK_SIZE, footprint.PARKING_SLOTS, footprint.FOLD)
    assert ours == (worker.BLOCK_SIZE, worker.PARKING_SLOTS, state_cache.FOLD)


def test_a_pool_is_whole_blocks() -> None:
    found = footprint.footprint(SMOLLM2, 2, 0)
    cells = footprint.BLOCK_SIZE * 3 + 5
    assert found.pool_bytes(cells) == 3 * found.block_bytes
    assert found.cell_bytes == 30 * 2 * 3 * 64 * 2  # layers, keys and values, heads, their width, bytes


def test_weights_of_a_card() -> None:
    assert footprint.matrix_bytes(SMOLLM2, 2) == weight_bytes(SMOLLM2)


def test_bytes_of_files() -> None:
    head = SHIPPED / "smollm2-mtp" / "mtp.safetensors"
    found = footprint.file_bytes(find_model("smollm2"))
    model = Path(find_model("smollm2").path).stat().st_size
    assert 0.95 * (model + head.stat().st_size) < found < model + head.stat().st_size
