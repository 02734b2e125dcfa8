"""The rows of one step as tensors: what a model's forward pass takes in."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """T rows of S sequences. A row reads the cells of its sequence at positions 0 to its own and writes its own cell.

    The rows of one sequence are contiguous, with ascending positions without gaps. Block tables name blocks of the pool;
    entries beyond a sequence's last cell are never read, but must be valid block numbers. Rows at positions below a sequence's
    `known` are tokens of the sequence, those behind are drafts: they may be rejected, and the state must survive that.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int32 [T]
    seq_of: Tensor  # int32 [T], index into block_tables
    block_tables: Tensor  # int32 [S, max_blocks], contiguous
    out_rows: Tensor  # int64 [n_out]: which of the T rows go on to the head, in the order of the logits
    known: Tensor  # int32 [S]
    state_slots: Tensor  # int32 [S], of the state cache; not read where the model has no recurrent state

    @staticmethod
    def of(
        rows: list[tuple[list[int], int, list[int]]],
        last_only: bool = True,
        drafts: list[int] | None = None,
        state_slots: list[int] | None = None,
    ) -> "Batch":
        """A batch from (token ids to feed, position of the first, blocks) for each sequence.

        The last row of each sequence goes to the head, or every row if not `last_only`. The last `drafts[i]` rows of sequence i
        are drafts (none where not given), and it has state slot `state_slots[i]` (i where not given).
        """
        drafts, state_slots = drafts or [0] * len(rows), state_slots or list(range(len(rows)))
        width = max(len(blocks) for _, _, blocks in rows)
        ids: list[int] = []
        positions: list[int] = []
        seq_of: list[int] = []
        out: list[int] = []
        for s, (tokens, start, _) in enumerate(rows):
            ids += tokens
            positions += range(start, start + len(tokens))
            seq_of += [s] * len(tokens)
            out += [len(ids) - 1] if last_only else range(len(ids) - len(tokens), len(ids))
        tables = torch.tensor([blocks + [blocks[-1]] * (width - len(blocks)) for _, _, blocks in rows], dtype=torch.int32)
        return Batch(
            token_ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int32),
            seq_of=torch.tensor(seq_of, dtype=torch.int32),
            block_tables=tables,
            out_rows=torch.tensor(out, dtype=torch.int64),
            known=torch.tensor([start + len(tokens) - n for (tokens, start, _), n in zip(rows, drafts)], dtype=torch.int32),
            state_slots=torch.tensor(state_slots, dtype=torch.int32),
        )
