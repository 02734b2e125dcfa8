"""Stories about explicit parks: who may be set aside, when that is answered, and how it ends."""

import pytest

from tests.router.scene import Scene
from wire.messages import Cancel, Finished, Hello, HoldAnswer, Notice, Park, PoolCells, Resume, Slot, Usage

W = b"cpu0-1-a"
NEXT = b"cpu0-2-b"


def parked(kind: str = "explicit") -> Notice:
    return Notice("r", "parked", kind, usage=Usage(3, 1, parks=1))


def resumed() -> Notice:
    return Notice("r", "resumed", "explicit", parked_ms=40, usage=Usage(3, 1, parks=1, parked_ms=40))


def answers(scene: Scene, client: bytes = b"cli") -> list[HoldAnswer]:
    return scene.heard(client, HoldAnswer)


def codes(scene: Scene, client: bytes = b"cli") -> list[tuple[int, str]]:
    return [(answer.ask, answer.code) for answer in answers(scene, client)]


@pytest.fixture
def scene() -> Scene:
    """One request that runs and has a seat."""
    scene = Scene()
    scene.hello()
    scene.ask("r")
    scene.tokens("r", 0, [7])
    scene.load()
    scene.heard(W)
    scene.heard(b"ann")
    return scene


# park -----------------------------------------------------------------------------------------------------------------
def test_a_park_is_answered_when_the_request_has_left_the_batch(scene):
    scene.client(b"cli", Park("r", ask=5))
    assert scene.heard(W) == [Park("r")]
    assert answers(scene) == []
    scene.worker(W, parked())
    assert answers(scene) == [HoldAnswer("r", slot=Slot(0, "r", "running", held=True), ask=5)]
    assert [m.event for m in scene.heard(b"ann")] == ["parked"]  # its owner hears of the pause, not of the question
    assert scene.ledger.parked == 1


def test_a_park_for_another_reason_does_as_well(scene):
    scene.client(b"cli", Park("r", ask=5))
    scene.worker(W, parked("pressure"))
    assert codes(scene) == [(5, "")]


@pytest.mark.parametrize("state", ["queued", "just sent", "parked"])
def test_what_is_not_in_the_batch_is_set_aside_at_once(state):
    scene = Scene()
    if state != "queued":
        scene.hello()
    scene.ask("r")
    if state == "parked":
        scene.worker(W, parked("pressure"))
    scene.client(b"cli", Park("r", ask=5))
    assert codes(scene) == [(5, "")]


def test_one_that_has_said_something_is_in_the_batch_though_no_list_shows_it():
    scene = Scene()
    scene.hello()
    scene.ask("r")
    scene.tokens("r", 0, [7])
    scene.client(b"cli", Park("r", ask=5))
    assert answers(scene) == []


def test_in_its_next_life_it_has_not_begun(scene):
    scene.lose_worker()
    scene.worker(NEXT, Hello("cpu0", 2, "m", "cpu", "f32", 2048, 16, 8, 2048, True))
    assert scene.submitted_ids(NEXT) == ["r"]
    scene.client(b"cli", Park("r", ask=5))
    assert codes(scene) == [(5, "")]


@pytest.mark.parametrize("state", ["resuming", "running"])
def test_one_that_is_coming_back_is_parked_once_it_has_come(scene, state):
    scene.worker(W, parked("pressure"))
    scene.load(slots=[Slot(0, "r", state)])  # running: its notice is on the way
    scene.client(b"cli", Park("r", ask=5))
    scene.worker(W, resumed())
    assert answers(scene) == []
    scene.worker(W, parked())
    assert codes(scene) == [(5, "")]


def test_what_cannot_be_parked_is_told_in_one_line(scene):
    scene.client(b"cli", Park("nobody", ask=1))
    assert answers(scene) == [HoldAnswer("nobody", "unknown_request", "no living request has this id", ask=1)]
    scene.client(b"cli", Park("r", ask=2))
    scene.client(b"cli", Park("r", ask=3))
    assert [(a.ask, a.code, a.message) for a in answers(scene)] == [(3, "conflict", "the request is set aside already")]
    scene.worker(W, parked())
    scene.client(b"cli", Park("r", ask=4))
    assert codes(scene) == [(2, ""), (4, "conflict")]
    scene.client(b"ann", Cancel("r"))
    scene.client(b"cli", Park("r", ask=5))
    assert [(a.code, a.message) for a in answers(scene)] == [("conflict", "the request is ending")]


