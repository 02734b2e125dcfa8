"""The estimator of a park: what is measured, and what is chosen on it and why."""

import pytest
from msgspec.structs import replace

from gpu_worker.policy.events import Row
from gpu_worker.policy.limits import Limits
from gpu_worker.policy.park_cost import PREFILL_TOKENS, ParkCost
from wire.messages import Sampling

BLOCK = 1000  # bytes
LIMITS = Limits(num_blocks=1000, block_size=10, slots=8, max_context=10_000, park_mode="auto", block_bytes=BLOCK)


def row(start: int, count: int) -> Row:
    return Row("r", [], start, count, [], True, Sampling(), 1)


def measured(cell_s: float = 0.001, byte_s: float = 0.000001, **limits) -> ParkCost:
    """Cells of any depth take `cell_s` to compute, bytes `byte_s` to save and as long to load. A cell has 100 bytes."""
    cost = ParkCost(replace(LIMITS, **limits))
    for start in (0, 300, 600, 1200, 2500, 5000):
        cost.stepped([row(start, 100)], 100 * cell_s)
    cost.saved(1000, 1000 * byte_s)
    cost.loaded(1000, 1000 * byte_s)
    return cost


def choose(cost: ParkCost, cells: int = 1000, kind: str = "pressure"):
    return cost.choose(kind, cells, -(-cells // 10))


def told(cost: ParkCost, cells: int = 1000, kind: str = "pressure") -> tuple[str, str]:
    choice = choose(cost, cells, kind)
    return choice.mode, choice.reason


# what is measured -----------------------------------------------------------------------------------------------------
def test_before_anything_is_measured_it_saves():
    cost = ParkCost(LIMITS)
    assert told(cost) == ("save", "unmeasured")
    cost.saved(1000, 0.001)
    assert told(cost) == ("save", "unmeasured"), "nothing is known of computing"
    cost.stepped([row(0, 100)], 0.1)
    assert told(cost) == ("save", "cheaper"), "a load is taken to be like a save"


def test_what_takes_longer_is_not_done():
    assert told(measured(cell_s=0.001, byte_s=0.000004)) == ("save", "cheaper")  # 100 bytes each: .8 of a cell, out and in
    assert told(measured(cell_s=0.001, byte_s=0.000006)) == ("recompute", "copy_dearer")
    choice = choose(measured(cell_s=0.001, byte_s=0.000004))
    assert (choice.cells, choice.nbytes) == (1000, 100_000)
    assert choice.copy_s == pytest.approx(0.8) and choice.recompute_s == pytest.approx(1.0)


@pytest.mark.parametrize("which", ["saved", "loaded"])
def test_copies_that_become_slow_and_fast_again_are_followed(which):
    cost = measured(byte_s=0.000001)
    for _ in range(8):
        getattr(cost, which)(1000, 0.020)
    assert told(cost) == ("recompute", "copy_dearer")
    for _ in range(30):
        getattr(cost, which)(1000, 0.001)
    assert told(cost) == ("save", "cheaper")


def test_copies_count_by_their_bytes():
    cost = measured(byte_s=0.000001)
    cost.saved(10, 0.001)  # a tiny one, with all that it costs to begin
    assert told(cost) == ("save", "cheaper")


def test_what_was_not_measured_says_nothing():
    cost = measured()
    before = choose(cost)
    cost.saved(0, 0.0)
    cost.loaded(5000, 0.0)
    cost.stepped([row(0, PREFILL_TOKENS - 1)], 9.0)
    assert choose(cost) == before


def test_decodes_beside_a_prefill_are_not_its_cost():
    cost = ParkCost(LIMITS)
    cost.saved(1000, 0.001)
    cost.stepped([row(0, 100), row(50, 1)], 5.0)
    assert choose(cost).reason == "unmeasured", "what the decode took is not known yet"
    cost.stepped([row(50, 1), row(70, 1)], 0.5)
    cost.stepped([row(0, 100), row(51, 1), row(71, 1)], 0.6)
    assert choose(cost).recompute_s == pytest.approx(1.0)
    cost.stepped([row(0, 100), row(51, 1), row(71, 1)], 0.4)  # a quick one takes no negative time
    assert 0.0 < choose(cost).recompute_s < 1.0


def test_deep_cells_cost_what_deep_cells_took():
    cost = ParkCost(LIMITS)
    cost.saved(1000, 0.001)
    cost.stepped([row(0, 100)], 0.1)
    assert choose(cost, 4000).recompute_s == pytest.approx(4.0), "the nearest that was measured stands for the rest"
    cost.stepped([row(3000, 100)], 0.5)  # positions 2048 to 4095
    assert choose(cost, 1000).recompute_s == pytest.approx(1.0)
    assert choose(cost, 4096).recompute_s == pytest.approx(1024 * 0.001 + 3072 * 0.005)  # nearer to the deep ones from 1024 on


def test_a_chunk_says_something_of_the_depth_in_its_middle():
    cost = ParkCost(LIMITS)
    cost.saved(1000, 0.001)
    cost.stepped([row(0, 100)], 0.1)
    cost.stepped([row(0, 1000)], 2.0)  # position 500
    assert choose(cost, 256).recompute_s == pytest.approx(0.256)
    assert choose(cost, 512).recompute_s == pytest.approx(0.256 + 256 * 0.002)


def test_what_is_found_by_hash_is_neither_loaded_nor_computed():
    cost = measured()
    for cells in range(1000, 1100):
        cost.found("pressure", cells, cells * 9 // 10)
    choice = choose(cost)
    assert choice.recompute_s == pytest.approx(0.1, rel=0.01)
    assert choice.copy_s == pytest.approx(0.1 + 0.01, rel=0.01), "it is saved in full"
    assert choice.reason == "copy_dearer"
    assert choose(cost, kind="explicit").recompute_s == pytest.approx(1.0), "those find less, or more: it is known by kind"


def test_the_state_of_a_hybrid_is_worth_its_copy_only_for_a_long_text():
    def cost():
        return measured(cell_s=0.001, byte_s=0.000001, state_bytes=500_000, state_slots=2, reuse=False)

    assert told(cost(), 300) == ("recompute", "copy_dearer")  # a second for the state, .3 for the cells
    assert told(cost(), 3000) == ("save", "cheaper")


def test_the_state_is_loaded_whatever_is_found():
    cost = measured(state_bytes=500_000, state_slots=2, reuse=False)
    for _ in range(100):
        cost.found("pressure", 1000, 1000)
    assert choose(cost).copy_s == pytest.approx(0.6 + 0.5, rel=0.01)


def test_what_is_dear_is_tried_again_the_later_the_dearer_it_is():
    def parks_until_it_saves(byte_s: float) -> int:
        cost = measured(byte_s=byte_s)
        for count in range(1000):
            if told(cost)[0] == "save":
                return count
        raise AssertionError("never again")

    little, much = parks_until_it_saves(0.000006), parks_until_it_saves(0.00006)
    assert 0 < little < 20 and 10 * little < much < 300


# the budget -----------------------------------------------------------------------------------------------------------
def filled(share: float, budget_bytes: int = 10_000_000, **limits) -> ParkCost:
    cost = measured(**limits)
    cost.asked(1, 100_000)
    cost.answered(1, share, budget_bytes)
    return cost


def test_the_fill_is_the_last_answer_and_what_this_worker_did_since():
    cost = measured()
    assert cost.fill(500) == 0.0, "nothing is known of the budget"
    cost.asked(1, 100)
    cost.asked(2, 300)
    cost.answered(1, 0.5, 1000)
    assert cost.fill() == pytest.approx(0.8), "ask 2 is on its way"
    cost.released(200)
    assert (cost.fill(), cost.fill(400)) == (pytest.approx(0.6), pytest.approx(1.0))
    cost.answered(2, 0.8, 1000)  # the answer did not know of the release
    assert cost.fill() == pytest.approx(0.6)
    cost.asked(3, 100)
    cost.answered(3, 0.9, 1000)  # another worker has taken .2; the release is in it
    assert cost.fill() == pytest.approx(0.9)
    cost.asked(4, 100)
    cost.answered(4, 0.0, 0)  # a timeout, which says nothing
    assert cost.fill() == pytest.approx(0.9)
    cost.asked(5, 100)
    cost.lost()
    assert cost.fill() == 0.0


def test_below_half_the_budget_has_no_price():
    cost = filled(0.4)
    choice = choose(cost)
    assert (choice.reason, choice.price) == ("cheaper", 0.0)
    assert told(cost, 20, "explicit") == ("save", "cheaper")


def test_a_long_stay_is_dear_where_the_budget_is_nearly_full():
    cost = filled(0.8)
    for _ in range(4):
        cost.came_back("pressure", 2.0)
        assert told(cost) == ("save", "cheaper"), "equals are kept as long as there is room"
    assert told(cost, kind="explicit") == ("recompute", "budget_dear")
    for _ in range(20):
        cost.came_back("explicit", 0.5)
    assert told(cost, kind="explicit") == ("save", "cheaper")


def test_the_price_is_a_quarter_of_the_mean_worth_where_the_budget_is_full():
    cost = filled(0.89)
    for _ in range(30):
        choice = choose(cost, 10_000)  # 1 MB: .99 full with it
    assert choice.price == pytest.approx(0.25 * 0.98 * choice.worth) and choice.mode == "save"


def test_what_is_worth_little_gives_way_to_what_is_worth_much():
    """Deep cells take long to compute and as many bytes as others."""
    cost = ParkCost(LIMITS)
    cost.saved(1000, 0.000001)
    cost.stepped([row(0, 100)], 0.1)
    cost.stepped([row(5000, 100)], 2.0)
    cost.asked(1, 100_000)
    cost.answered(1, 0.9, 10_000_000)
    for _ in range(5):
        assert told(cost, 6000) == ("save", "cheaper")
    assert told(cost, 200) == ("recompute", "budget_dear")
    cost.released(9_000_000)
    assert told(cost, 200) == ("save", "cheaper"), "there is room again"
