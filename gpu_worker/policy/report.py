"""What the worker tells about itself: cells by holder, a line for each seat, totals. Made on demand, from the book alone."""

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from gpu_worker.policy.book import Book
from gpu_worker.policy.sequence import Sequence, State, usage_of
from wire.messages import Counters, PoolCells, Slot


class SchedulerLoad(Struct, frozen=True):
    """`running` counts all that hold a slot (running, resuming), `parked` those off the batch (parking, parked)."""

    cells: PoolCells
    waiting: int
    running: int
    parked: int
    slots: list[Slot]
    counters: Counters


class Totals(Struct):
    """What only the scheduler can count."""

    steps: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    drafted: list[int] = []  # by position: the first draft behind a sequence's newest token, the second, ...
    accepted: list[int] = []


def load_of(book: Book, totals: Totals, now: float) -> SchedulerLoad:
    """`now`: the time of the last event, for the pauses under way."""
    return SchedulerLoad(
        cells=cells_of(book),
        waiting=len(book.waiting),
        running=len(book.running) + len(book.resuming),
        parked=len(book.parking) + len(book.parked),
        slots=slots_of(book, now),
        counters=Counters(
            preempt={kind: book.preempted[kind] for kind in ("pressure", "forced", "explicit")},
            resumed=book.resumed,
            recomputed_tokens=totals.recomputed_tokens,
            denied=dict(book.denied),
            parks=dict(book.parks),
            stalled=book.stalled,
            steps=totals.steps,
            prefill_tokens=totals.prefill_tokens,
            drafted=list(totals.drafted),
            accepted=list(totals.accepted),
        ),
    )


def cells_of(book: Book) -> PoolCells:
    """The five add up to the pool. A block that a running sequence shares with a parking one is active."""
    size = book.limits.block_size
    parking = _only_held_by(book, book.parking.values())
    leaving_or_coming = _only_held_by(book, [*book.parking.values(), *book.resuming.values()])
    return PoolCells(
        active=(book.pool.used - leaving_or_coming) * size,
        reusable=book.pool.reusable * size,
        parking=parking * size,
        resuming=(leaving_or_coming - parking) * size,
        free=book.pool.free * size,
    )


def _only_held_by(book: Book, sequences: Iterable[Sequence]) -> int:
    """Blocks, each counted once, to which these sequences have all the references."""
    held = Counter(block for seq in sequences for block in seq.blocks)
    return sum(1 for block, refs in held.items() if book.pool.refs(block) == refs)


def slots_of(book: Book, now: float) -> list[Slot]:
    """A line for each seat below `slots`, idle ones too, and for each higher one that is taken: parked sequences keep theirs, so
    there can be more than `slots`. Waiting sequences have no seat yet and no line."""
    seated = {}
    for by_state in (book.running, book.parking, book.parked, book.resuming):
        for seq in by_state.values():
            seated[seq.seat] = _slot(seq, now)
    idle = (Slot(seat) for seat in range(book.limits.slots) if seat not in seated)
    return sorted([*seated.values(), *idle], key=lambda slot: slot.id)


def _slot(seq: Sequence, now: float) -> Slot:
    usage = usage_of(seq, now)
    return Slot(
        id=seq.seat,
        request_id=seq.request_id,
        state=seq.state.value,
        n_tokens=len(seq.tokens),
        is_preempted=seq.state is not State.RUNNING,
        n_preempt=usage.parks,
        n_recompute=usage.recomputed_tokens,
        parked_ms=usage.parked_ms,
        drafted=seq.drafted,
        accepted=seq.accepted,
        priority=seq.priority,
        held="explicit" in seq.held,
    )