@pytest.mark.parametrize("end", ["finished", "cancelled", "client lost"])
def test_a_request_that_ends_first_was_not_parked(scene, end):
    scene.client(b"cli", Park("r", ask=5))
    match end:
        case "finished":
            scene.finished("r", completion=1)
        case "cancelled":
            scene.client(b"ann", Cancel("r"))
            scene.finished("r", "cancelled", completion=1)
        case "client lost":
            scene.lose_client(b"ann")
    assert [(a.ask, a.code, a.message) for a in answers(scene)] == [
        (5, "conflict", "the request ended before it could be parked")
    ]
    scene.assert_empty()


def test_a_request_whose_end_waits_to_be_read_cannot_be_parked(scene):
    scene.tokens("r", 1, list(range(100_000, 140_000)))  # more than its client may be sent
    scene.client(b"cli", Park("r", deadline_s=60, ask=5))
    scene.finished("r", completion=40_001)
    assert [(a.ask, a.message) for a in answers(scene)] == [(5, "the request ended before it could be parked")]
    scene.client(b"cli", Park("r", ask=6))
    scene.client(b"cli", Resume("r", ask=7))
    assert [(a.ask, a.message) for a in answers(scene)] == [(6, "the request is ending"), (7, "the request is ending")]
    assert "r" in scene.ledger.requests


def test_our_own_park_for_want_of_credit_is_no_hold(scene):
    request = scene.ledger.requests["r"]
    request.credit_held = True
    scene.client(b"cli", Resume("r", ask=1))
    assert codes(scene) == [(1, "conflict")]
    scene.client(b"cli", Park("r", ask=2))
    scene.client(b"cli", Resume("r", ask=3))
    assert request.credit_held
    assert scene.heard(W) == [Park("r"), Resume("r")]


# resume ---------------------------------------------------------------------------------------------------------------
def test_a_resume_is_answered_at_once(scene):
    scene.client(b"cli", Park("r", ask=1))
    scene.worker(W, parked())
    scene.heard(b"cli")
    scene.heard(W)
    scene.client(b"bob", Resume("r", ask=2))
    assert answers(scene, b"bob") == [HoldAnswer("r", slot=Slot(0, "r", "running"), ask=2)]
    assert scene.heard(W) == [Resume("r")]
    scene.worker(W, resumed())
    assert scene.ledger.parked == 0


def test_only_what_was_set_aside_can_be_resumed(scene):
    scene.client(b"cli", Resume("nobody", ask=1))
    scene.client(b"cli", Resume("r", ask=2))
    scene.worker(W, parked("pressure"))
    scene.client(b"cli", Resume("r", ask=3))
    assert [(a.ask, a.code, a.message) for a in answers(scene)] == [
        (1, "unknown_request", "no living request has this id"),
        (2, "conflict", "the request is not set aside"),
        (3, "conflict", "the request is not set aside; it is parked and comes back by itself as soon as it fits"),
    ]
    assert scene.heard(W) == []


def test_a_resume_that_overtakes_the_park_ends_it(scene):
    scene.client(b"cli", Park("r", ask=1))
    scene.client(b"cli", Resume("r", ask=2))
    assert codes(scene) == [(1, "conflict"), (2, "")]
    scene.worker(W, parked())  # it was too late for the worker; it comes back by itself
    scene.worker(W, resumed())
    assert answers(scene) == []
    assert scene.heard(W) == [Park("r"), Resume("r")]


# deadlines ------------------------------------------------------------------------------------------------------------
def test_after_its_deadline_it_comes_back_by_itself(scene):
    scene.client(b"cli", Park("r", deadline_s=2.0))
    scene.worker(W, parked())
    scene.heard(W)
    scene.wait(1.75)
    assert scene.heard(W) == []
    scene.wait(0.25)
    assert scene.heard(W) == [Resume("r")]
    scene.wait(5)
    assert scene.heard(W) == []
    scene.client(b"cli", Resume("r", ask=9))
    assert codes(scene)[-1] == (9, "conflict")


def test_the_deadline_is_five_minutes_unless_told(scene):
    scene.client(b"cli", Park("r"))
    scene.worker(W, parked())
    scene.heard(W)
    scene.wait(299)
    assert scene.heard(W) == []
    scene.wait(2)
    assert scene.heard(W) == [Resume("r")]


def test_a_later_park_has_a_deadline_of_its_own(scene):
    for deadline_s in (2.0, 10.0):
        scene.client(b"cli", Park("r", deadline_s=deadline_s))
        scene.worker(W, parked())
        if deadline_s == 2.0:
            scene.client(b"cli", Resume("r"))
            scene.worker(W, resumed())
    scene.heard(W)
    scene.wait(9)
    assert scene.heard(W) == []


def test_a_park_that_its_worker_never_answers_ends_at_its_deadline(scene):
    scene.client(b"cli", Park("r", deadline_s=2.0, ask=5))
    scene.wait(3)
    assert codes(scene) == [(5, "conflict")]


