"""The pool's layout, and blocks as bytes."""

import pytest
import torch

from gpu_worker.device.kv_cache import KvCache
from wire.model_spec import ModelSpec, RopeSpec

SPEC = ModelSpec("llama", 3, 64, 4, 2, 16, 96, 300, 1e-5, RopeSpec(), True, False, False, False, False, 512)


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
