"""Distils an MTP head onto the frozen SmolLM2: first collect tokens with their hidden rows, then train the head on them."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model.batch import Batch
from gpu_worker.model.load import Model, load_model
from gpu_worker.model.weights import Weights
from router.openai.text import Text
from tools.training import cards, checkpoint, corpus
from tools.training.bard import rate
from tools.training.head import HeadShape, MtpHead, chained_rows, divergence
from tools.training.progress import Progress
from tools.training.questions import QUESTIONS, TOPICS
from wire.model_files import find_model

BASE = "smollm2"
LENGTH = 512  # tokens of a collected sequence
BLOCK = 16
SHARD = 64  # sequences a file
DEPTHS = 3
CHECK_EVERY = 100
JUDGED_EVERY = 3  # of the rows of a step the loss looks at each third: its logits cost more than the head itself
DRAFT_VOCAB = 8192  # the tokens that the head may draft: the most frequent ones of what was collected
HELD_OUT_EVERY = 20
HEAD_SHAPE = HeadShape(576, 9, 3, 64, 1536, 64, 1e5, 1e-5, qk_norm=False, gated=False, zero_centred=False)


# collecting ---------------------------------------------------------------------------------------------------------
def collect(work: Path, sequences: int, rows: int, progress: Progress) -> None:
    """Sequences of 512 tokens with their hidden rows in shards: of four, three are the model's own chats and one is text."""
    work.mkdir(parents=True, exist_ok=True)
    files = find_model(BASE)
    model = load_model(files, threads=1)
    text = Text(files)
    done = len(list(work.glob("shard-*.npz"))) * SHARD
    passages = list(_passages(text))
    while done < sequences:
        seed = done // SHARD
        if seed % 4 == 3:
            shard = _read(model, random.Random(seed).sample(passages, SHARD))
        else:
            shard = [
                pair for start in range(0, SHARD, rows) for pair in _talk(model, text, rows, (seed, start), files.eos_token_ids)
            ]
        np.savez(work / f"shard-{seed:05d}.npz", ids=np.stack([i for i, _ in shard]), hidden=np.stack([h for _, h in shard]))
        done += SHARD
        progress.show(done, sequences)


def _passages(text: Text) -> Iterator[list[int]]:
    """Windows of public-domain text."""
    for whole in corpus.texts().values():
        for part in corpus.split(whole)[0]:
            ids = text.encode(part)
            for start in range(0, len(ids) - LENGTH, LENGTH):
                yield ids[start : start + LENGTH]


