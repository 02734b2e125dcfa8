"""What must be true after every event, whatever happened."""

from collections import Counter

from gpu_worker.policy import preemption
from gpu_worker.policy.scheduler import Scheduler
from gpu_worker.policy.sequence import State
from sim.hostcache import HostCache


def check(scheduler: Scheduler, cache: HostCache) -> None:
    """AssertionError that says which law is broken. Walks everything: for simulation and tests."""
    book = scheduler.book
    pool = book.pool
    pool.check()
    refs: Counter[int] = Counter()
    seats: set[int] = set()
    states: Counter[State] = Counter()
    for request_id, seq in scheduler.sequences.items():
        refs.update(seq.blocks)
        states[seq.state] += 1
        assert len(set(seq.blocks)) == len(seq.blocks), f"{request_id} has a block twice"
        assert seq.computed < len(seq.tokens), f"{request_id} has computed what is not there"
        assert seq.pressure_parks <= preemption.EXHAUSTED_AFTER, f"{request_id} was parked by pressure {seq.pressure_parks} times"
        if seq.state in (State.WAITING, State.PARKED):
            assert not seq.blocks, f"{request_id} is {seq.state.value} and holds blocks"
            assert not seq.copying, f"{request_id} is {seq.state.value} and is copied"
        else:
            assert seq.computed <= len(seq.blocks) * pool.block_size, f"{request_id} has cells outside its blocks"
        if seq.seat >= 0:
            assert seq.seat not in seats, f"seat {seq.seat} is taken twice"
            seats.add(seq.seat)
    for block in range(pool.num_blocks):
        assert pool.refs(block) == refs[block], f"block {block} has {pool.refs(block)} references and {refs[block]} holders"
    assert pool.free + pool.reusable + len(refs) == pool.num_blocks, "free + reusable + owned is not the pool"
    for state, members in ((State.RUNNING, book.running), (State.PARKING, book.parking), (State.PARKED, book.parked)):
        assert states[state] == len(members), f"the book of {state.value} is wrong"
    assert states[State.RESUMING] == len(book.resuming), "the book of resuming is wrong"
    assert states[State.WAITING] == len(book.waiting), "the book of waiting is wrong"
    assert states[State.RUNNING] + states[State.RESUMING] <= scheduler.limits.slots, "more run than there are slots"
    assert cache.used_bytes <= cache.budget_bytes, "the host cache is over its budget"


def check_report(scheduler: Scheduler) -> None:
    """What the worker says about itself adds up."""
    load = scheduler.load()
    cells = load.cells
    total = cells.active + cells.reusable + cells.parking + cells.resuming + cells.free
    assert total == scheduler.limits.pool_cells, f"the cells add up to {total}"
    assert min(cells.active, cells.reusable, cells.parking, cells.resuming, cells.free) >= 0, f"negative cells: {cells}"
    assert load.waiting + load.running + load.parked == len(scheduler.sequences), "the counts do not add up"
    ids = [slot.id for slot in load.slots]
    assert len(set(ids)) == len(ids) and set(range(scheduler.limits.slots)) <= set(ids), f"seats are missing or doubled: {ids}"
