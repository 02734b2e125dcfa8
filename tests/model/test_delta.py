"""The gated delta rule in tiles against the recurrence, token by token in float64, as its paper states it."""

import pytest
import torch
from torch import Tensor

from gpu_worker.device.reference import DenseLinear
from gpu_worker.device.state_cache import StateCache
from gpu_worker.model.batch import Batch
from gpu_worker.model.delta import DeltaStep
from gpu_worker.model.layers import DeltaLayer, Mlp
from wire.model_spec import DeltaSpec

F = torch.nn.functional
EPS = 1e-6
SPECS = [DeltaSpec((0, 1), 2, 4, 16, 32, 4), DeltaSpec((0, 1), 3, 3, 32, 16, 2)]


def layer(spec: DeltaSpec) -> DeltaLayer:
    generator = torch.Generator().manual_seed(1)
    nothing = DenseLinear(torch.empty(0))
    return DeltaLayer(
        norm=torch.empty(0),
        qkvz=(nothing,),
        ab=(nothing,),
        conv=torch.randn(spec.conv_width, spec.kernel, generator=generator),
        dt_bias=torch.randn(spec.value_heads, generator=generator),
        decay=-torch.rand(spec.value_heads, generator=generator),
        state_norm=torch.rand(spec.value_dim, generator=generator) + 0.5,
        out=nothing,
        mlp=Mlp(torch.empty(0), (nothing,), nothing),
    )


def inputs(spec: DeltaSpec, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    width = spec.conv_width + spec.value_width
    return torch.randn(rows, width, generator=generator), torch.randn(rows, 2 * spec.value_heads, generator=generator)


def recurrence(spec: DeltaSpec, weights: DeltaLayer, qkvz: Tensor, ab: Tensor) -> tuple[Tensor, Tensor]:
    """(rows before the out projection, the state after each row)."""
    qkv, z = qkvz.double().split([spec.conv_width, spec.value_width], -1)
    padded = torch.cat([torch.zeros(spec.kernel - 1, spec.conv_width), qkv])
    mixed = F.silu(sum(padded[tap : tap + len(qkv)] * weights.conv[:, tap].double() for tap in range(spec.kernel)))
    q, k, v = mixed.split([spec.key_width, spec.key_width, spec.value_width], -1)
    a, b = ab.double().chunk(2, -1)
    decay = (weights.decay.double() * F.softplus(a + weights.dt_bias)).exp()
    state = torch.zeros(spec.value_heads, spec.key_dim, spec.value_dim, dtype=torch.float64)
    rows, states = [], []
    for i in range(len(qkv)):
        out = []
        for head in range(spec.value_heads):
            shared = head // (spec.value_heads // spec.key_heads)
            key, query = (x[i].view(spec.key_heads, -1)[shared] for x in (k, q))
            key, query = (x / (x @ x + 1e-6).sqrt() for x in (key, query))
            s = state[head] * decay[i, head]
            told = v[i].view(spec.value_heads, -1)[head] - s.T @ key
            state[head] = s + torch.outer(key, told * b[i, head].sigmoid())
            y = state[head].T @ (query * spec.key_dim**-0.5)
            y = y / (y.square().mean() + EPS).sqrt() * weights.state_norm
            out.append(y * F.silu(z[i].view(spec.value_heads, -1)[head]))
        rows.append(torch.cat(out))
        states.append(state.clone())
    return torch.stack(rows), torch.stack(states)


def steps(spec: DeltaSpec, weights: DeltaLayer, states: StateCache, given, sizes, slot: int = 1, layers=(0, 1)) -> Tensor:
    """Rows of the layer with number 1, in steps of `sizes`; all rows are known tokens."""
    found, start = [], 0
    for size in sizes:
        if not (size := min(size, len(given[0]) - start)):
            break
        batch = Batch.of([([0] * size, start, [0])], state_slots=[slot])
        step = DeltaStep.of(batch, states, spec, EPS)
        for index in layers:
            found.append(step.run(weights, index, *(part[start : start + size] for part in given)))
        step.finish()
        start += size
    return torch.cat(found[len(layers) - 1 :: len(layers)])


@pytest.mark.parametrize("spec", SPECS)
def test_tiles_are_the_recurrence(spec):
    weights, given = layer(spec), inputs(spec, 80)
    rows, after = recurrence(spec, weights, *given)
    states = StateCache(spec, 3, 4)
    states.flat.fill_(torch.nan)
    whole = steps(spec, weights, states, given, [80])
    assert (whole - rows).abs().max() < 1e-5
    assert states.folded[1] == 64  # of 80: the last 16 wait in the log
    assert (states.state[1, 1] - after[63]).abs().max() < 1e-5
    assert states.state[[0, 2]].isnan().all(), "a slot of nobody was written"


@pytest.mark.parametrize("sizes", [[1] * 80, [7] * 12, [16] * 5, [15, 1, 17, 31, 16], [33, 47]])
def test_the_split_into_steps_changes_nothing(sizes):
    spec = SPECS[0]
    weights, given = layer(spec), inputs(spec, 80)
    one, other = (StateCache(spec, 3, 4) for _ in range(2))
    other.flat.fill_(torch.nan)
    assert torch.equal(steps(spec, weights, one, given, [80]), steps(spec, weights, other, given, sizes))
    assert torch.equal(one.state[1], other.state[1]) and one.folded[1] == other.folded[1] == 64
    at = torch.arange(64, 80) % one.log_d.shape[2]
    assert torch.equal(one.log_d[1][:, at], other.log_d[1][:, at])


def test_strong_decay_forgets_and_stays_finite():
    spec = SPECS[0]
    weights, (qkvz, ab) = layer(spec), inputs(spec, 40)
    ab[20] = 400.0  # exp(g) is zero in float32
    rows, _ = recurrence(spec, weights, qkvz, ab)
    found = steps(spec, weights, StateCache(spec, 3, 4), (qkvz, ab), [9] * 5)
    assert found.isfinite().all() and (found - rows).abs().max() < 1e-4
