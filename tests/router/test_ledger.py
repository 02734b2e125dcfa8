"""Stories about the ledger: a request, the queue, many workers, a bad request, the end."""

import math

import pytest

from tests.router.scene import SEED, Scene
from wire.codec import Decoder, ProtocolError, pack
from wire.messages import (
    Accepted,
    Cancel,
    ClientToRouter,
    Finished,
    Generate,
    Hello,
    Logprob,
    Notice,
    Park,
    PoolCells,
    Rejected,
    Resume,
    Sampling,
    Submit,
    Tokens,
    Usage,
)

W = b"cpu0-1-a"


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.hello()
    return scene


# one request ----------------------------------------------------------------------------------------------------------
def test_a_request_is_accepted_submitted_streamed_and_finished(scene):
    accepted, submit = scene.ask("r")
    assert accepted == Accepted("r", SEED)
    assert isinstance(submit, Submit) and submit.generate.request_id == "r" and submit.delivered == []
    scene.tokens("r", 0, [7])
    scene.tokens("r", 1, [8, 9])
    assert scene.delivered(b"ann", "r") == [7, 8, 9]
    scene.finished("r", "stop", completion=3)
    assert scene.heard(b"ann") == [Finished("r", "stop", Usage(3, 3))]
    scene.assert_empty()


def test_a_missing_seed_is_drawn_once_and_kept_through_a_replay():
    scene = Scene()
    scene.hello()
    accepted, submit = scene.client(b"ann", Generate("r", [1]))
    assert accepted.seed == submit.generate.sampling.seed == SEED
    scene.lose_worker()
    scene.hello(b"cpu0-2-b")
    assert scene.submits(b"cpu0-2-b")[0].generate.sampling.seed == SEED


def test_tokens_that_are_known_already_are_cut(scene):
    scene.ask("r")
    scene.tokens("r", 0, [1, 2, 3])
    scene.tokens("r", 0, [1, 2])
    scene.tokens("r", 2, [3, 4])
    assert scene.delivered(b"ann", "r") == [1, 2, 3, 4]
    assert scene.ledger.totals.tokens_generated == 4


def test_a_gap_makes_the_ledger_start_the_request_again_from_what_it_has(scene):
    scene.ask("r")
    scene.tokens("r", 0, [1])
    scene.heard(W)
    scene.tokens("r", 5, [6])
    assert scene.heard(W) == [Cancel("r")]  # and not submitted before the worker has let go of it
    scene.tokens("r", 1, [99])
    assert scene.delivered(b"ann", "r") == [1]
    scene.finished("r", "cancelled", completion=6)
    assert scene.submits()[0].delivered == [1]
    assert scene.heard(b"ann") == []


def test_a_last_word_that_tells_of_tokens_we_never_got_is_no_last_word(scene):
    scene.ask("r")
    scene.tokens("r", 0, [1])
    scene.heard(W)
    scene.finished("r", "stop", completion=2)
    assert scene.heard(b"ann", Finished) == []
    assert scene.submits()[0].delivered == [1]


def test_a_worker_that_gives_up_a_stream_by_itself_gets_it_again(scene):
    """It heard nothing from us for long, and took us for gone."""
    scene.ask("r")
    scene.tokens("r", 0, [1])
    scene.heard(W)
    scene.finished("r", "cancelled", completion=1)
    assert scene.submits()[0].delivered == [1]
    assert scene.heard(b"ann", Finished) == []


def test_notices_go_to_the_client_and_count_the_parked(scene):
    scene.ask("r")
    scene.heard(b"ann")
    scene.worker(W, Notice("r", "parked", usage=Usage(3, 0, parks=1)))
    assert scene.ledger.parked == 1
    scene.worker(W, Notice("r", "resumed", parked_ms=40, usage=Usage(3, 0, parks=1, parked_ms=40)))
    assert scene.ledger.parked == 0
    assert [notice.event for notice in scene.heard(b"ann")] == ["parked", "resumed"]


