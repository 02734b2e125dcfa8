"""Who is parked, who comes back, who is let in: each rule one small pure function with its source named.

Sources: *watermark* and *recompute* are two published designs for llama.cpp's server, "park unified requests with proactive KV
watermarks" and "KV preemption by recompute"; *simulator* is a livelock or a starvation that random schedules reproduced before
the rule was there.
"""

from collections.abc import Callable, Iterable

from gpu_worker.policy.limits import Limits
from gpu_worker.policy.policies import Policy
from gpu_worker.policy.pool import KvPool, Leaving
from gpu_worker.policy.sequence import Sequence, State

EXHAUSTED_AFTER = 16  # pressure parks, and then it runs alone
PROMOTED_EACH_PARKS = 3
PROMOTED_EACH_S = 30.0  # of waiting or being parked
PASSED_AT_ONCE = 8  # parked ones, in one look at who may come in: or a plan would cost more the more are parked
STALLED_AFTER = 32  # times that a recompute began or was fed again without a new token: more than pressure can cause

ClassOf = Callable[[Sequence], int]


# classes ---------------------------------------------------------------------------------------------------------------
def class_of(seq: Sequence, top: int, now: float) -> int:
    """The class it counts as; lower is more important. Every third pressure park and every 30 s of waiting promote it by one, or
    a low class would starve; never above `top`, the best class present: equal requests stay equal. Source: simulator."""
    if seq.priority <= top:
        return seq.priority
    promotions = seq.pressure_parks // PROMOTED_EACH_PARKS + seq.promoted + promotions_by_waiting(seq, now)
    return max(top, seq.priority - promotions)


