"""The gated delta rule over a step's rows, in torch, with the state as a log (`device/state_cache.py` has the rule).

Rows are worked off in tiles of 16 positions that begin at multiples of 16, and every operation of a tile has one shape, however
many of its rows a step feeds: so a row's numbers depend on its position and its sequence only.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.device.state_cache import FOLD, StateCache
from gpu_worker.model.batch import Batch
from gpu_worker.model.layers import DeltaLayer
from wire.model_spec import DeltaSpec

F = torch.nn.functional


@dataclass(frozen=True, slots=True)
class _Span:
    """The rows of one sequence in this step."""

    slot: int
    row: int  # of the step's rows, where the span begins
    start: int  # position of the first row
    last: int
    known: int
    folded: int  # tokens in the slot's state as the step begins

    def tiles(self) -> Iterator[tuple[int, int]]:
        """(position of the first row, number of rows) of each tile."""
        at = self.start
        while at <= self.last:
            end = min(at // FOLD * FOLD + FOLD, self.last + 1)
            yield at, end - at
            at = end


@dataclass(frozen=True, slots=True)
class _Entries:
    """The log of a tile's 16 positions; zero where nothing is yet."""

    k: Tensor  # [16, key_heads, key_dim], normalised
    d: Tensor  # [16, value_heads, value_dim]
    g: Tensor  # [16, value_heads]