def test_logprobs_and_prompt_logprobs_reach_the_client_once():
    scene = Scene()
    scene.hello()
    scene.client(b"ann", Generate("r", [1, 2, 3], sampling=Sampling(seed=1, logprobs=0), prompt_logprobs=0))
    first, second = Logprob(2, -1.0), Logprob(3, -2.0)
    drawn = [Logprob(7, -0.5), Logprob(8, -0.25)]
    scene.worker(W, Tokens("r", 0, [], prompt_offset=1, prompt_logprobs=[first]))
    scene.worker(W, Tokens("r", 0, [7], drawn[:1], prompt_offset=1, prompt_logprobs=[first, second]))
    scene.worker(W, Tokens("r", 0, [7, 8], drawn))
    heard = scene.heard(b"ann", Tokens)
    assert [(m.prompt_offset, m.prompt_logprobs) for m in heard if m.prompt_logprobs] == [(1, [first]), (2, [second])]
    assert [entry for m in heard for entry in m.logprobs] == drawn
    assert [token for m in heard for token in m.tokens] == [7, 8]


# refusals -------------------------------------------------------------------------------------------------------------
def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers(scene):
    assert isinstance(scene.ask("fits", prompt=2047)[0], Accepted)
    rejected = scene.ask("big", prompt=2048)[0]
    assert (rejected.code, rejected.numbers) == ("context_length_exceeded", {"prompt_tokens": 2048, "max_context": 2048})


def test_before_any_worker_was_there_every_size_waits_and_then_ends_with_the_numbers():
    scene = Scene()
    assert isinstance(scene.ask("big", prompt=5000)[0], Accepted)
    assert isinstance(scene.ask("small")[0], Accepted)
    scene.hello()
    last = scene.heard(b"ann", Finished)
    assert [(m.request_id, m.reason, m.code) for m in last] == [("big", "error", "context_length_exceeded")]
    assert scene.submitted_ids() == ["small"]


def test_the_queue_has_a_bound_and_says_so():
    scene = Scene(max_queued=2)
    scene.hello(slots=1)
    for number in range(3):
        assert isinstance(scene.ask(f"r{number}")[0], Accepted)
    rejected = scene.ask("r3")[0]
    assert (rejected.code, rejected.numbers) == ("queue_full", {"queued": 2, "max_queued": 2})
    scene.finished("r0")
    assert isinstance(scene.ask("r4")[0], Accepted)


def test_max_queued_0_still_serves_who_can_start_at_once():
    scene = Scene(max_queued=0)
    scene.hello(slots=1)
    assert isinstance(scene.ask("r0")[0], Accepted)
    assert scene.ask("r1")[0].code == "queue_full"


def test_replayed_requests_do_not_count_towards_the_queues_bound():
    scene = Scene(max_queued=1)
    scene.hello(slots=4)
    for number in range(4):
        scene.ask(f"r{number}")
    scene.lose_worker()
    assert isinstance(scene.ask("new")[0], Accepted)
    assert scene.ask("one more")[0].code == "queue_full"


def test_the_id_of_a_living_request_is_refused_and_free_again_after_its_end(scene):
    scene.ask("r")
    rejected = scene.ask("r", client=b"bob")[0]
    assert (rejected.request_id, rejected.code) == ("r", "duplicate_id")
    scene.finished("r")
    assert isinstance(scene.ask("r", client=b"bob")[0], Accepted)


def test_nonsense_is_refused():
    scene = Scene()
    scene.hello(vocab=100)
    assert scene.client(b"ann", Generate("r", []))[0].code == "bad_request"
    assert scene.client(b"ann", Generate("r", [1], max_tokens=2, min_tokens=3))[0].code == "bad_request"
    rejected = scene.client(b"ann", Generate("r", [1, 100]))[0]
    assert rejected.code == "bad_request" and "100" in rejected.message
    assert scene.client(b"ann", Generate("r", [1], sampling=Sampling(logit_bias={100: 1.0})))[0].code == "bad_request"
    assert isinstance(scene.client(b"ann", Generate("r", [99]))[0], Accepted)
    assert scene.ledger.totals.rejected["bad_request"] == 4


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": math.nan},
        {"top_p": 0.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.nan},
        {"logit_bias": {1: math.nan}},
        {"logprobs": 21},
        {"seed": 2**64 - 1},
    ],
)
def test_numbers_out_of_range_do_not_get_past_the_decoder(bad):
    with pytest.raises(ProtocolError) as caught:
        Decoder(ClientToRouter).unpack(pack(Generate("r", [1], sampling=Sampling(**bad))))
    assert caught.value.request_id == "r"


