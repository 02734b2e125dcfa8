"""Who is parked, who comes back, who is let in: each rule one small pure function with its source named.

Sources: *watermark* and *recompute* are the two pages this project was asked to build; *simulator* is a livelock or a starvation
that random schedules reproduced before the rule was there.
"""

from collections.abc import Callable, Iterable

from gpu_worker.policy.limits import Limits
from gpu_worker.policy.pool import KvPool
from gpu_worker.policy.sequence import Sequence, State

PASSED_OVER_AFTER = 3  # pressure parks; recompute page: PREEMPT_N_STARVED
EXHAUSTED_AFTER = 16  # pressure parks, and then it runs alone
PROMOTED_EACH_PARKS = 3
PROMOTED_EACH_S = 30.0  # of waiting or being parked

ClassOf = Callable[[Sequence], int]


# classes ---------------------------------------------------------------------------------------------------------------
def class_of(seq: Sequence, top: int, now: float) -> int:
    """The class it counts as; lower is more important. Every third pressure park and every 30 s of waiting promote it by one, or
    a low class would starve; never above `top`, the best class present: equal requests stay equal. Source: simulator."""
    promotions = seq.pressure_parks // PROMOTED_EACH_PARKS + seq.promoted + promotions_by_waiting(seq, now)
    return max(min(top, seq.priority), seq.priority - promotions)


def promotions_by_waiting(seq: Sequence, now: float) -> int:
    """Classes gained since it could come in but for the others; a held one gains none, or a client could promote itself."""
    if seq.held or seq.state not in (State.WAITING, State.PARKED):
        return 0
    return int(max(0.0, now - seq.wants_since) // PROMOTED_EACH_S)


def exhausted(seq: Sequence) -> bool:
    """Pressure may not park it again. It comes back when nobody else is on the device, and nobody joins it: two sequences that
    may not be parked could fill the pool and wait for each other. Source: simulator."""
    return seq.pressure_parks >= EXHAUSTED_AFTER


# parking ---------------------------------------------------------------------------------------------------------------
def shortfall(pool: KvPool, demand: int, parking: Iterable[Sequence], high_blocks: int) -> int:
    """Blocks to win back so that the next step ends at or below HIGH. What the parks under way will free is counted, so that no
    more victims are parked than are needed. Sources: watermark; bug reports of neighbours."""
    over = pool.used + demand - high_blocks
    return over - sum(pool.exclusive(seq.blocks) for seq in parking) if over > 0 else 0


def protected(running: Iterable[Sequence], class_of: ClassOf) -> Sequence | None:
    """Never parked by pressure: the one with most tokens in the best class, the oldest of equals. Something always progresses.
    A held sequence does not count, it may not run. Sources: both pages; classes: simulator."""
    return min(
        (seq for seq in running if not seq.held), key=lambda seq: (class_of(seq), -len(seq.tokens), seq.arrival), default=None
    )


def victims(running: Iterable[Sequence], keep: Sequence | None, class_of: ClassOf) -> list[Sequence]:
    """Who may be parked by pressure, best victim first: held, worst class, not replaying, parked less than 3 times, newest by
    original arrival. One still in its prompt may be a victim. Sources: watermark (newest), recompute (the rest)."""
    candidates = [seq for seq in running if seq is not keep and not exhausted(seq)]
    return sorted(
        candidates,
        key=lambda seq: (not seq.held, -class_of(seq), seq.replaying, seq.pressure_parks >= PASSED_OVER_AFTER, -seq.arrival),
    )


def gain(seq: Sequence, pool: KvPool) -> int:
    """Blocks that parking it wins: those only it holds, and those its next step would have taken. Source: simulator."""
    return pool.exclusive(seq.blocks) + missing(seq, pool)


def missing(seq: Sequence, pool: KvPool) -> int:
    """Blocks that its next step needs and it does not have: next token and drafts; a prefill's blocks are its own already."""
    return max(0, pool.blocks_for(len(seq.tokens) + seq.draft) - len(seq.blocks))


# coming in -------------------------------------------------------------------------------------------------------------
def claim_cells(seq: Sequence, limits: Limits) -> int:
    """Cells it claims at once when it comes in: all it knows, the next token and the drafts. A resuming recompute is charged its
    whole replay, or the next one would be promised the same cells. Sources: watermark, recompute."""
    return min(len(seq.tokens) + 1 + limits.draft_max, limits.sequence_cells)


def findable(seq: Sequence, limits: Limits) -> int:
    """Full blocks it may take over instead of computing: one token is left to feed, for its logits; and no prompt position whose
    log probability is still wanted is skipped."""
    cells = len(seq.tokens) - 1
    if seq.prompt_logprobs is not None and seq.scored < seq.prompt_len - 1:
        cells = min(cells, seq.scored)
    return cells // limits.block_size if limits.reuse else 0


def resume_order(parked: Iterable[Sequence], class_of: ClassOf, order: str) -> list[Sequence]:
    """Those that may come back, first the one most often parked by pressure, then the longest parked; `head`: strictly by the
    time of the park. A held one does not come back. Sources: both pages; head: a neighbour's simulation."""
    eligible = [seq for seq in parked if not seq.held]
    if order == "head":
        return sorted(eligible, key=lambda seq: (class_of(seq), seq.wants_since, seq.arrival))
    return sorted(eligible, key=lambda seq: (class_of(seq), -seq.pressure_parks, seq.wants_since, seq.arrival))


def resume_line(seq: Sequence, limits: Limits) -> int:
    """Used blocks up to which it comes back: LOW; after a forced park as soon as it fits, which is HIGH. Source: watermark."""
    return limits.high_blocks if seq.kind == "forced" else limits.low_blocks


def admission_line(limits: Limits) -> int:
    """Used blocks up to which waiting ones come in: LOW as well. Up to HIGH, nearly each admission was a park at once."""
    return limits.low_blocks


def closes_admission(seq: Sequence, candidate_class: int, class_of: ClassOf) -> bool:
    """Parked before waiting: nobody of the same or a lower class is let in while this parked one could come back. A held one
    could not. Source: simulator."""
    return not seq.held and class_of(seq) <= candidate_class
