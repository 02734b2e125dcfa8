"""The training tools: same numbers after a stop, the rule of the recurrence, chained rows as drafting makes them."""

from pathlib import Path

import pytest
import torch

from tools.training import bard, corpus
from tools.training.delta_rule import chunk_delta_rule
from tools.training.head import HeadShape, MtpHead, chained_rows
from tools.training.progress import Progress

SMALL = {**bard.CONFIG, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16}
SMALL |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SMALL |= {"rope_parameters": {**bard.CONFIG["rope_parameters"], "mrope_section": [1, 1, 0]}}
SHAPE = HeadShape(32, 4, 2, 16, 48, 4, 1e6, 1e-6, qk_norm=True, gated=True, zero_centred=True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"{i} is a number, and {i * i} is its square.\n" for i in range(12_000))
    monkeypatch.setattr(corpus, "texts", lambda: {"numbers": text})
    monkeypatch.setattr(bard, "CONFIG", SMALL)
    monkeypatch.setattr(bard, "HEAD_SHAPE", SHAPE)
    monkeypatch.setattr(bard, "CHECK_EVERY", 2)


def run(folder: Path, steps: tuple[int, ...]) -> bytes:
    for until in steps:
        with Progress("test") as progress:
            bard.train(folder, folder / "out", until, rows=2, length=64, peak=1e-3, progress=progress, schedule=4)
    return (folder / "out" / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("small")
def test_a_stopped_training_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    assert run(tmp_path / "whole", (4,)) == run(tmp_path / "stopped", (2, 4))


def test_held_out_text_is_never_trained_on() -> None:
    text = "".join(f"line {i}\n" for i in range(200_000))
    training, held_out = corpus.split(text)
    assert held_out and not set(held_out) & set(training)
    assert sorted(map(len, held_out)) and sum(map(len, training + held_out)) == len(text)


def test_delta_rule_is_the_recurrence() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 70, 3, 8), torch.randn(2, 70, 3, 8), torch.randn(2, 70, 3, 16)
    g, beta = -torch.rand(2, 70, 3), torch.rand(2, 70, 3)
    found, _ = chunk_delta_rule(q, k, v, g, beta)
    unit_q, unit_k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state = torch.zeros(2, 3, 8, 16)
    for t in range(70):
        state = state * g[:, t, :, None, None].exp()
        d = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, unit_k[:, t]))
        state = state + unit_k[:, t, :, :, None] * d[:, :, None]
        expected = torch.einsum("bhkv,bhk->bhv", state, unit_q[:, t]) * 8**-0.5
        torch.testing.assert_close(found[:, t], expected, atol=1e-5, rtol=1e-4)


def test_chained_rows_are_what_drafting_one_by_one_gives() -> None:
    """Row p at depth k sees true rows up to p and its own chain, as a drafting head does that feeds its drafts back."""
    torch.manual_seed(0)
    head = MtpHead(SHAPE)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden, embedded = torch.randn(1, 9, 32), torch.randn(1, 9, 32)
    found = chained_rows(head, hidden, embedded, 3)
    for p in range(6):
        rows = hidden[:, : p + 1]  # with these drafts start after token p + 1
        for depth in range(1, 4):
            own: list[tuple[torch.Tensor, torch.Tensor]] = []
            out = head(rows, embedded[:, 1 : p + 1 + depth], 1, own)
            torch.testing.assert_close(out[:, -1], found[depth - 1][:, p], atol=1e-5, rtol=1e-4)
            rows = torch.cat([rows, out[:, -1:]], 1)