# the queue ------------------------------------------------------------------------------------------------------------
def test_the_queue_is_served_by_class_then_by_arrival():
    scene = Scene()
    for request_id, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0)):
        scene.ask(request_id, priority=priority)
    scene.hello()
    assert scene.submitted_ids() == ["c", "a", "d", "b"]


def test_no_more_are_handed_out_at_once_than_there_are_seats():
    scene = Scene()
    for request_id in ("a", "b", "c"):
        scene.ask(request_id)
    scene.hello(slots=2)
    assert scene.submitted_ids() == ["a", "b"]


def test_a_full_queue_is_no_bar_only_to_those_whom_nobody_goes_before():
    """The one that waits is too long for the worker that has a seat."""
    scene = Scene(max_queued=1)
    scene.hello(b"big-1-a", slots=1, cells=4096)
    scene.hello(b"small-1-a", slots=1, cells=256)
    scene.ask("holds the big one", prompt=1000)
    scene.ask("waits for the big one", prompt=1000)
    assert scene.ask("as good", prompt=10)[0].code == "queue_full"
    assert isinstance(scene.ask("better", prompt=10, priority=-1)[0], Accepted)


def test_a_better_class_is_sent_to_a_full_worker_but_no_more_of_it_than_there_are_seats():
    scene = Scene()
    scene.hello(slots=2)
    for request_id in ("low0", "low1", "low2"):
        scene.ask(request_id, priority=10)
    assert scene.submitted_ids() == ["low0", "low1"]
    for request_id, priority in (("high0", 0), ("middle", 5), ("high1", 0), ("high2", 0), ("top", -1)):
        scene.ask(request_id, priority=priority)
    assert scene.submitted_ids() == ["high0", "middle", "high1", "top"]
    scene.worker(W, Notice("high0", "parked"))  # displaced; one of its class and one of a better class have the seats
    assert scene.submitted_ids() == []
    scene.finished("top")
    assert scene.submitted_ids() == ["high2"]


def test_a_worse_class_is_not_kept_waiting_for_ever():
    scene = Scene()
    scene.hello(slots=1)
    for number in range(8):
        scene.ask(f"high{number}")
    scene.ask("low", priority=2)
    scene.ask("lower", priority=3)
    scene.ask("set aside", priority=2)
    scene.client(b"cli", Park("set aside", deadline_s=1000))
    for number in range(8):
        assert scene.submitted_ids() == [f"high{number}"]
        scene.ask(f"late{number}")
        scene.wait(10)
        scene.finished(f"high{number}")
        if number == 6:  # after 70 s it is as good as the others, and older than the late ones, but not than the first eight
            assert scene.ledger.requests["low"].rank == 0
    assert scene.submitted_ids() == ["low"]
    scene.ask("better than all", priority=-1)
    assert scene.submitted_ids() == ["better than all"]
    scene.finished("better than all")
    scene.wait(15)
    assert scene.submitted_ids() == []  # it counts as what it was sent as
    scene.finished("low")
    assert scene.submitted_ids() == ["lower"]  # after 90 s
    assert scene.ledger.requests["set aside"].rank == 2


def test_a_full_pool_is_no_bar_to_a_better_class():
    scene = Scene()
    scene.hello()
    scene.ask("low", priority=1, prompt=2000)
    scene.load(cells=PoolCells(active=2048))
    scene.ask("high", prompt=1000)
    assert scene.submitted_ids() == ["low", "high"]


