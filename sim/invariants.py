"""What must be true after every event, whatever happened."""

from collections import Counter

from gpu_worker.policy import preemption
from gpu_worker.policy.events import Plan
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
        states[seq.state] += 1
        if seq.blocks:
            refs.update(seq.blocks)
            assert len(set(seq.blocks)) == len(seq.blocks), f"{request_id} has a block twice"
        assert seq.computed < len(seq.tokens), f"{request_id} has computed what is not there"
        assert seq.pressure_parks <= preemption.EXHAUSTED_AFTER, f"{request_id} was parked by pressure {seq.pressure_parks} times"
        assert seq.draft == 0 or seq.state is State.RUNNING, f"{request_id} is {seq.state.value} and keeps drafts"
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
    check_states(scheduler)


def check_states(scheduler: Scheduler) -> None:
    """Each sequence on the device has a state slot of its own, and no other sequence has one."""
    state_slots = scheduler.limits.state_slots
    taken: dict[int, str] = {}
    for request_id, seq in scheduler.sequences.items():
        if state_slots is None or seq.state in (State.WAITING, State.PARKED):
            assert seq.state_slot == -1, f"{request_id} is {seq.state.value} and holds state slot {seq.state_slot}"
            continue
        assert 0 <= seq.state_slot < state_slots, f"{request_id} is {seq.state.value} in state slot {seq.state_slot}"
        assert seq.state_slot not in taken, f"{request_id} and {taken[seq.state_slot]} share a state slot"
        taken[seq.state_slot] = request_id


def check_plan(scheduler: Scheduler, plan: Plan) -> None:
    """AssertionError when a plan leaves somebody out of its step, or feeds too much. Who is parked or let in: watch.py."""
    book = scheduler.book
    fed = {row.request_id for row in plan.rows}
    assert len(fed) == len(plan.rows), "a sequence has two rows"
    check_rows(scheduler, plan)
    for seq in book.running.values():
        if len(seq.tokens) - seq.computed == 1 and seq.request_id not in fed:
            assert not book.pool.available, f"{seq.request_id} has one token to feed, and room, and is left out"
        if preemption.exhausted(seq):
            assert not book.resuming and len(book.running) == 1, f"{seq.request_id} is exhausted and not alone"


def check_rows(scheduler: Scheduler, plan: Plan) -> None:
    """AssertionError if a step feeds more than it may, or drafts where nothing could come of it."""
    limits = scheduler.limits
    total = sum(row.count + row.draft for row in plan.rows)
    assert total <= limits.step_budget, f"the step feeds {total} tokens"
    decodes = [row for row in plan.rows if row.count == 1 and row.samples]
    if any(row.draft for row in decodes):
        with_drafts = sum(1 + row.draft for row in decodes)
        assert with_drafts <= limits.draft_rows, f"decodes and drafts are {with_drafts} rows"
    for row in plan.rows:
        seq = scheduler.sequences[row.request_id]
        assert row.state_slot == seq.state_slot, f"{row.request_id} runs on the state of another"
        end = len(row.tokens) + row.draft
        if row.draft:
            assert row.draft <= limits.draft_max and end < seq.end_len, f"{row.request_id} drafts beyond its last token"
            assert not row.banned or end < seq.min_len, f"{row.request_id} drafts across the end of min_tokens"


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
