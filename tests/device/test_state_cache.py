"""The layout of state slots, and slots as bytes."""

import pytest
import torch

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.state_cache import StateCache, conv_entries, log_entries, state_bytes
from tests.device.test_kv_cache import HYBRID, SPEC
from wire.model_spec import DeltaSpec

DELTA = DeltaSpec((0, 2), 2, 6, 8, 24, 4)
PARTS = {
    "state": (2, 6, 8, 24),
    "log_k": (2, 19, 2, 8),
    "log_d": (2, 19, 6, 24),
    "log_g": (2, 19, 6),
    "conv": (2, 7, 176),
    "folded": (1,),
}


def test_parts_of_a_slot():
    states = StateCache(DELTA, 4, 3)
    assert (log_entries(3), conv_entries(DELTA, 3)) == (19, 7)
    for name, shape in PARTS.items():
        assert getattr(states, name).shape == (4, *shape), name
        assert states.offsets[name] % 16 == 0, "a part begins on a cache line"
    assert states.folded.dtype == torch.int32
    values = sum(getattr(states, name)[0].numel() for name in PARTS)
    assert 4 * values <= states.slot_bytes <= 4 * (values + 16 * len(PARTS))
    assert states.bytes == 4 * states.slot_bytes


def test_every_part_has_values_of_its_own():
    states = StateCache(DELTA, 2, 0)
    for number, name in enumerate(PARTS, 1):
        getattr(states, name).fill_(number)
    for number, name in enumerate(PARTS, 1):
        assert (getattr(states, name) == number).all(), name


def test_a_slot_is_one_range_of_bytes():
    states = StateCache(DELTA, 3, 2)
    for name in PARTS:
        getattr(states, name)[1] = 3
    assert not states.slot(0).any() and not states.slot(2).any()
    states.slot(2)[:] = states.slot(1)
    for name in PARTS:
        assert torch.equal(getattr(states, name)[2], getattr(states, name)[1]), name
    for wrong in (-1, 3):
        with pytest.raises(IndexError):
            states.slot(wrong)


def test_the_pool_has_states_where_the_model_has():
    kv = KvCache(HYBRID, 2, 16, torch.float32, state_slots=3, draft_max=2)
    assert kv.state_bytes == state_bytes(HYBRID, 2) == len(kv.state(2)) and kv.states.slots == 3
    kv.state(1)[:] = 1
    assert kv.states.slot(1).all() and not kv.states.slot(0).any()
    plain = KvCache(SPEC, 2, 16, torch.float32)
    assert (plain.states, plain.state_bytes, state_bytes(SPEC, 2)) == (None, 0, 0)
    with pytest.raises(IndexError):
        plain.state(0)