@dataclass(frozen=True, slots=True)
class DeltaStep:
    """What a step does with the states, the same in every layer. `finish` when all layers are through."""

    spec: DeltaSpec
    eps: float
    states: StateCache
    spans: list[_Span]

    @staticmethod
    def of(batch: Batch, states: StateCache, spec: DeltaSpec, eps: float) -> "DeltaStep":
        """ValueError where a slot's state is not one that its rows can go on from."""
        rows, seq_of = len(batch.seq_of), batch.seq_of
        firsts = [0, *((seq_of[1:] != seq_of[:-1]).nonzero()[:, 0] + 1).tolist(), rows]
        spans = []
        for first, end in zip(firsts, firsts[1:]):
            sequence = int(seq_of[first])
            slot, start = int(batch.state_slots[sequence]), int(batch.positions[first])
            folded = int(states.folded[slot]) if start else 0
            if not 0 <= start // FOLD * FOLD - folded <= FOLD:
                raise ValueError(f"state slot {slot} holds {folded} tokens, its rows begin at {start}")
            spans.append(_Span(slot, first, start, int(batch.positions[end - 1]), int(batch.known[sequence]), folded))
        return DeltaStep(spec, eps, states, spans)

    def finish(self) -> None:
        for span in self.spans:
            folded = min(span.known, span.last) // FOLD * FOLD
            self.states.folded[span.slot] = max(folded, span.start // FOLD * FOLD)

    def run(self, layer: DeltaLayer, index: int, qkvz: Tensor, ab: Tensor) -> Tensor:
        """Rows before the out projection, float32 [T, value_width], of a layer that is the `index`th with a state.

        qkvz float32 [T, conv_width + value_width], ab float32 [T, 2 * value_heads].
        """
        out = torch.zeros(len(qkvz), self.spec.value_width)
        for span in self.spans:
            state, entries = self._opening(span, index), None
            for position, rows in span.tiles():
                if entries is not None:
                    state = fold(state, entries)
                    if position <= span.known:
                        self.states.state[span.slot, index] = state
                first = span.row + position - span.start
                at = slice(first, first + rows)
                out[at], entries = self._tile(layer, index, span.slot, position, state, qkvz[at], ab[at])
        return out

    def _opening(self, span: _Span, index: int) -> Tensor:
        """The state before the first row's tile, [value_heads, key_dim, value_dim]; a fold that is due is done."""
        kept = self.states.state[span.slot, index]
        if not span.start:
            kept.zero_()
        elif span.folded < span.start // FOLD * FOLD:
            kept.copy_(fold(kept.clone(), self._logged(span.slot, index, span.folded, FOLD)))
        return kept.clone()

    def _logged(self, slot: int, index: int, position: int, count: int) -> _Entries:
        """`count` entries of the log from `position` on, filled up with zeros."""
        s, states = self.spec, self.states
        at = torch.arange(position, position + count) % states.log_k.shape[2]
        k = torch.zeros(FOLD, s.key_heads, s.key_dim)
        d = torch.zeros(FOLD, s.value_heads, s.value_dim)
        g = torch.zeros(FOLD, s.value_heads)
        k[:count], d[:count], g[:count] = (log[slot, index, at] for log in (states.log_k, states.log_d, states.log_g))
        return _Entries(k, d, g)

    def _tile(
        self, layer: DeltaLayer, index: int, slot: int, position: int, state: Tensor, qkvz: Tensor, ab: Tensor
    ) -> tuple[Tensor, _Entries]:
        """(rows before the out projection [rows, value_width], the tile's log) of rows from `position` on."""
        s, states = self.spec, self.states
        before = position % FOLD
        mine = slice(before, before + len(qkvz))
        qkv, z = qkvz.split([s.conv_width, s.value_width], -1)
        q, k, v = self._convolved(layer, index, slot, position, qkv)
        entries = self._logged(slot, index, position - before, before)
        a, b = _padded(ab, before, FOLD).chunk(2, -1)
        g = layer.decay * F.softplus(a + layer.dt_bias)
        beta = b.sigmoid()
        entries.k[mine], entries.g[mine] = k[mine], g[mine]
        group = s.value_heads // s.key_heads
        keys = entries.k.transpose(0, 1).contiguous()  # [key_heads, 16, key_dim]
        queries = q.transpose(0, 1).contiguous()
        total = entries.g.cumsum(0).transpose(0, 1).contiguous()  # [value_heads, 16]
        lower = torch.ones(FOLD, FOLD, dtype=torch.bool).tril()
        decay = torch.where(lower, total[:, :, None] - total[:, None, :], -torch.inf).exp()
        read = decay * _spread(keys @ keys.transpose(1, 2), group)
        since = total.exp()[..., None]
        told = since * (_spread(keys, group) @ state)  # what the state says of each key
        d = entries.d.transpose(0, 1).contiguous()  # [value_heads, 16, value_dim]
        for i in range(mine.start, mine.stop):
            known = told[:, i] + (read[:, i, :, None] * d).sum(1)
            d[:, i] = beta[i][:, None] * (v[i] - known)
        entries.d.copy_(d.transpose(0, 1))
        out = since * (_spread(queries, group) @ state) + (decay * _spread(queries @ keys.transpose(1, 2), group)) @ d
        gate = F.silu(_padded(z, before, FOLD).view(FOLD, s.value_heads, s.value_dim))
        y = F.rms_norm(out.transpose(0, 1).contiguous(), (s.value_dim,), layer.state_norm, self.eps) * gate
        at = torch.arange(position, position + len(qkv)) % states.log_k.shape[2]
        states.log_k[slot, index, at] = entries.k[mine]
        states.log_d[slot, index, at] = entries.d[mine]
        states.log_g[slot, index, at] = entries.g[mine]
        return y[mine].flatten(1), entries

    def _convolved(self, layer: DeltaLayer, index: int, slot: int, position: int, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [16, key_heads, key_dim], normalised, and v [16, value_heads, value_dim] of the tile; keeps the inputs."""
        s, ring = self.spec, self.states.conv[slot, index]
        reach, before = s.kernel - 1, position % FOLD
        inputs = _padded(qkv, reach + before, reach + FOLD)
        back = min(reach, position)  # what lies before the first token is zero
        inputs[reach + before - back : reach + before] = ring[torch.arange(position - back, position) % len(ring)]
        mixed = inputs[:FOLD] * layer.conv[:, 0]
        for tap in range(1, s.kernel):
            mixed = mixed + inputs[tap : tap + FOLD] * layer.conv[:, tap]
        kept = min(len(qkv), len(ring))
        end = position + len(qkv)
        ring[torch.arange(end - kept, end) % len(ring)] = qkv[-kept:]
        q, k, v = F.silu(mixed).split([s.key_width, s.key_width, s.value_width], -1)
        q, k = (_normed(x.reshape(FOLD, s.key_heads, s.key_dim)) for x in (q, k))
        return q * s.key_dim**-0.5, k, v.reshape(FOLD, s.value_heads, s.value_dim)


def fold(state: Tensor, entries: _Entries) -> Tensor:
    """The state 16 tokens on, [value_heads, key_dim, value_dim]."""
    total = entries.g.cumsum(0).transpose(0, 1).contiguous()
    left = (total[:, -1:] - total).exp()  # of what each token added
    keys = _spread(entries.k.permute(1, 2, 0).contiguous(), len(state) // entries.k.shape[1])
    added = (keys * left[:, None]) @ entries.d.transpose(0, 1).contiguous()
    return total[:, -1].exp()[:, None, None] * state + added


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _spread(of_key_heads: Tensor, group: int) -> Tensor:
    return of_key_heads.repeat_interleave(group, 0)


def _padded(rows: Tensor, before: int, length: int) -> Tensor:
    """`rows` at `before` of `length` rows that are otherwise zero."""
    out = torch.zeros(length, rows.shape[1])
    out[before : before + len(rows)] = rows
    return out
