"""The model on a fake card: the same numbers as torch on the CPU, and whole steps with drafts, padding and graphs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from gpu_worker.device import draw_params
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.ops import KERNELS
from gpu_worker.device.step_buffers import Limits, Shape, StepBuffers
from gpu_worker.model import card_weights
from gpu_worker.model.batch import Batch
from gpu_worker.model.card_model import CardModel
from gpu_worker.model.exactness import prove
from gpu_worker.model.load import load_model
from gpu_worker.model.weights import Weights
from tests.cuda.fake.torch_on_card import in_host_memory
from tests.kernels import harness
from tests.make_models import VOCAB, write_gguf, write_hf
from tests.model.runs import DRAFT_MAX, HOST, cache, chain, logits_of
from wire.messages import Sampling
from wire.model_files import SHIPPED, find_model
from wire.model_spec import ModelError

ONE_ORDER = pytest.mark.parametrize("mode", ["lazy"], indirect=True)
HYBRID = {"layers": 3, "interval": 2, "head_dim": 64, "key_dim": 32, "value_dim": 32, "mtp": True}
MODELS = [
    pytest.param("llama", {"head_dim": 64, "mlp_bias": True, "attention_bias": True}, id="llama-biases"),
    pytest.param("qwen2", {"head_dim": 64, "heads": 3, "kv_heads": 1, "tied": False}, id="qwen2-untied"),
    pytest.param("qwen3", {"head_dim": 96, "hidden": 72, "heads": 4, "kv_heads": 4, "mtp": True}, id="qwen3-head"),
    pytest.param("qwen35", HYBRID, id="qwen35-head"),
    pytest.param("qwen35", {"layers": 3, "interval": 3, "head_dim": 128, "key_heads": 1, "value_heads": 3, "key_dim": 64,
                            "value_dim": 96, "kernel": 2}, id="qwen35-odd"),
]  # fmt: skip


def some(count: int, seed: int = 1) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def model_on(card, path: Path, exact: bool = False, rows: int = 256) -> CardModel:
    files = find_model(str(path))
    limits = Limits(rows, 6, DRAFT_MAX if files.spec.mtp else 0, 6, 64)
    buffers = StepBuffers(card.card, card.torch, limits)
    weights = card_weights.load(files.spec, Weights(files), card.torch, files.spec.max_context)
    return CardModel(files.spec, weights, card.card, card.torch, buffers, exact)


@pytest.mark.parametrize(
    ("mode", "exact"), [pytest.param("lazy", False, marks=pytest.mark.long), ("random:3", True)], indirect=["mode"]
)
@pytest.mark.parametrize(("arch", "options"), MODELS)
def test_the_same_numbers_as_on_the_cpu(tmp_path, card, arch, options, exact):
    """All logits of a text fed in chunks: as near to float32 as torch in bf16 is, and the same best token where it is clear."""
    path = write_hf(tmp_path / "m", arch, dtype="BF16", **options)
    tokens, chunk = some(68 if exact else 40), 66 if exact else 30  # more rows than one product of exact models has
    truth, half = (logits_of(load_model(find_model(str(path)), dtype, native=False), tokens, 90) for dtype in ("f32", "bf16"))
    found = logits_of(model_on(card, path, exact), tokens, chunk, card.torch)
    assert truth.std() > 0.5, "logits that do not spread prove little"
    assert harness.relative(found, truth) < max(1.5 * harness.relative(half, truth), 1e-2)
    best, second = truth.topk(2).values.unbind(-1)
    clear = best - second > 0.2
    assert clear.sum() > 15
    assert torch.equal(found.argmax(-1)[clear], truth.argmax(-1)[clear])


@pytest.mark.parametrize("mode", ["random:5"], indirect=True)
def test_the_embedded_model_says_the_same(card):
    """A trained model: the best token of every position, but where two are within 2e-2."""
    path = SHIPPED / "bard"
    model = model_on(card, path, rows=64)
    tokens = torch.randint(model.spec.vocab, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    truth = logits_of(load_model(find_model(str(path)), "f32", native=False), tokens, 40)
    found = logits_of(model, tokens, 40, card.torch)
    assert harness.relative(found, truth) < 1e-2
    best, second = truth.topk(2).values.unbind(-1)
    clear = best - second > 2e-2
    assert torch.equal(found.argmax(-1)[clear], truth.argmax(-1)[clear])


@ONE_ORDER
def test_four_bit_files_are_expanded(tmp_path, card):
    path = write_gguf(tmp_path / "m.gguf", "llama", quant="Q4_0", head_dim=64, hidden=64)
    expected = logits_of(load_model(find_model(str(path)), "f32", native=False), some(30))
    assert harness.relative(logits_of(model_on(card, path), some(30), 30, card.torch), expected) < 2e-2


@ONE_ORDER
@pytest.mark.parametrize("draft_ids", [None, [5, 9, 200, 3, 77, *range(100, 140)]], ids=["all", "some"])
def test_the_head_drafts_what_it_drafts_on_the_cpu(tmp_path, card, draft_ids):
    """Rows and logits of three chained passes, the given tokens behind a text of 37."""
    path = write_hf(tmp_path / "m", "qwen35", dtype="BF16", draft_ids=draft_ids, **HYBRID)
    tokens, drafted = some(37), some(3, seed=2)
    found = []
    on_cpu = load_model(find_model(str(path)), "f32", native=False)
    for model, memory in ((on_cpu, HOST), (model_on(card, path), card.torch)):
        kv = cache(model, 64, memory)
        blocks = [2, 0, 3]
        model.forward(Batch.of([(tokens, 0, blocks)]), kv)
        hidden, table, rows = memory.download(kv.hidden[blocks[36 // 16]])[None], torch.tensor([blocks], dtype=torch.int32), []
        for i, token in enumerate(drafted):
            hidden = model.draft(torch.tensor([token]), torch.tensor([37 + i], dtype=torch.int32), hidden, table, kv)
            rows += [hidden, model.draft_logits(hidden)]
        found.append(torch.cat([row.flatten() for row in rows]))
        assert (model.draft_ids is None) == (draft_ids is None)
    assert harness.relative(found[1], found[0]) < 2e-2


@ONE_ORDER
def test_a_state_of_another_position_is_an_error(tmp_path, card):
    model = model_on(card, write_hf(tmp_path / "m", "qwen35", dtype="BF16", **HYBRID))
    kv = cache(model, 96, card.torch)
    model.forward(Batch.of([(some(20), 0, [0, 1])]), kv)
    with pytest.raises(ValueError, match="another position"):
        model.forward(Batch.of([([1], 60, [0, 1, 2, 3])]), kv)
    model.forward(Batch.of([([1], 20, [0, 1])]), kv)


@ONE_ORDER
@pytest.mark.long
@pytest.mark.parametrize(("arch", "options"), [MODELS[0], MODELS[3]])
def test_exactness_is_proven(tmp_path, card, arch, options):
    model = model_on(card, write_hf(tmp_path / "m", arch, dtype="BF16", context=1024, **options), exact=True)
    assert prove(model, card.torch) == (True, "")


# whole steps ----------------------------------------------------------------------------------------------------------
LENGTH = 34  # of texts: two folds of the state behind the shortest prompt


class Text:
    """A sequence that is decoded in whole steps, greedily."""

    def __init__(self, tokens: list[int], blocks: list[int], slot: int) -> None:
        self.tokens, self.blocks, self.slot = tokens, blocks, slot


def decode(card, model: CardModel, texts: list[Text], drafts: list[int], padding: int, run: Callable[[Shape], None]) -> int:
    """One step: the newest token of each text and its drafts, in a shape with `padding` sequences more. Drafts accepted."""
    b, k, s = model.buffers, max(drafts), len(texts) + padding
    b.clear()
    row = draw = 0
    for i, (text, count) in enumerate(zip(texts, drafts)):
        rows, at = 1 + count, len(text.tokens) - 1
        b.tokens[row] = text.tokens[-1]
        b.positions[row : row + rows] = range(at, at + rows)
        b.seq_of[row : row + rows] = i
        b.out_rows[draw : draw + rows] = range(row, row + rows)
        b.draw_seq[draw : draw + rows] = i
        b.row_begin[i], b.row_count[i], b.drafts[i], b.known[i] = row, rows, count, at + 1
        b.seats[i], b.slots[i], b.first_draw[i] = i, text.slot, draw
        b.draft_positions[:count, i] = range(at, at + count)
        b.draft_tiles[:count, i] = 1
        b.draw_params.view(np.uint8)[i] = np.frombuffer(draw_params.pack(Sampling(temperature=0)), np.uint8)
        b.tables[i, : len(text.blocks)] = text.blocks
        b.upload_table(i, 0, len(text.blocks))
        row += rows
        draw += rows
    tiles = 0
    for begin, count in zip(b.row_begin[: len(texts)].tolist(), b.row_count[: len(texts)].tolist()):
        for first in range(begin, begin + count, model.tile_rows):
            b.tile_row[tiles], b.tile_count[tiles] = first, min(model.tile_rows, begin + count - first)
            tiles += 1
    b.upload()
    longest = max(len(text.tokens) for text in texts) + k
    rows = s * (1 + k)
    run(Shape(rows, s, s * (1 + k), rows, rows, k, model.splits(s * (1 + k), longest)))
    b.download()
    card.card.synchronize()
    assert not b.back["status"][0]
    for i, text in enumerate(texts):
        first = int(b.first_draw[i])
        text.tokens += b.back["drawn"][first : first + 1 + b.back["accepted"][i]].tolist()
    return int(b.back["accepted"][: len(texts)].sum())


def enqueue(model: CardModel, shape: Shape) -> None:
    if shape.depth:
        model.enqueue_drafts(shape)
    model.enqueue_forward(shape)
    model.enqueue_draws(shape)


def texts_of(model: CardModel, kv: KvCache) -> list[Text]:
    """Three prompts, computed, with their first token."""
    places = enumerate(((5, 8), (31, 0), (16, 4)))  # tokens, first block
    texts = [Text(some(count, seed=count), list(range(first, first + 4)), slot) for slot, (count, first) in places]
    for text in texts:
        hidden = model.forward(Batch.of([(text.tokens, 0, text.blocks)], state_slots=[text.slot]), kv)
        text.tokens.append(int(model.logits(hidden)[0].argmax()))
    return texts


def pool_of(card, model: CardModel) -> KvCache:
    kv = KvCache(model.spec, 13, 16, model.kv_dtype, 3, DRAFT_MAX, card.torch.zeros)
    in_host_memory(kv.rows).fill_(torch.nan)
    if kv.states:
        in_host_memory(kv.states.flat).fill_(torch.nan)
    return kv


@pytest.mark.parametrize(
    ("mode", "arch", "options"),
    [("lazy", "llama", {"head_dim": 64}), ("random:3", "qwen35", HYBRID)],
    ids=["llama-lazy", "qwen35-head-random"],
    indirect=["mode"],
)
def test_text_is_the_same_with_drafts_padding_and_graphs(tmp_path, card, arch, options):
    """Three texts in one step each time, with products of one size: the same as one by one, however the step looks."""
    model = model_on(card, write_hf(tmp_path / "m", arch, dtype="BF16", **options), exact=True, rows=64)
    kv = pool_of(card, model)
    alone = texts_of(model, kv)
    for text in alone:
        while len(text.tokens) < LENGTH:
            decode(card, model, [text], [0], 0, lambda shape: enqueue(model, shape))
    graphs = {}

    def replay(shape: Shape) -> None:
        if shape not in graphs:
            with card.card.capture() as captured:
                enqueue(model, shape)
            graphs[shape] = captured[0]
        graphs[shape].launch()

    kv = pool_of(card, model)
    together = texts_of(model, kv)
    drafts, step = DRAFT_MAX if model.spec.mtp else 0, 0
    while any(len(text.tokens) < LENGTH for text in together):
        wanted = [(drafts, drafts // 2, 0), (1, 3, 2), (0, 0, 0)][step % 3] if drafts else (0, 0, 0)
        decode(card, model, together, list(wanted), step % 2, replay)
        step += 1
    card.card.synchronize()
    for graph in graphs.values():
        graph.close()
    assert [text.tokens[:LENGTH] for text in together] == [text.tokens[:LENGTH] for text in alone]
    assert len(graphs) < step, "no graph was launched twice"
    assert torch.isnan(card.torch.download(kv.rows.view(14, -1)[12])).all(), "a block that nobody has was written to"


@ONE_ORDER
def test_drafts_of_a_step_are_those_of_the_head_alone(tmp_path, card):
    """And where one is rejected, the block keeps the hidden row of the last cell that counts."""
    model = model_on(card, write_hf(tmp_path / "m", "qwen35", dtype="BF16", **HYBRID), exact=True, rows=64)
    kv = pool_of(card, model)
    texts = texts_of(model, kv)
    counts = [6, 0, 3]
    at = [len(text.tokens) - 1 for text in texts]
    expected = [chain(model, kv, t.blocks, t.tokens[-1], p, n, card.torch) if n else [] for t, p, n in zip(texts, at, counts)]
    accepted = decode(card, model, texts, counts, 2, lambda shape: enqueue(model, shape))
    b = model.buffers
    begins = b.row_begin[:3].tolist()
    assert [b.back["tokens"][row + 1 : row + 1 + n].tolist() for row, n in zip(begins, counts)] == expected
    assert accepted < sum(counts), "a random head whose drafts all agree"
    for i, (text, row, position) in enumerate(zip(texts, begins, at)):
        right = int(b.back["accepted"][i])
        kept, computed = kv.hidden[text.blocks[(position + right) // 16]], model.hidden_rows()[row + right]
        assert torch.equal(card.torch.download(kept), card.torch.download(computed).float())


@ONE_ORDER
def test_a_part_of_a_table_is_uploaded_in_its_place(card):
    buffers = StepBuffers(card.card, card.torch, Limits(rows=4, sequences=2, draft_max=1, seats=3, table_stride=5))
    for seat, first, values in ((1, 0, [7, 8]), (2, 0, [1]), (1, 2, [9, 10, 11]), (2, 1, [2])):
        buffers.tables[seat, first : first + len(values)] = values
        buffers.upload_table(seat, first, len(values))
    back = card.card.pinned(3 * 5 * 4)
    card.card.to_host(back, buffers.at["tables"], card.card.compute)
    card.card.synchronize()
    assert back.view(np.int32).reshape(3, 5).tolist() == [[0] * 5, [7, 8, 9, 10, 11], [1, 2, 0, 0, 0]]


def test_a_step_that_cannot_hold_its_drafts_is_refused():
    with pytest.raises(ValueError, match="2 sequences with 3 drafts are more than 7 rows"):
        StepBuffers(None, None, Limits(rows=7, sequences=2, draft_max=3, seats=2, table_stride=4))


# what does not fit ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "words"),
    [({"head_dim": 80}, "heads have 64, 96, 128 or 256"), ({"hidden": 60}, "hidden"), ({"num_heads": 34}, "17 do")],
)
def test_shapes_without_kernels_are_refused(tmp_path, change, words):
    spec = find_model(str(write_hf(tmp_path / "m", "llama", head_dim=64))).spec
    card_weights.check(spec)
    with pytest.raises(ModelError, match=words):
        card_weights.check(structs.replace(spec, **change))


@pytest.mark.skipif(harness.compiler() is None, reason="no g++ to compile kernels for the CPU")
@pytest.mark.parametrize("name", KERNELS)
def test_arguments_are_packed_as_the_kernel_declares_them(name):
    kernel = KERNELS[name]
    declared = "".join(kind[0] for kind in harness.parameters(kernel.file.removesuffix(".cu"), name))
    packed, count = "", ""
    for letter in kernel.arguments:
        if letter.isdigit():
            count += letter
        else:
            packed, count = packed + letter * int(count or 1), ""
    assert packed == declared
