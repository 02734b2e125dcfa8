"""The simulated router: seats by class, order, promotion by waiting; the same rules as the real one's."""

from math import inf

from gpu_worker.policy.preemption import PROMOTED_EACH_S
from router import queue
from sim.dispatch import Dispatch, Live
from sim.trace import Request


def arrived(dispatch: Dispatch, name: str, priority: int = 0, at_s: float = 0.0) -> Live:
    live = Live(Request(name, 1, 1, priority=priority), ord(name), at_s, ())
    dispatch.add(live)
    return live


def sent(dispatch: Dispatch, now: float = 0.0) -> str:
    """Names of all that are sent now."""
    names = ""
    while (live := dispatch.next(now)) is not None:
        names += live.request.id
    return names


def test_as_many_are_sent_as_have_seats_in_the_order_of_arrival():
    dispatch = Dispatch(2, 0)
    lives = [arrived(dispatch, name) for name in "abcd"]
    assert (sent(dispatch), dispatch.waiting, dispatch.full) == ("ab", 2, True)
    dispatch.ended(lives[0])
    assert not dispatch.full
    assert sent(dispatch) == "c"


def test_a_parked_one_takes_no_seat():
    dispatch = Dispatch(1, 0)
    first, second = arrived(dispatch, "a"), arrived(dispatch, "b")
    assert sent(dispatch) == "a"
    dispatch.parked(first)
    assert sent(dispatch) == "b"
    dispatch.runs_again(first)
    dispatch.ended(second)
    assert dispatch.full
    dispatch.parked(first)
    dispatch.ended(first)  # parked or not, its seat is gone once
    arrived(dispatch, "c")
    arrived(dispatch, "d")
    assert sent(dispatch) == "c"


def test_worse_classes_take_no_seat_of_a_better_one():
    dispatch = Dispatch(1, -5)
    arrived(dispatch, "a", priority=3)
    assert sent(dispatch) == "a"
    arrived(dispatch, "b", priority=3)
    arrived(dispatch, "c", priority=-5)
    assert (dispatch.full, sent(dispatch), dispatch.full) == (False, "c", True)
    assert dispatch.waiting == 1


def test_waiting_promotes_up_to_the_best_class_that_is_there():
    assert PROMOTED_EACH_S == queue.PROMOTED_EACH_S
    dispatch = Dispatch(1, 0)
    arrived(dispatch, "a")
    assert sent(dispatch) == "a"
    low = arrived(dispatch, "b", priority=2)
    top = arrived(dispatch, "c", priority=0, at_s=50.0)
    assert dispatch.wait_s(50.0) == 10.0
    assert sent(dispatch, 61.0) == ""
    running = Live(Request("a", 1, 1), 0, 0.0, (), rank=0)
    dispatch.ended(running)
    assert sent(dispatch, 61.0) == "b", "two classes better by now, and older"
    assert low.rank == 0
    dispatch.ended(low)
    assert sent(dispatch, 61.0) == "c"
    assert top.rank == 0


def test_with_one_class_nobody_is_promoted():
    dispatch = Dispatch(1, 0)
    arrived(dispatch, "a", priority=4)
    arrived(dispatch, "b", priority=4)
    assert sent(dispatch) == "a"
    assert dispatch.wait_s(7.0) == inf