def promotions_by_waiting(seq: Sequence, now: float) -> int:
    """Classes gained since it could come in but for the others; a held one gains none, or a client could promote itself.
    Source: simulator."""
    if seq.held or seq.state not in (State.WAITING, State.PARKED):
        return 0
    return int(max(0.0, now - seq.wants_since) // PROMOTED_EACH_S)


def exhausted(seq: Sequence) -> bool:
    """Pressure may not park it again. It comes back when nobody else is on the device, and nobody joins it: two sequences that
    may not be parked could fill the pool and wait for each other. Source: simulator."""
    return seq.pressure_parks >= EXHAUSTED_AFTER


def aged(seq: Sequence, max_park_s: float, now: float) -> bool:
    """It has waited to come back for so long that it is the next, whatever its class. Source: the longest waits of both pages'
    order."""
    return 0 < max_park_s <= now - seq.wants_since and not seq.held


def stalled(seq: Sequence) -> bool:
    """Its recompute makes no progress and is ended: it was begun or fed again so often without a new token. What pressure can do
    is bounded below that; parks by an operator do not count. Source: recompute page (a resume that never gets its cells)."""
    return seq.restarts > STALLED_AFTER


# parking ---------------------------------------------------------------------------------------------------------------
def growth(sequences: Iterable[Sequence], pool: KvPool, steps: int = 1) -> int:
    """Blocks that their next `steps` decodes need and they do not have, the drafts of the first included; none beyond a last
    token. A prefill's blocks are its own already. Source: watermark (the next step), recompute (some steps ahead)."""
    size, total = pool.block_size, 0
    for seq in sequences:
        known = len(seq.tokens)
        ahead = max(seq.draft, min(steps, seq.end_len - known) - 1) - (len(seq.blocks) * size - known)
        if ahead > 0:
            total += -(-ahead // size)
    return total


def missing(seq: Sequence, pool: KvPool, steps: int = 1) -> int:
    """The same of one."""
    return growth((seq,), pool, steps)


def protected(running: Iterable[Sequence], class_of: ClassOf) -> Sequence | None:
    """Never parked by pressure: the one with most tokens in the best class, the oldest of equals. Something always progresses.
    A held sequence does not count, it may not run. Sources: both pages; classes: simulator."""
    return min(
        (seq for seq in running if not seq.held), key=lambda seq: (class_of(seq), -len(seq.tokens), seq.arrival), default=None
    )


def victims(running: Iterable[Sequence], class_of: ClassOf, policy: Policy, protect_after: int) -> list[Sequence]:
    """Who may be parked by pressure, best victim first: held, worst class, not replaying, parked less often than `protect_after`,
    then newest by original arrival or smallest. One still in its prompt may be a victim. Sources: watermark (newest), recompute
    (smallest, and the rest)."""
    candidates = [seq for seq in running if not exhausted(seq)]
    return sorted(
        candidates,
        key=lambda seq: (
            not seq.held,
            -class_of(seq),
            seq.replaying,
            seq.pressure_parks >= protect_after,
            0 if policy.newest_first else len(seq.tokens),
            -seq.arrival,
        ),
    )


def enough(candidates: Iterable[Sequence], over: int, leaving: Leaving, steps: int, seats: int = 0) -> tuple[list[Sequence], int]:
    """The first of the candidates that free `over` blocks together, their growth in `steps` counted, and `seats` seats; or all
    that free any. Then without those that a later, larger one has made needless. `leaving` knows who leaves already. Also
    returns the blocks still missing. Sources: bug reports of neighbours (more parked than needed); simulator (shared blocks)."""
    pool = leaving.pool
    chosen: list[Sequence] = []
    for seq in candidates:
        if over <= 0 and len(chosen) >= seats:
            break
        over -= leaving.add(seq.blocks) + missing(seq, pool, steps)
        chosen.append(seq)
    for seq in reversed(chosen[:]):  # needless: without it there is still enough, or as much missing
        lost = leaving.remove(seq.blocks) + missing(seq, pool, steps)
        if over + lost <= max(0, over) and len(chosen) > seats:
            chosen.remove(seq)
            over += lost
        else:
            leaving.add(seq.blocks)
    return chosen, over


def displaced_by(candidate: Sequence, running: Iterable[Sequence], class_of: ClassOf) -> list[Sequence]:
    """Who may be parked so that this one can come in: those of a worse class, as submitted and as promoted, so that equals never
    take turns; not who would be promoted to its class by that very park, and come back before it. Not for one that is exhausted,
    which needs the device alone. Source: simulator."""
    worse = [seq for seq in running if seq.priority > candidate.priority]
    if not worse or exhausted(candidate):
        return []
    number = class_of(candidate)
    return [seq for seq in worse if class_of(seq) - promoted_by_next_park(seq) > number]


def promoted_by_next_park(seq: Sequence) -> bool:
    """Whether one more pressure park gains it a class."""
    return (seq.pressure_parks + 1) % PROMOTED_EACH_PARKS == 0


# coming in -------------------------------------------------------------------------------------------------------------
def claim_cells(seq: Sequence, limits: Limits) -> int:
    """Cells it claims at once when it comes in: all it knows, the next token and the drafts. A resuming recompute is charged its
    whole replay, or the next one would be promised the same cells. Sources: watermark, recompute."""
    return min(len(seq.tokens) + 1 + limits.draft_max, limits.sequence_cells)


def entry_cells(seq: Sequence, limits: Limits, steps: int) -> int:
    """Cells there must be room for when it comes in: what it claims, and what its first `steps` will take. Source: simulator (or
    its own growth would park it)."""
    return max(claim_cells(seq, limits), len(seq.tokens) + min(steps, seq.remaining) - 1)


def entry_terms(seq: Sequence, policy: Policy) -> tuple[int, int]:
    """(steps, line): it comes in if with the growth of that many steps no more blocks than that are used. After a forced park as
    soon as nobody would be parked for it. Source: watermark."""
    if seq.state is State.PARKED and seq.kind == "forced":
        return policy.park_ahead, policy.park_line
    return policy.enter_ahead, policy.enter_line


def findable(seq: Sequence, limits: Limits) -> int:
    """Full blocks it may take over instead of computing: one token is left to feed, for its logits; and no prompt position whose
    log probability is still wanted is skipped."""
    cells = len(seq.tokens) - 1
    if seq.prompt_logprobs is not None and seq.scored < seq.prompt_len - 1:
        cells = min(cells, seq.scored)
    return cells // limits.block_size if limits.reuse else 0


def resume_order(parked: Iterable[Sequence], class_of: ClassOf, order: str, max_park_s: float, now: float) -> list[Sequence]:
    """Those that may come back. First who has waited too long, then by class; in a class the one most often parked by pressure,
    then the longest parked, or with `head` strictly by the time of the park. Sources: both pages; head: a neighbour's
    simulation."""
    most_parked = order == "most-parked"
    return sorted(
        (seq for seq in parked if not seq.held),
        key=lambda seq: (
            (0, 0, 0, seq.wants_since, seq.arrival)
            if aged(seq, max_park_s, now)
            else (1, class_of(seq), -seq.pressure_parks if most_parked else 0, seq.wants_since, seq.arrival)
        ),
    )


def closes_admission(seq: Sequence, candidate_class: int, class_of: ClassOf) -> bool:
    """Parked before waiting: nobody of the same or a lower class is let in while this parked one could come back. A held one
    could not. Source: simulator."""
    return not seq.held and class_of(seq) <= candidate_class