def test_a_better_class_goes_where_it_takes_nobodys_seat():
    scene = Scene()
    scene.hello(b"cpu0-1-a", slots=1)
    scene.ask("low", priority=1)
    scene.hello(b"cpu1-1-a", slots=1)
    scene.load(b"cpu0-1-a", cells=PoolCells(free=2000))
    scene.load(b"cpu1-1-a", cells=PoolCells(free=1000))
    scene.ask("high")
    assert scene.submitted_ids(b"cpu1-1-a") == ["high"]


def test_a_replayed_one_of_a_worse_class_does_not_hold_up_a_better_class():
    scene = Scene()
    scene.hello(slots=1)
    scene.ask("low", priority=1)
    scene.lose_worker()
    scene.hello(b"cpu1-1-a", slots=1)
    assert scene.submitted_ids(b"cpu1-1-a") == ["low"]
    scene.ask("low too", priority=1)
    scene.hello(b"cpu2-1-a", slots=1)
    scene.lose_worker(b"cpu1-1-a")
    assert scene.submitted_ids(b"cpu2-1-a") == ["low too"]
    scene.ask("high")
    assert scene.submitted_ids(b"cpu2-1-a") == ["high"]


def test_a_full_queue_of_a_worse_class_refuses_nobody_who_could_start():
    scene = Scene(max_queued=1)
    scene.hello(slots=1)
    for request_id in ("low", "queued"):
        scene.ask(request_id, priority=1)
    assert scene.ask("refused", priority=1)[0].code == "queue_full"
    assert isinstance(scene.ask("high")[0], Accepted)
    assert scene.ask("high too")[0].code == "queue_full"


def test_parked_sequences_give_their_seat_to_the_queue():
    scene = Scene()
    scene.hello(slots=1)
    scene.ask("a")
    scene.ask("b")
    assert scene.submitted_ids() == ["a"]
    scene.worker(W, Notice("a", "parked"))
    assert scene.submitted_ids() == ["b"]


def test_a_queued_request_that_was_parked_by_its_id_waits_until_it_is_resumed():
    scene = Scene()
    scene.ask("a")
    scene.client(b"cli", Park("a"))
    scene.hello()
    assert scene.submitted_ids() == []
    scene.client(b"cli", Resume("a"))
    assert scene.submitted_ids() == ["a"]


def test_the_worker_with_most_free_cells_gets_the_next_request():
    scene = Scene()
    scene.hello(b"cpu0-1-a")
    scene.hello(b"cpu1-1-a")
    scene.load(b"cpu0-1-a", cells=PoolCells(free=100, active=1948))
    scene.load(b"cpu1-1-a", cells=PoolCells(free=100, reusable=500, active=1448))
    scene.ask("a", prompt=550)
    assert scene.submitted_ids(b"cpu1-1-a") == ["a"]
    scene.ask("b", prompt=60)  # what is on its way counts: 100 against 600 - 551
    assert scene.submitted_ids(b"cpu0-1-a") == ["b"]


def test_a_sibling_goes_where_the_prompt_is_being_computed():
    scene = Scene()
    scene.hello(b"cpu0-1-a")
    scene.hello(b"cpu1-1-a")
    scene.ask("first", prompt=100)
    (home,) = [w for w in (b"cpu0-1-a", b"cpu1-1-a") if scene.submitted_ids(w)]
    scene.ask("second", prompt=100, sibling_of="first")
    assert scene.submitted_ids(home) == ["second"]


def test_who_fits_only_a_busy_worker_lets_the_others_pass():
    scene = Scene()
    scene.hello(b"big-1-a", slots=1, cells=4096)
    scene.hello(b"small-1-a", slots=1, cells=256)
    scene.ask("holds the big one", prompt=1000)
    scene.ask("needs the big one", prompt=1000)
    scene.ask("small", prompt=10)
    assert scene.submitted_ids(b"big-1-a") == ["holds the big one"]
    assert scene.submitted_ids(b"small-1-a") == ["small"]


# cancel ---------------------------------------------------------------------------------------------------------------
def test_cancel_of_a_queued_request_ends_it_at_once():
    scene = Scene()
    scene.ask("r")
    scene.client(b"ann", Cancel("r"))
    assert scene.heard(b"ann")[1] == Finished("r", "cancelled", Usage(3))
    scene.assert_empty()


