"""Kernels against their floors, cells by block or by layer, and whether a row of a product keeps its bits in company."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gpu_worker.device.cuda import Card
from gpu_worker.device.ops import Ops
from gpu_worker.device.torch_on_card import TorchOnCard
from gpu_worker.model.card_program import EXACT_ROWS, SPLIT
from gpu_worker.model.card_program import splits as splits_of
from tools.gpu_check.figures import Figure, held, rate, seconds_of
from wire.model_spec import ModelSpec, tensor_shapes

REPEATS = 20


class Scene:
    """Arrays on the card for one kernel."""

    def __init__(self, card: Card, on_card: TorchOnCard) -> None:
        self.card, self.on_card = card, on_card
        self._kept: list[Tensor] = []

    def put(self, tensor: Tensor) -> int:
        """Address of a copy on the card."""
        there = self.on_card.upload(tensor)
        self._kept.append(there)
        return there.data_ptr()

    def room(self, nbytes: int) -> int:
        """Address of zeroed bytes on the card."""
        self._kept.append(self.on_card.zeros(nbytes))
        return self._kept[-1].data_ptr()

    def seconds(self, name: str, grid: tuple[int, ...], *arguments: float) -> float:
        """Of one launch."""
        return seconds_of(Ops(self.card, [name]).prepare(name, grid, *arguments), self.card.compute.synchronize, REPEATS)


def copy_rate(card: Card, on_card: TorchOnCard, nbytes: int) -> float:
    """Bytes read and written a second by a copy on the card: what kernels that wait for memory are measured by."""
    a, b = on_card.zeros(nbytes), on_card.zeros(nbytes)

    def copy() -> None:
        card.drv.memcpy_dtod_async(b.data_ptr(), a.data_ptr(), nbytes, card.compute)

    return 2 * nbytes / seconds_of(copy, card.compute.synchronize, REPEATS)


def floors(card: Card, on_card: TorchOnCard, spec: ModelSpec, sequences: int, cells: int) -> Iterator[Figure]:
    """Decode of `sequences` of `cells` cells each: bytes that must move, over the rate of a copy."""
    floor = copy_rate(card, on_card, sequences * cells * 1024)
    yield Figure("copy on the card, read and written", f"{floor / 1e12:.2f} TB/s", data=floor / 1e12)
    for name, layers in (("by layer", 1), ("by block", spec.kv_layers)):
        nbytes, seconds = _attention(Scene(card, on_card), spec, sequences, cells, layers)
        yield rate(f"attention, cells {name}", nbytes, seconds, floor)
    for splits in (1, max(1, cells // SPLIT)):
        nbytes, seconds = _attention(Scene(card, on_card), spec, 4, cells, spec.kv_layers, splits=splits)
        yield rate(f"attention of 4 sequences, {splits} blocks a row", nbytes, seconds)
    yield from _prompt(card, on_card, spec, cells)
    scene, rows, hidden = Scene(card, on_card), 64 * sequences, spec.hidden
    x, y, w = scene.room(4 * rows * hidden), scene.room(2 * rows * hidden), scene.put(torch.ones(hidden))
    added = scene.room(2 * rows * hidden)
    seconds = scene.seconds("rms_norm", (rows,), y, 0, x, added, w, 0, hidden, spec.rms_eps)
    yield rate("rms_norm with what is added", 12 * rows * hidden, seconds, floor)
    inner = spec.intermediate
    wide = scene.room(4 * rows * inner)
    seconds = scene.seconds("silu_mul", (1024,), scene.room(2 * rows * inner), wide, rows, inner)
    yield rate("silu_mul", 6 * rows * inner, seconds, floor)
    if spec.delta:
        nbytes, seconds = _delta(Scene(card, on_card), spec, sequences)
        yield rate("delta_rule, one row a sequence", nbytes, seconds, floor)
    scene, parts, part = (
        Scene(card, on_card),
        max(1, cells // 16),
        2 * 2 * 16 * spec.kv_layers * spec.num_kv_heads * spec.head_dim,
    )
    offsets = scene.put(torch.arange(parts) * part)
    lengths, seeds = scene.put(torch.full((parts,), part, dtype=torch.int32)), scene.room(8 * parts)
    seconds = scene.seconds(
        "checksum", (parts, 1), scene.room(8 * parts), scene.room(parts * part), offsets, lengths, seeds, parts
    )
    yield rate("checksum of an image", parts * part, seconds, floor)


def _prompt(card: Card, on_card: TorchOnCard, spec: ModelSpec, cells: int) -> Iterator[Figure]:
    """Attention of a prompt's last rows, in operations a second, beside those of a large matrix product."""
    size, rows = 128 * (1 + cells // 128), min(512, cells)
    a, b = (on_card.upload(torch.randn(size, size).bfloat16()) for _ in range(2))
    out = on_card.upload(torch.zeros(size, size, dtype=torch.bfloat16))
    with on_card.streaming():
        seconds = seconds_of(lambda: on_card.linear(a, b, None, out), card.compute.synchronize, 5)
    product = 2 * size**3 / seconds
    yield Figure("matrix product, bf16", f"{product / 1e12:.1f} TFLOP/s", data=product / 1e12)
    _, seconds = _attention(Scene(card, on_card), spec, 1, cells, spec.kv_layers, rows=rows)
    found = 4 * rows * (cells - rows / 2) * spec.num_heads * spec.head_dim / seconds
    text = f"{found / 1e12:.1f} TFLOP/s, {found / product:.0%} of the product's"
    yield Figure(f"attention of {rows} rows of a prompt", text, data=found / 1e12)


def _attention(
    scene: Scene, spec: ModelSpec, sequences: int, cells: int, layers: int, splits: int = 0, rows: int = 1
) -> tuple[int, float]:
    """(bytes of cells read, seconds) of the last `rows` rows of each in a pool of `layers` layers a block, its blocks scattered.
    `splits` 0: as the worker would choose."""
    dim, kv_heads, heads = spec.head_dim, spec.num_kv_heads, spec.num_heads
    blocks, layer_bytes = cells // 16, 2 * kv_heads * 16 * dim * 2
    count = sequences * blocks
    generator = torch.Generator().manual_seed(1)
    tables = torch.randperm(count, generator=generator).to(torch.int32)
    together = min(rows, 16 * kv_heads // heads)  # rows of a tile
    tiles = sequences * rows // together
    first = torch.arange(0, sequences * rows, together, dtype=torch.int32)
    each = torch.arange(sequences, dtype=torch.int32)
    positions = torch.arange(cells - rows, cells, dtype=torch.int32).repeat(sequences)
    splits = splits or splits_of(spec, tiles, cells)
    parts = tiles * kv_heads * splits * 16
    seconds = scene.seconds(
        f"attend_d{dim}", (tiles, kv_heads, splits), scene.room(2 * sequences * rows * heads * dim),
        scene.room(2 * sequences * rows * heads * dim), scene.room(count * layers * layer_bytes), layers * layer_bytes, 0, 0,
        scene.put(first), scene.put(torch.full_like(first, together)), scene.put(positions),
        scene.put(each.repeat_interleave(rows)), scene.put(each), scene.put(tables), blocks, heads, kv_heads, layers // 2, 0,
        dim**-0.5, scene.room(4 * parts * dim), scene.room(8 * parts), scene.room(4 * tiles * kv_heads),
    )  # fmt: skip
    return count * layer_bytes, seconds


def _delta(scene: Scene, spec: ModelSpec, sequences: int) -> tuple[int, float]:
    """(bytes of states read, seconds) of one row each, at positions where nothing is folded."""
    delta = spec.delta
    assert delta is not None
    state = delta.value_heads * delta.key_dim * delta.value_dim
    log, keys, values = 18, delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    stride = state + log * (keys + values + delta.value_heads) + 16
    log_k, log_d = state, state + log * keys
    log_g, folded = log_d + log * values, log_d + log * values + log * delta.value_heads
    each = torch.arange(sequences, dtype=torch.int32)
    states = torch.zeros(sequences, stride)
    states.view(torch.int32)[:, folded] = 16
    rows = (scene.room(4 * sequences * width) for width in (values, keys, keys, values, delta.value_heads, delta.value_heads))
    in_order, ones = scene.put(each), scene.put(torch.ones_like(each))
    seconds = scene.seconds(
        f"delta_rule_k{delta.key_dim}", (delta.value_dim // 32, delta.value_heads, sequences), *rows, scene.put(states), stride,
        0, log_k, log_d, log_g, folded, log, in_order, ones, scene.put(torch.full_like(each, 24)),
        scene.put(torch.full_like(each, 25)), in_order, delta.key_heads, delta.value_heads, delta.value_dim,
    )  # fmt: skip
    return 4 * sequences * state, seconds


def same_rows(card: Card, on_card: TorchOnCard, spec: ModelSpec) -> Iterator[Figure]:
    """Whether a row of each product of the model has the same bits in every place and any company, at EXACT_ROWS rows."""
    shapes = {shape for name, shape in tensor_shapes(spec).items() if len(shape) == 2 and not name.endswith("conv")}
    different = []
    for n, k in sorted(shapes):
        generator = torch.Generator().manual_seed(n + k)
        weight = on_card.upload((torch.randn(n, k, generator=generator) * k**-0.5).bfloat16())
        row = torch.randn(k, generator=generator).bfloat16()
        for kind in (torch.bfloat16, torch.float32):
            out, first = on_card.upload(torch.zeros(EXACT_ROWS, n, dtype=kind)), None
            for place in (0, 1, 7, 8, 15, 31, 32, EXACT_ROWS - 1):
                rows = torch.randn(EXACT_ROWS, k, generator=generator).bfloat16()
                rows[place] = row
                there = on_card.upload(rows)
                with on_card.streaming():
                    on_card.linear(there, weight, None, out)
                found = on_card.download(out)[place]
                first = found if first is None else first
                if not torch.equal(found, first):
                    different.append(f"[{n}, {k}] to {str(kind).removeprefix('torch.')}")
                    break
    yield held(f"a row equal to itself in every place, {EXACT_ROWS} rows", not different, ", ".join(different))
