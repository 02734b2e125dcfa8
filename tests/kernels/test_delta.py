"""The gated delta rule's kernels against `model/delta.py`, and bit for bit against themselves: in any split, company and slot."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from gpu_worker.device.reference import DenseLinear
from gpu_worker.device.state_cache import StateCache, conv_entries, log_entries
from gpu_worker.model.batch import Batch
from gpu_worker.model.delta import DeltaStep
from gpu_worker.model.layers import DeltaLayer, Mlp
from tests.kernels.harness import poisoned, relative, run
from wire.model_spec import DeltaSpec

F = torch.nn.functional
EPS = 1e-6
LAYERS = (0, 1)
SPECS = [
    DeltaSpec(LAYERS, 2, 4, 32, 32, 4),
    DeltaSpec(LAYERS, 1, 3, 64, 64, 2),
    DeltaSpec(LAYERS, 2, 2, 128, 32, 4),
    DeltaSpec(LAYERS, 1, 33, 32, 32, 3),  # more value heads than a warp has lanes
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """The twin's operations are far too small to share out among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Span:
    """Rows of one sequence in a step; the last `drafts` are drafts."""

    slot: int
    start: int
    mixed: Tensor  # bf16 [rows, width]
    drafts: int = 0


@dataclass
class Layers:
    """Recurrent layers and a cache of their states, in which nothing is valid at first."""

    spec: DeltaSpec
    weights: list[DeltaLayer]
    draft_max: int = 3
    slots: int = 3
    states: StateCache = field(init=False)

    def __post_init__(self) -> None:
        self.states = StateCache(self.spec, self.slots, self.draft_max)
        self.states.flat.fill_(torch.nan)