def test_cancel_of_a_dispatched_request_ends_with_the_workers_word(scene):
    scene.ask("r")
    scene.heard(W)
    scene.client(b"somebody else", Cancel("r"))
    scene.client(b"ann", Cancel("r"))
    assert scene.heard(W) == [Cancel("r")]
    assert scene.heard(b"ann", Finished) == []
    scene.finished("r", "cancelled", completion=5)
    assert scene.heard(b"ann", Finished) == [Finished("r", "cancelled", Usage(3, 5))]
    scene.assert_empty()


def test_a_cancelled_request_whose_worker_dies_is_not_replayed(scene):
    scene.ask("r")
    scene.client(b"ann", Cancel("r"))
    scene.lose_worker()
    assert [m.reason for m in scene.heard(b"ann", Finished)] == ["cancelled"]
    scene.assert_empty()


def test_a_vanished_client_frees_its_seats_but_only_after_the_worker_has_let_go():
    scene = Scene()
    scene.hello(slots=1)
    scene.ask("r")
    scene.ask("next", client=b"bob")
    scene.heard(W)
    scene.lose_client(b"ann")
    assert scene.heard(W) == [Cancel("r")]
    scene.finished("r", "cancelled")
    assert scene.submitted_ids() == ["next"]
    assert scene.heard(b"ann", Finished) == []


def test_the_id_of_a_vanished_clients_request_can_be_used_again_and_old_words_do_not_reach_it(scene):
    scene.ask("r")
    scene.tokens("r", 0, [1])
    scene.lose_client(b"ann")
    scene.heard(W)
    scene.ask("r", client=b"bob")
    assert scene.submits() == []
    scene.tokens("r", 1, [2])  # of the old one
    scene.finished("r", "cancelled", completion=2)
    assert scene.submitted_ids() == ["r"]
    scene.tokens("r", 0, [5])
    assert scene.delivered(b"bob", "r") == [5]


def test_park_and_resume_reach_the_worker_once_each_and_never_with_our_own_reason(scene):
    scene.ask("r")
    scene.heard(W)
    for message in (Park("r", "credit"), Park("r"), Resume("r", "credit"), Resume("r"), Park("unknown")):
        scene.client(b"cli", message)
    assert scene.heard(W) == [Park("r", "explicit"), Resume("r", "explicit")]


# drain ----------------------------------------------------------------------------------------------------------------
def test_a_drain_refuses_new_requests_and_lets_the_accepted_ones_end():
    scene = Scene()
    scene.hello(slots=1)
    scene.ask("running")
    scene.ask("queued")
    scene.drain(30)
    rejected = scene.ask("new")[0]
    assert isinstance(rejected, Rejected) and rejected.code == "draining"
    scene.finished("running")
    scene.finished("queued")
    assert [m.reason for m in scene.heard(b"ann", Finished)] == ["length", "length"]
    scene.assert_empty()


def test_what_takes_longer_than_the_drain_gets_an_error(scene):
    scene.ask("r")
    scene.tokens("r", 0, [1])
    scene.drain(5)
    scene.wait(4)
    assert scene.heard(b"ann", Finished) == []
    scene.wait(2)
    (last,) = scene.heard(b"ann", Finished)
    assert (last.reason, last.code, last.usage.completion_tokens) == ("error", "drain_timeout", 1)
    scene.assert_empty()


def test_an_abort_gives_every_stream_its_last_word(scene):
    for number in range(3):
        scene.ask(f"r{number}")
    scene.drain(100)
    scene.abort()
    assert len(scene.heard(b"ann", Finished)) == 3
    scene.assert_empty()


def test_a_hello_that_is_repeated_changes_nothing(scene):
    scene.ask("r")
    scene.heard(W)
    scene.worker(W, Hello("cpu0", 1, "m", "cpu", "f32", 2048, 16, 8, 2048, True))
    assert scene.heard(W) == []
    scene.tokens("r", 0, [1])
    assert scene.delivered(b"ann", "r") == [1]
