"""What the simulator must not import from the worker, and so repeats, is the same."""

from gpu_worker import __main__ as start
from gpu_worker import worker
from gpu_worker.device import copies
from sim import copying
from sim.costs import load_costs
from sim.engine import limits_of


def test_the_loop_copies_as_much_at_a_time_as_the_workers():
    ours = (copying.COPY_BYTES_PER_STEP, copying.COPY_BYTES_IDLE, copying.PIECE_BYTES)
    assert ours == (worker.COPY_BYTES_PER_STEP, worker.COPY_BYTES_IDLE, copies.PIECE_BYTES)


def test_a_hybrid_has_as_many_state_slots_and_a_block_as_many_cells():
    card = load_costs("card")
    assert card.state_bytes > 0
    assert limits_of(card, ctx=1024, slots=5).state_slots == 5 + start.PARKING_SLOTS
    assert card.block_size == load_costs("cpu").block_size == start.BLOCK_SIZE