def _read(model: Model, passages: list[list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    kv = KvCache(model.spec, LENGTH // BLOCK, BLOCK, model.kv_dtype)
    blocks = list(range(LENGTH // BLOCK))
    return [
        (np.array(ids, dtype=np.uint16), _half(model.forward(Batch.of([(ids, 0, blocks)], last_only=False), kv)))
        for ids in passages
    ]


def _talk(
    model: Model, text: Text, rows: int, seed: tuple[int, int], ends: tuple[int, ...]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Chats of the model with itself, some greedy, some drawn; when an answer ends, the next question follows."""
    chooser = random.Random(repr(seed))
    torch.manual_seed(chooser.randrange(2**31))
    temperature = torch.tensor([chooser.choice((0.0, 0.0, 0.5, 0.8, 1.0)) for _ in range(rows)])
    each = LENGTH // BLOCK
    kv = KvCache(model.spec, rows * each, BLOCK, model.kv_dtype)
    tables = [list(range(r * each, (r + 1) * each)) for r in range(rows)]
    ids = [text.chat_prompt([{"role": "user", "content": _question(chooser)}]) for _ in range(rows)]
    hidden = torch.empty(rows, LENGTH, model.spec.hidden, dtype=torch.bfloat16)
    for position in range(LENGTH):
        out = model.forward(Batch.of([([ids[r][position]], position, tables[r]) for r in range(rows)]), kv)
        hidden[:, position] = out.to(torch.bfloat16)
        wanting = [r for r in range(rows) if len(ids[r]) == position + 1]
        if not wanting:
            continue
        logits = model.logits(out[wanting])
        heat = temperature[wanting]
        noise = -torch.empty_like(logits).exponential_().log()
        for r, token in zip(wanting, (logits + heat[:, None] * noise).argmax(1).tolist()):
            ids[r].append(token)
            if token in ends:
                ids[r] += text.encode("\n<|im_start|>user\n" + _question(chooser) + "<|im_end|>\n<|im_start|>assistant\n")
    return [(np.array(ids[r][:LENGTH], dtype=np.uint16), _half(hidden[r])) for r in range(rows)]


def _question(chooser: random.Random) -> str:
    return chooser.choice(QUESTIONS).format(chooser.choice(TOPICS))


def _half(hidden: Tensor) -> np.ndarray:
    """bfloat16 as its bits: int16 [T, hidden]."""
    return hidden.to(torch.bfloat16).view(torch.int16).numpy()


# training -----------------------------------------------------------------------------------------------------------
class Collected:
    """The shards in memory; every twentieth sequence is held out."""

    def __init__(self, work: Path) -> None:
        shards = [np.load(path) for path in sorted(work.glob("shard-*.npz"))]
        self.ids = torch.from_numpy(np.concatenate([shard["ids"] for shard in shards]).astype(np.int64))
        self.hidden = torch.from_numpy(np.concatenate([shard["hidden"] for shard in shards])).view(torch.bfloat16)
        everything = torch.arange(len(self.ids))
        self.held_out = everything[everything % HELD_OUT_EVERY == 0]
        self.training = everything[everything % HELD_OUT_EVERY != 0]


def train(work: Path, shards: Path, out: Path, steps: int, rows: int, peak: float, progress: Progress) -> None:
    """Up to step `steps`, going on from the checkpoint in `work`, or from the head in `out` if there is only that."""
    work.mkdir(parents=True, exist_ok=True)
    data = Collected(shards)
    draft_ids = _draft_ids(work, data)
    embed = Weights(find_model(BASE)).dense("embed", torch.float32).to(torch.bfloat16)
    small = embed[draft_ids]
    torch.manual_seed(1)
    head = MtpHead(HEAD_SHAPE)
    optimiser = torch.optim.AdamW(head.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    first = checkpoint.load(work, head, optimiser)
    if not first and (out / "mtp.safetensors").exists():
        progress.note(f"no checkpoint in {work}; going on from the head in {out}")
        head.load_state_dict(_shipped(out / "mtp.safetensors"))
    for step in range(first, steps):
        chosen = data.training[torch.from_numpy(np.random.default_rng((1, step)).integers(0, len(data.training), rows))]
        for group in optimiser.param_groups:
            group["lr"] = rate(step, steps, peak)
        ids, hidden = data.ids[chosen], data.hidden[chosen]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.zeros(())
            for depth, found in enumerate(chained_rows(head, hidden, embed[ids], DEPTHS), 1):
                judged = slice(step % JUDGED_EVERY, None, JUDGED_EVERY)
                target = hidden[:, depth:][:, judged] @ small.T
                loss = loss + divergence((found[:, judged] @ small.T).flatten(0, 1), target.flatten(0, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        progress.show(step + 1, steps, loss=loss.item() / DEPTHS)
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == steps:
            checkpoint.store(work, head, optimiser, step + 1)
            save(head, draft_ids, out)
            shares = acceptance(head, data, embed, draft_ids)
            progress.note(f"step {step + 1}: acceptance {cards.shares(shares)}")
            (out / "README.md").write_text(card(head, step + 1, rows, len(data.ids), shares))


def _draft_ids(work: Path, data: Collected) -> Tensor:
    """The most frequent tokens, ascending; chosen once, so that training can go on with them."""
    path = work / "draft_ids.npy"
    if not path.exists():
        counts = torch.bincount(data.ids.flatten(), minlength=find_model(BASE).spec.vocab)
        np.save(path, counts.topk(DRAFT_VOCAB).indices.sort().values.numpy())
    return torch.from_numpy(np.load(path))


@torch.no_grad()
def acceptance(head: MtpHead, data: Collected, embed: Tensor, draft_ids: Tensor, depths: int = DEPTHS) -> list[float]:
    """Share of greedy drafts of each depth that the trunk agrees with.

    Counted where the text is the trunk's own greedy one and all drafts before agreed.
    """
    agreed, asked = [0] * depths, [0] * depths
    for index in data.held_out[:48].split(8):
        ids, hidden = data.ids[index], data.hidden[index]
        best = torch.stack([(row @ embed.T).argmax(-1) for row in hidden])
        alive = torch.ones_like(ids, dtype=torch.bool)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for depth, found in enumerate(chained_rows(head, hidden, embed[ids], depths), 1):
                drafted = draft_ids[(found @ embed[draft_ids].T).argmax(-1)]
                alive = alive[:, : ids.shape[1] - depth] & (best[:, depth - 1 : -1] == ids[:, depth:])
                agree = alive & (drafted == best[:, depth:])
                agreed[depth - 1] += int(agree.sum())
                asked[depth - 1] += int(alive.sum())
                alive = agree
    return [a / max(1, n) for a, n in zip(agreed, asked)]


def _shipped(path: Path) -> dict[str, Tensor]:
    """The head's parameters as they were shipped."""
    weights = load_file(path)
    return {name.removeprefix("mtp."): value.float() for name, value in weights.items() if name != "mtp.draft_token_ids"}


def save(head: MtpHead, draft_ids: Tensor, out: Path) -> None:
    """mtp.safetensors in bfloat16 beside a config.json that says which model it belongs to."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {f"mtp.{name}": value.to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    weights["mtp.draft_token_ids"] = draft_ids.to(torch.int32)
    path = out / "mtp.safetensors"
    save_file(weights, path)
    path.chmod(0o644)
    config = {"base_model": BASE, "mtp_num_hidden_layers": 1, "intermediate_size": HEAD_SHAPE.intermediate}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def card(head: MtpHead, steps: int, rows: int, sequences: int, shares: list[float]) -> str:
    """The text of the head's README."""
    return cards.HEAD.format(
        millions=sum(p.numel() for p in head.parameters()) / 1e6,
        draft_vocab=DRAFT_VOCAB,
        depths=DEPTHS,
        sequences=sequences,
        length=LENGTH,
        steps=steps,
        rows=rows,
        acceptance=cards.shares(shares),
    )