class Card(Layers):
    """A step's kernels on the cache, in the order of a card's step."""

    def step(self, spans: list[Span], padding: int = 0) -> list[tuple[Tensor, Tensor]]:
        """For each layer (y bf16, out float32 before norm and gate), [rows, value_width]. `padding` rows and sequences are
        skipped by every kernel, and what they would write stays as it is."""
        s, states = self.spec, self.states
        rows, sequences = sum(len(span.mixed) for span in spans), len(spans)
        ints = {name: [] for name in ("positions", "seq_of", "row_begin", "row_count", "known", "slots")}
        for i, span in enumerate(spans):
            count = len(span.mixed)
            ints["row_begin"].append(len(ints["positions"]))
            ints["row_count"].append(count)
            ints["known"].append(span.start + count - span.drafts)
            ints["slots"].append(span.slot)
            ints["positions"] += range(span.start, span.start + count)
            ints["seq_of"] += [i] * count
        ints["positions"] += [-1] * padding
        ints["seq_of"] += [1 << 20] * padding
        ints["row_count"] += [0] * padding
        for name in ("row_begin", "known", "slots"):
            ints[name] += [1 << 20] * padding
        at = {name: torch.tensor(values, dtype=torch.int32) for name, values in ints.items()}
        width, used = s.conv_width + s.value_width + 2 * s.value_heads, spans[0].mixed.shape[1]
        mixed = poisoned(rows + padding, -(-used // 8) * 8 + 8, dtype=torch.bfloat16)
        mixed[rows:] = 1
        mixed[:rows, :used] = torch.cat([span.mixed for span in spans])
        a_at = width - 2 * s.value_heads
        folded_at, status = states.offsets["folded"], torch.zeros(1, dtype=torch.int32)
        names = ("row_begin", "row_count", "positions", "known", "slots")
        ends = [states.flat, states.stride, folded_at, *(at[name] for name in names), status]
        run("delta", "delta_check", (sequences + padding,), 1, ends)
        assert not status.item()
        found = []
        for index, layer in enumerate(self.weights):
            found.append(self._layer(index, layer, mixed, a_at, at, rows, padding))
        run("delta", "delta_finish", (sequences + padding,), 1, ends)
        assert not status.item()
        return [(y[:rows], out[:rows]) for y, out in found]

    def _layer(self, index: int, layer: DeltaLayer, mixed: Tensor, a_at: int, at: dict[str, Tensor], real: int, padding: int):
        s, states = self.spec, self.states
        rows, sequences = real + padding, len(at["row_count"])
        q, k = poisoned(rows, s.key_width), poisoned(rows, s.key_width)
        v, out, y = (poisoned(rows, s.value_width, dtype=t) for t in (torch.float32, torch.float32, torch.bfloat16))
        g, beta = poisoned(rows, s.value_heads), poisoned(rows, s.value_heads)
        for written in (q, k, v, g, beta, out, y):
            written[real:] = 7
        kept_conv, kept_log = conv_entries(s, self.draft_max), log_entries(self.draft_max)
        sizes = {
            "state": s.value_heads * s.key_dim * s.value_dim,
            "log_k": kept_log * s.key_width,
            "log_d": kept_log * s.value_width,
            "log_g": kept_log * s.value_heads,
            "conv": kept_conv * s.conv_width,
        }
        place = {name: states.offsets[name] + index * size for name, size in sizes.items()}
        heads, stride = [s.key_heads, s.value_heads], mixed.shape[1]
        units = 2 * s.key_heads + -(-s.value_width // s.key_dim) + -(-s.value_heads // 32)
        flat = [states.flat, states.stride]
        conv = layer.conv.T.contiguous()
        given = [*flat, place["conv"], kept_conv, mixed, stride, a_at, a_at + s.value_heads, conv, layer.dt_bias, layer.decay]
        given += [at["positions"], at["seq_of"], at["row_begin"], at["slots"], *heads, s.value_dim, s.kernel]
        run("delta", f"delta_inputs_k{s.key_dim}", (rows, -(-units // 8)), 256, [q, k, v, g, beta, *given])
        logs = [place["log_k"], place["log_d"], place["log_g"]]
        given = [*flat, place["state"], *logs, states.offsets["folded"], kept_log, at["row_begin"], at["row_count"]]
        given += [at["positions"], at["known"], at["slots"], *heads, s.value_dim]
        grid = (s.value_dim // 32, s.value_heads, sequences)
        run("delta_rule", f"delta_rule_k{s.key_dim}", grid, 128, [out, q, k, v, g, beta, *given])
        given = [*flat, place["conv"], place["log_k"], place["log_g"], kept_conv, kept_log, mixed, stride, k, g]
        given += [at["row_begin"], at["row_count"], at["positions"], at["slots"], *heads, s.key_dim, s.conv_width]
        run("delta", "delta_log", (sequences, 2), 256, given)
        given = [y, out, mixed, stride, s.conv_width, layer.state_norm, at["positions"], s.value_heads, s.value_dim, EPS]
        run("delta", "delta_gate", (rows, -(-s.value_heads // 8)), 256, given)
        for written in (q, k, v, g, beta, out, y):
            assert (written[real:] == 7).all(), "a row of padding was written"
        return y, out


class Twin(Layers):
    """The same step in torch."""

    def step(self, spans: list[Span]) -> list[Tensor]:
        """float32 [rows, value_width] of each layer."""
        s = self.spec
        rows = [([0] * len(span.mixed), span.start, [0]) for span in spans]
        batch = Batch.of(rows, drafts=[span.drafts for span in spans], state_slots=[span.slot for span in spans])
        step = DeltaStep.of(batch, self.states, s, EPS)
        mixed = torch.cat([span.mixed for span in spans]).float()
        qkvz, ab = mixed.split([s.conv_width + s.value_width, 2 * s.value_heads], -1)
        found = [step.run(layer, index, qkvz, ab) for index, layer in enumerate(self.weights)]
        step.finish()
        return found


def weights(spec: DeltaSpec, seed: int = 1) -> list[DeltaLayer]:
    generator, nothing = torch.Generator().manual_seed(seed), DenseLinear(torch.empty(0))
    return [
        DeltaLayer(
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
        for _ in spec.layers
    ]


def inputs(spec: DeltaSpec, rows: int, seed: int = 2) -> Tensor:
    width = spec.conv_width + spec.value_width + 2 * spec.value_heads
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(
    spec: DeltaSpec, mixed: Tensor, card: list[tuple[Tensor, Tensor]], twin: list[Tensor], weights: list[DeltaLayer]
) -> None:
    z = mixed[:, spec.conv_width : spec.conv_width + spec.value_width].float()
    for (y, out), expected, layer in zip(card, twin, weights):
        heads = out.view(-1, spec.value_heads, spec.value_dim)
        gated = F.rms_norm(heads, (spec.value_dim,), layer.state_norm, EPS).flatten(1) * F.silu(z)
        assert relative(gated, expected) < 1e-5
        assert relative(y, gated) < 4e-3  # the rounding to bf16


def held(spec: DeltaSpec, states: StateCache, slot: int, computed: int) -> dict[str, Tensor]:
    """What a slot holds that may be read later, of a sequence with `computed` tokens."""
    folded, log, ring = int(states.folded[slot]), states.log_k.shape[2], states.conv.shape[2]
    at = torch.arange(folded, computed) % log
    reach = torch.arange(max(computed - spec.kernel + 1, 0), computed) % ring
    parts = {name: getattr(states, name)[slot][:, at] for name in ("log_k", "log_d", "log_g")}
    return {"state": states.state[slot], "conv": states.conv[slot][:, reach], "folded": states.folded[slot]} | parts


def plays(rng: random.Random, mixed: Tensor, other: Tensor, slot: int, draft_max: int):
    """Steps of one sequence through all rows of `mixed`: (span, rows of it that stay). Rejected drafts are rows of `other`."""
    start, length = 0, len(mixed)
    while start < length:
        count = min(rng.choice([1, 1, 1, 2, 5, 15, 16, 17, 40]), length - start)
        drafts = rng.randint(0, draft_max) if rng.random() < 0.7 else 0
        accepted = min(rng.randint(0, drafts), length - start - count)
        kept = count + accepted
        rejected = other[start + kept : start + count + drafts]
        drafts = accepted + len(rejected)
        yield Span(slot, start, torch.cat([mixed[start : start + kept], rejected]), drafts), kept
        start += kept


@pytest.mark.usefixtures("schedule")
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_rows_states_and_logs_are_the_twins(spec):
    """Two sequences side by side, drafts accepted and rejected, until both have come through more than two folds."""
    layers, rng = weights(spec), random.Random(3)
    card, twin = Card(spec, layers), Twin(spec, layers)
    games = [plays(rng, inputs(spec, 57, 10 + i), inputs(spec, 70, 20 + i), slot, 3) for i, slot in enumerate((2, 0))]
    computed = {2: 0, 0: 0}
    while moves := [move for game in games if (move := next(game, None))]:
        spans = [span for span, _ in moves]
        found, expected = card.step(spans, padding=2), twin.step(spans)
        close(spec, torch.cat([span.mixed for span in spans]), found, expected, layers)
        computed |= {span.slot: span.start + kept for span, kept in moves}
    assert card.states.flat.view(3, -1)[1].isnan().all(), "a slot of nobody was written"
    for slot, count in computed.items():
        ours, theirs = held(spec, card.states, slot, count), held(spec, twin.states, slot, count)
        assert torch.equal(ours["folded"], theirs["folded"]) and ours["folded"] >= 32
        assert torch.equal(ours["conv"], theirs["conv"])
        for name in ("state", "log_k", "log_d", "log_g"):
            assert relative(ours[name], theirs[name]) < 1e-5, name


@pytest.mark.usefixtures("schedule")
@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_split_company_and_slot_change_no_bit(spec):
    layers, mixed = weights(spec), inputs(spec, 52)
    alone = Card(spec, layers)
    whole = alone.step([Span(1, 0, mixed)])
    expected = held(spec, alone.states, 1, 52)
    for seed in range(3):
        rng, card = random.Random(seed), Card(spec, layers)
        company = plays(rng, inputs(spec, 500, 5), inputs(spec, 600, 6), 1, 3)
        steps = [*plays(rng, mixed[:51], inputs(spec, 70, 7), 0, 3), (Span(0, 51, mixed[51:]), 1)]
        for span, kept in steps:
            spans, first = [span], 0
            if rng.random() < 0.5:
                other, _ = next(company)
                spans, first = [other, span], len(other.mixed)
            for (y, out), (whole_y, whole_out) in zip(card.step(spans, padding=seed), whole):
                mine, same = slice(first, first + kept), slice(span.start, span.start + kept)
                assert torch.equal(out[mine], whole_out[same]) and torch.equal(y[mine], whole_y[same]), (seed, span.start)
        ours = held(spec, card.states, 0, 52)
        for name, part in expected.items():
            assert torch.equal(ours[name], part), name


@pytest.mark.parametrize("accepted", range(4))
@pytest.mark.parametrize("first", [14, 31, 40])
def test_rejected_drafts_leave_no_trace(first, accepted):
    """Three drafts behind a prompt longer than the rings, some across a multiple of 16; a fold that is due is done at the next
    step."""
    spec = SPECS[0]
    layers, mixed, other = weights(spec), inputs(spec, 52), inputs(spec, 52, 3)
    whole = Card(spec, layers).step([Span(1, 0, mixed)])
    card, kept = Card(spec, layers), first + accepted
    card.step([Span(1, 0, torch.cat([mixed[:kept], other[kept : first + 3]]), drafts=3)])
    assert card.states.folded[1] == first // 16 * 16
    for start, end in ((kept, kept + 1), (kept + 1, 52)):
        for (_, out), (_, whole_out) in zip(card.step([Span(1, start, mixed[start:end])]), whole):
            assert torch.equal(out, whole_out[start:end])
    assert card.states.folded[1] == 48


def test_strong_decay_forgets_and_stays_finite():
    spec = SPECS[0]
    layers, mixed = weights(spec), inputs(spec, 40)
    mixed[20, -2 * spec.value_heads :] = 400.0  # exp(g) is zero in float32
    spans = [Span(0, 0, mixed)]
    close(spec, mixed, Card(spec, layers).step(spans), Twin(spec, layers).step(spans), layers)


@pytest.mark.parametrize(
    ("start", "folded", "wrong"), [(0, 48, 0), (5, 0, 0), (16, 0, 0), (31, 16, 0), (32, 0, 1), (5, 16, 1), (40, 31, 1)]
)
def test_a_state_that_rows_cannot_go_on_from_is_told(start, folded, wrong):
    states = StateCache(SPECS[0], 2, 3)
    states.folded[1] = folded
    given = (0, 1, start, 3, 1, 0)  # one row; `known` lies before it, and takes nothing back
    begin, count, positions, known, slots, status = (torch.tensor([value], dtype=torch.int32) for value in given)
    ends = [states.flat, states.stride, states.offsets["folded"], begin, count, positions, known, slots, status]
    run("delta", "delta_check", (1,), 1, ends)
    assert status.item() == wrong
    run("delta", "delta_finish", (1,), 1, ends)
    assert status.item() == wrong
    assert states.folded[1] == (folded if wrong else start // 16 * 16)
    count[0], status[0], states.folded[1] = 0, 0, 7
    run("delta", "delta_check", (1,), 1, ends)
    run("delta", "delta_finish", (1,), 1, ends)
    assert status.item() == 0 and states.folded[1] == 7, "a sequence of padding was touched"
