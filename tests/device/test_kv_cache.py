"""The pool's layout, and blocks as bytes."""

import pytest
import torch
from msgspec import structs

from gpu_worker.device.kv_cache import KvCache, block_bytes
from wire.model_spec import DeltaSpec, ModelSpec, MtpSpec, RopeSpec

SPEC = ModelSpec("llama", 3, 64, 4, 2, 16, 96, 300, 1e-5, RopeSpec(), True, False, False, False, False, 512)
HYBRID = structs.replace(SPEC, delta=DeltaSpec((0, 2), 2, 4, 16, 16, 4), mtp=MtpSpec(96), hidden=200)


def test_a_block_is_one_range_of_bytes_that_holds_all_layers():
    kv = KvCache(SPEC, 5, 16, torch.bfloat16)
    assert kv.block_bytes == 3 * 2 * 2 * 16 * 16 * 2
    assert kv.bytes == 5 * kv.block_bytes
    assert kv.tensor.shape == (6, 3, 2, 2, 16, 16)
    kv.tensor[2] = 7
    assert bytes(kv.block(2)) == bytes(kv.tensor[2].contiguous().view(torch.uint8).numpy().tobytes())
    assert not kv.block(1).any() and not kv.block(3).any()


def test_writing_the_bytes_of_a_block_writes_its_cells():
    kv = KvCache(SPEC, 2, 16, torch.float32)
    kv.tensor[0].normal_()
    kv.block(1)[:] = kv.block(0)
    assert torch.equal(kv.tensor[0], kv.tensor[1])


def test_the_scratch_block_is_no_block_of_the_pool():
    kv = KvCache(SPEC, 2, 16, torch.float32)
    assert kv.scratch == 2
    with pytest.raises(IndexError):
        kv.block(kv.scratch)
    with pytest.raises(IndexError):
        kv.block(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_attention_and_the_head_have_cells(dtype):
    kv = KvCache(HYBRID, 3, 16, dtype)
    assert kv.layers == 2 and kv.tensor.shape == (4, 2, 2, 2, 16, 16)
    rows = 2 * 2 * 2 + -(-4 * 200 // (16 * 16 * dtype.itemsize))
    assert kv.rows_per_block == rows and kv.block_bytes == block_bytes(HYBRID, 16, dtype) == rows * 16 * 16 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hidden_row_lies_in_the_block_and_not_in_its_cells(dtype):
    kv = KvCache(HYBRID, 3, 16, dtype)
    assert kv.hidden.shape == (4, 200) and kv.hidden.dtype == torch.float32
    kv.tensor.normal_()
    before = kv.tensor.clone()
    kv.hidden[:] = torch.arange(4)[:, None]
    assert torch.equal(kv.tensor, before)
    kv.block(0)[:] = kv.block(2)
    assert (kv.hidden[0] == 2).all() and torch.equal(kv.tensor[0], kv.tensor[2])
    assert KvCache(SPEC, 3, 16, dtype).hidden is None


def test_one_index_finds_the_rows_of_a_head_behind_hidden_rows():
    kv = KvCache(HYBRID, 3, 16, torch.float32)
    kv.tensor.normal_()
    for block, layer, part, head in ((0, 0, 0, 0), (2, 1, 1, 1), (3, 1, 0, 1)):
        row = kv.rows[kv.row(torch.tensor(block), layer, part, head)]
        assert torch.equal(row.view(16, 16), kv.tensor[block, layer, part, head])
