"""The rows of one step: decodes first, then prefills, resumes and replays within the step's budget. Blocks are there already."""

from collections.abc import Callable, Collection, Iterable

from gpu_worker.policy.events import Row
from gpu_worker.policy.sequence import Sequence


def growing(running: Iterable[Sequence], block_size: int) -> list[Sequence]:
    """Those whose next token and drafts do not fit in the blocks they have."""
    return [seq for seq in running if len(seq.tokens) + seq.draft > len(seq.blocks) * block_size]


def rows_of(
    running: Iterable[Sequence], without_room: Collection[Sequence], budget: int, rank: Callable[[Sequence], tuple[int, int]]
) -> list[Row]:
    """A decode is never left out for a prefill: `budget` is at least what all decodes feed. The rest goes to those that have more
    to feed, in the order of `rank`. Those `without_room` for their next token sit this step out."""
    rows = []
    behind = []
    for seq in running:
        tokens = seq.tokens
        start = seq.computed
        if len(tokens) - start > 1:
            behind.append(seq)
        elif not without_room or seq not in without_room:
            rows.append(_row(seq, start, 1))
            budget -= 1 + seq.draft
    if behind:
        behind.sort(key=rank)
        for seq in behind:
            if budget <= 0:
                break
            count = min(len(seq.tokens) - seq.computed, budget)
            rows.append(_row(seq, seq.computed, count))
            budget -= count
    return rows


def _row(seq: Sequence, start: int, count: int) -> Row:
    known = len(seq.tokens)
    return Row(
        seq.request_id,
        seq.tokens,
        start,
        count,
        seq.blocks,
        start + count == known,
        seq.sampling,
        seq.prompt_len,
        seq.draft,
        seq.state_slot,
        seq.banned if known < seq.min_len else (),
        seq.prompt_logprobs if _scores(seq, start + count) else None,
    )


def _scores(seq: Sequence, end: int) -> bool:
    """Whether feeding up to position `end` (exclusive) predicts a prompt token that has no log probability yet."""
    return seq.prompt_logprobs is not None and seq.scored < min(end, seq.prompt_len - 1)
