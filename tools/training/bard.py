"""Trains `bard`, a hybrid of a few million parameters in the layout of Qwen3.5, together with its MTP head."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tools.training import cards, checkpoint, corpus
from tools.training.delta_rule import chunk_delta_rule
from tools.training.head import HeadShape, MtpHead, chained_rows, divergence
from tools.training.progress import Progress

F = torch.nn.functional
VOCAB = 2048
END = "<|endoftext|>"
DEPTHS = 2
CHECK_EVERY = 200
HEAD_WEIGHT = 0.3  # of the head's loss in the sum; its gradient goes into the trunk too
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 448,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]},
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": 0,
}
HEAD_SHAPE = HeadShape(192, 4, 2, 64, 448, 16, 1e6, 1e-6, qk_norm=True, gated=True, zero_centred=True)


def train_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level BPE of the training text, made once and kept in `folder`."""
    path = folder / "tokenizer.json"
    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        words = Regex(r"'(?:[sdmt]|ll|ve|re)|\s?\p{L}+|\p{N}|\s?[^\s\p{L}\p{N}]+|\s+")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator((part for text in corpus.texts().values() for part in corpus.split(text)[0]), trainer)
        tokenizer.save(str(path))
    return Tokenizer.from_file(str(path))


def tokens_of(tokenizer: Tokenizer, held_out: bool) -> np.ndarray:
    """All texts as one row of ids, uint16; parts end with the end token."""
    parts = [part for text in corpus.texts().values() for part in corpus.split(text)[held_out]]
    end = tokenizer.token_to_id(END)
    return np.concatenate([np.array([*encoded.ids, end], dtype=np.uint16) for encoded in tokenizer.encode_batch(parts)])


class Bard(torch.nn.Module):
    """The trunk as transformers has it, with a faster rule for its recurrence, and the head."""

    def __init__(self) -> None:
        super().__init__()
        config = Qwen3_5TextConfig(**CONFIG)
        self.trunk = Qwen3_5ForCausalLM(config)
        for layer in self.trunk.model.layers:
            if hasattr(layer, "linear_attn"):
                layer.linear_attn.chunk_gated_delta_rule = chunk_delta_rule
        self.head = MtpHead(HEAD_SHAPE)

    def hidden(self, ids: Tensor) -> Tensor:
        return self.trunk.model(input_ids=ids, use_cache=False).last_hidden_state

    def losses(self, ids: Tensor, depths: int = DEPTHS) -> tuple[Tensor, Tensor]:
        """(cross-entropy of the next token, divergence of the head's predictions summed over depths), in nats."""
        embed = self.trunk.model.embed_tokens.weight
        hidden = self.hidden(ids)
        logits = hidden @ embed.T
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        some = slice(0, max(1, len(ids) // 2))  # the head is small: half of the rows teach it enough
        target = logits[some].detach()
        head_loss = torch.zeros(())
        for depth, rows in enumerate(chained_rows(self.head, hidden[some], embed[ids[some]], depths), 1):
            drafted = rows @ embed.T
            head_loss = head_loss + divergence(drafted.flatten(0, 1), target[:, depth:].flatten(0, 1))
        return loss, head_loss


def batches(tokens: np.ndarray, rows: int, length: int, seed: int, first_step: int) -> Iterator[Tensor]:
    """Random windows; those of a step depend on the seed and the step only, so that training can go on where it stopped."""
    step = first_step
    while True:
        random = np.random.default_rng((seed, step))
        starts = random.integers(0, len(tokens) - length, rows)
        yield torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]).astype(np.int64))
        step += 1


def rate(step: int, steps: int, peak: float) -> float:
    """Warm-up of 100 steps, then a cosine down to a twentieth."""
    if step < 100:
        return peak * (step + 1) / 100
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - 100) / max(1, steps - 100)))))


@torch.no_grad()
def acceptance(model: Bard, tokens: np.ndarray, depths: int, rows: int = 16, length: int = 512) -> tuple[float, list[float]]:
    """On held-out text: next-token loss, and the share of greedy drafts of each depth that the trunk agrees with when it has
    agreed with all before."""
    model.eval()
    embed = model.trunk.model.embed_tokens.weight
    starts = np.linspace(0, len(tokens) - length, rows).astype(int)
    ids = torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]).astype(np.int64))
    hidden = model.hidden(ids)
    logits = hidden @ embed.T
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
    best = logits.argmax(-1)
    shares = []
    alive = torch.ones_like(ids, dtype=torch.bool)
    for depth, found in enumerate(chained_rows(model.head, hidden, embed[ids], depths), 1):
        alive = alive[:, : ids.shape[1] - depth]
        if depth > 1:  # the text fed at this depth is what greedy would have said only where it is the trunk's best
            alive = alive & (best[:, depth - 1 : -1] == ids[:, depth:])
        agree = (found @ embed.T).argmax(-1) == best[:, depth:]
        shares.append((agree & alive).sum().item() / max(1, alive.sum().item()))
        alive = alive & agree
    model.train()
    return loss, shares


def save(model: Bard, folder: Path) -> None:
    """config.json and model.safetensors in bfloat16, as a Qwen3.5 folder has them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}
    config["layer_types"] = model.trunk.config.layer_types
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": 16384}, indent=2) + "\n"
    )
    weights = {name: value for name, value in model.trunk.state_dict().items() if name != "lm_head.weight"}
    weights |= {f"mtp.{name}": value for name, value in model.head.state_dict().items()}
    path = folder / "model.safetensors"
    save_file({name: value.to(torch.bfloat16).contiguous() for name, value in weights.items()}, path)
    path.chmod(0o644)


def train(
    folder: Path, out: Path, steps: int, rows: int, length: int, peak: float, progress: Progress, schedule: int | None = None
) -> None:
    """Up to step `steps`, going on from the checkpoint in `folder` if there is one; then writes the model to `out`.

    The learning rate falls over `schedule` steps (None: as many as `steps`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(folder)
    tokens, held_out = tokens_of(tokenizer, held_out=False), tokens_of(tokenizer, held_out=True)
    torch.manual_seed(1)
    model = Bard()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))
    first = checkpoint.load(folder, model, optimiser)
    for step, ids in zip(range(first, steps), batches(tokens, rows, length, 1, first)):
        for group in optimiser.param_groups:
            group["lr"] = rate(step, schedule or steps, peak)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, head_loss = model.losses(ids)
        (loss + HEAD_WEIGHT * head_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        progress.show(step + 1, steps, loss=loss.item(), head=head_loss.item())
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == steps:
            checkpoint.store(folder, model, optimiser, step + 1)
            save(model, out)
            (out / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
            held_loss, shares = acceptance(model, held_out, 3)
            progress.note(f"step {step + 1}: held-out loss {held_loss:.3f}, acceptance {cards.shares(shares)}")
            (out / "README.md").write_text(card(model, step + 1, rows, length, held_loss, shares))


def card(model: Bard, steps: int, rows: int, length: int, loss: float, shares: list[float]) -> str:
    """The text of the model's README."""
    return cards.BARD.format(
        millions=sum(p.numel() for p in model.parameters()) / 1e6,
        layers=CONFIG["num_hidden_layers"],
        vocab=VOCAB,
        context=CONFIG["max_position_embeddings"],
        chars=sum(map(len, corpus.texts().values())) / 1e6,
        steps=steps,
        rows=rows,
        length=length,
        loss=loss,
        acceptance=cards.shares(shares),
    )
