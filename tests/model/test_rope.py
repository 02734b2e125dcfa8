"""Rotary angles of the kinds that need no other library to check, and the table that grows."""

import math

import pytest
import torch

from gpu_worker.model import rope as module
from gpu_worker.model.rope import RopeTable, frequencies
from wire.model_spec import RopeSpec


def test_default_linear_and_given_factors():
    plain, scale = frequencies(RopeSpec(theta=100.0), 4)
    assert plain.tolist() == pytest.approx([1.0, 0.1]) and scale == 1
    assert frequencies(RopeSpec(theta=100.0, kind="linear", factor=4.0), 4)[0].tolist() == pytest.approx([0.25, 0.025])
    assert frequencies(RopeSpec(theta=100.0, factors=(1.0, 2.0)), 4)[0].tolist() == pytest.approx([1.0, 0.05])


def test_llama3_keeps_short_and_stretches_long_wavelengths():
    spec = RopeSpec(theta=1e6, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)
    plain, changed = frequencies(RopeSpec(theta=1e6), 16)[0], frequencies(spec, 16)[0]
    assert changed[0] == plain[0] and changed[-1] == pytest.approx(plain[-1].item() / 8)
    assert ((changed <= plain) & (changed >= plain / 8)).all()


def test_yarn_scales_cosine_and_sine():
    spec = RopeSpec(kind="yarn", factor=4.0, original_context=64)
    assert frequencies(spec, 16)[1] == pytest.approx(0.1 * math.log(4) + 1)
    table = RopeTable(spec, 16, 10)
    assert table.cos[0].tolist() == pytest.approx([0.1 * math.log(4) + 1] * 8)


def test_the_table_is_the_same_however_it_grew(monkeypatch):
    monkeypatch.setattr(module, "PART", 8)
    slow, fast = RopeTable(RopeSpec(), 8, 30), RopeTable(RopeSpec(), 8, 30)
    for position in range(30):
        slow.reach(position)
    fast.reach(29)
    assert len(fast.cos) == 30 and torch.equal(slow.cos, fast.cos) and torch.equal(slow.sin, fast.sin)
    angles = torch.arange(30.0)[:, None] * frequencies(RopeSpec(), 8)[0]
    assert torch.allclose(fast.sin, angles.sin())
    for wrong in (-1, 30):
        with pytest.raises(IndexError):
            fast.reach(wrong)
