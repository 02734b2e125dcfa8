"""How many tokens the head drafts for a row: a function of events alone, never of measured time, so that a run repeats.

`seq.likely[k]` estimates how often draft k + 1 agrees, of the times that the k before it did, in 1/65536. It begins at .6.
After each decode:

    tried, agreed        p += (1 - p) / 16
    tried, refused       p -= p / 16
    not tried            p += (PRIOR - p) / 1024: who has stopped drafting tries again now and then, too rarely to cost much
    behind a refusal     unknown: stays

A draft costs `c` percent of a plain step (`Limits.draft_cost`, for the number of decodes in the step). With n drafts a step
yields T = 1 + p1 + p1 p2 + ... tokens for 100 + n c; one more pays while p1 ... p(n+1) / c >= T / (100 + n c).
The weights are a compromise: over 1,500 steps, with drafts that agree in .1 to .9 of all cases and cost 10 to 75 percent, this
reaches .98 of the best fixed number (.92 in the worst case, where that gains little) and .99 of no drafts at all or more (.97
over the first 200).
"""

from collections.abc import Iterable

from gpu_worker.policy.limits import Limits
from gpu_worker.policy.sequence import LIKELY_ONE, LIKELY_PRIOR, Sequence

WEIGHT_BITS = 4
DRIFT_BITS = 10


def decodes(seq: Sequence) -> bool:
    """Whether its next row is its newest token alone, behind a cell whose hidden row the head can start from."""
    return len(seq.tokens) - seq.computed == 1 and seq.computed > 0


def assign(running: Iterable[Sequence], limits: Limits) -> None:
    """Set what each may draft in the coming step, blocks not counted."""
    ready = []
    for seq in running:
        if decodes(seq):
            ready.append(seq)
        else:
            seq.draft = 0
    if ready:
        cost = limits.draft_cost[min(len(ready), len(limits.draft_cost)) - 1]
        most = rows_each(len(ready), limits)
        for seq in ready:
            seq.draft = _worthwhile(seq.likely, min(most, room(seq)), cost)


def rows_each(count: int, limits: Limits) -> int:
    """Drafts that each of `count` decodes may have at most."""
    return min(limits.draft_max, max(0, limits.draft_rows // count - 1)) if count else limits.draft_max


def room(seq: Sequence) -> int:
    """Drafts that its text has room for: none beyond the last token it may get, and none across the end of `min_tokens`, because
    the end tokens are banned for a whole row or not at all."""
    left = seq.remaining - 1
    if len(seq.tokens) < seq.min_len:
        left = min(left, seq.min_len - len(seq.tokens) - 1)
    return max(0, left)


def _worthwhile(likely: list[int], most: int, cost: int) -> int:
    """The number of drafts, up to `most`, that yields most tokens for what the step costs."""
    reach = tokens = LIKELY_ONE
    spent = 100
    for count in range(most):
        reach = reach * likely[count] // LIKELY_ONE
        if reach * spent < cost * tokens:
            return count
        tokens += reach
        spent += cost
    return most


def cut_to(seq: Sequence, num_blocks: int, block_size: int) -> None:
    """Drafts are the first thing given up: keep those that fit in `num_blocks` blocks."""
    seq.draft = max(0, min(seq.draft, num_blocks * block_size - len(seq.tokens)))


def share_rows(running: Iterable[Sequence], limits: Limits) -> None:
    """More came in since `assign`: they draft from the next step on, and the rows of this one are shared with them."""
    ready = [seq for seq in running if len(seq.tokens) - seq.computed == 1]
    most = rows_each(len(ready), limits)
    for seq in ready:
        seq.draft = min(seq.draft, most)


def learn(seq: Sequence, drafted: int, accepted: int) -> None:
    """What a decode says about the sequence's estimates."""
    likely = seq.likely
    for depth in range(len(likely)):
        if depth < accepted:
            likely[depth] += (LIKELY_ONE - likely[depth]) >> WEIGHT_BITS
        elif depth >= drafted:
            likely[depth] += (LIKELY_PRIOR - likely[depth]) >> DRIFT_BITS
        elif depth == accepted:
            likely[depth] -= likely[depth] >> WEIGHT_BITS