# losses ---------------------------------------------------------------------------------------------------------------
def test_a_held_request_whose_worker_dies_stays_held(scene):
    scene.client(b"cli", Park("r", deadline_s=60.0, ask=1))
    scene.worker(W, parked())
    assert codes(scene) == [(1, "")]
    scene.lose_worker()
    scene.hello(NEXT)
    assert scene.submitted_ids(NEXT) == []
    assert scene.ledger.parked == 1
    scene.client(b"cli", Park("r", ask=2))
    assert codes(scene) == [(2, "conflict")]
    scene.client(b"cli", Resume("r", ask=3))
    assert answers(scene) == [HoldAnswer("r", slot=None, ask=3)]
    (submit,) = scene.submits(NEXT)
    assert submit.delivered == [7]
    assert [m.event for m in scene.heard(b"ann", Notice)] == ["parked", "resumed"]


def test_a_held_request_without_a_worker_comes_back_at_its_deadline(scene):
    scene.client(b"cli", Park("r", deadline_s=20.0))
    scene.worker(W, parked())
    scene.lose_worker()
    scene.hello(NEXT)
    scene.wait(19, alive=(NEXT,))
    assert scene.submitted_ids(NEXT) == []
    scene.wait(1, alive=(NEXT,))
    assert scene.submitted_ids(NEXT) == ["r"]


def test_a_worker_that_dies_before_it_has_parked_it_has_let_it_go(scene):
    scene.client(b"cli", Park("r", ask=1))
    scene.lose_worker()
    assert codes(scene) == [(1, "")]
    scene.hello(NEXT)
    assert scene.submitted_ids(NEXT) == []


def test_the_asker_may_vanish(scene):
    scene.client(b"cli", Park("r", ask=1))
    scene.lose_client(b"cli")
    scene.worker(W, parked())
    assert scene.ledger.requests["r"].held


# seats ----------------------------------------------------------------------------------------------------------------
def test_one_set_aside_takes_no_seat_wherever_it_is():
    scene = Scene()
    scene.hello(slots=1)
    scene.ask("runs")
    scene.load()
    scene.ask("waits", priority=-1)  # in the worker, for the seat of the other
    scene.ask("next", priority=-1)
    assert scene.submitted_ids() == ["runs", "waits"]
    scene.client(b"cli", Park("waits"))
    assert scene.submitted_ids() == ["next"]


def test_one_set_aside_in_the_queue_lets_the_others_pass_though_nobody_may_wait():
    scene = Scene(max_queued=0)
    scene.hello()
    scene.ask("r")
    scene.client(b"cli", Park("r"))
    scene.lose_worker()
    scene.hello(NEXT)
    scene.ask("new")
    assert scene.submitted_ids(NEXT) == ["new"]
    scene.client(b"cli", Resume("r"))
    assert scene.submitted_ids(NEXT) == ["r"]


def test_slots_show_the_hold_before_the_worker_does(scene):
    scene.load(slots=[Slot(0, "r", "parked", priority=3)])
    scene.worker(W, parked("pressure"))
    scene.client(b"cli", Park("r"))
    assert scene.ledger.fleet.slots() == [Slot(0, "r", "parked", priority=3, held=True)]
    scene.load(slots=[Slot(0, "r", "parked", priority=3, held=True)])
    scene.client(b"cli", Resume("r"))
    assert scene.ledger.fleet.slots() == [Slot(0, "r", "parked", priority=3)]


def test_answers_name_seats_as_the_list_of_all_workers_does():
    scene = Scene()
    scene.hello(b"cpu0-1-a")
    scene.hello(b"cpu1-1-a")
    scene.load(b"cpu0-1-a", cells=PoolCells(free=10))
    scene.ask("r")
    scene.load(b"cpu1-1-a", slots=[Slot(2, "r", "running")])
    scene.tokens("r", 0, [7], b"cpu1-1-a")
    scene.client(b"cli", Park("r"))
    scene.worker(b"cpu1-1-a", parked())
    assert [answer.slot.id for answer in answers(scene)] == [5]


# the end --------------------------------------------------------------------------------------------------------------
def test_a_drain_brings_everybody_back_and_sets_nobody_aside(scene):
    scene.client(b"cli", Park("r"))
    scene.worker(W, parked())
    scene.heard(W)
    scene.heard(b"cli")
    scene.drain(30)
    assert scene.heard(W) == [Resume("r")]
    scene.client(b"cli", Park("r", ask=2))
    assert [(a.code, a.message) for a in answers(scene)] == [("conflict", "the server is stopping")]
    scene.finished("r", completion=1)
    assert [m.reason for m in scene.heard(b"ann", Finished)] == ["length"]
    scene.assert_empty()
