"""Stories about workers that die, hang, return, and about requests that kill them."""

from router.fleet import LOST_S, SUSPECT_S
from router.ledger import MAX_REPLAYS
from router.metrics import Metrics
from tests.router.scene import Scene
from wire.messages import Cancel, Counters, Finished, Goodbye, Notice, PoolCells, Usage

W = b"cpu0-1-a"
NEXT = b"cpu0-2-b"  # the next life of the same worker
OTHER = b"cpu1-1-a"


def running_scene(count: int = 1, **hello: object) -> Scene:
    scene = Scene()
    scene.hello(**hello)
    for number in range(count):
        scene.ask(f"r{number}")
        scene.tokens(f"r{number}", 0, [10, 11])
    scene.load()
    scene.heard(W)
    return scene


def test_a_dead_workers_streams_go_on_in_its_next_life_with_what_was_delivered():
    scene = running_scene()
    scene.lose_worker()
    scene.hello(NEXT)
    (submit,) = scene.submits(NEXT)
    assert (submit.delivered, submit.arrival) == ([10, 11], 1)
    scene.tokens("r0", 2, [12], identity=NEXT)
    scene.finished("r0", identity=NEXT, completion=3)
    assert scene.delivered(b"ann", "r0") == [10, 11, 12]
    scene.assert_empty()


def test_a_dead_workers_streams_go_to_another_worker_at_once():
    scene = running_scene()
    scene.hello(OTHER)
    scene.lose_worker()
    assert scene.submits(OTHER)[0].delivered == [10, 11]


def test_the_next_life_replaces_the_former_before_anybody_saw_it_die():
    scene = running_scene()
    scene.hello(NEXT)
    assert scene.submitted_ids(NEXT) == ["r0"]
    scene.tokens("r0", 2, [99])  # a late word of the former life
    scene.finished("r0", "stop", completion=3)
    scene.hello(W)  # even a late Hello
    scene.tokens("r0", 2, [12], identity=NEXT)
    assert scene.delivered(b"ann", "r0") == [10, 11, 12]
    assert list(scene.ledger.fleet.workers) == [NEXT]


def test_a_goodbye_is_a_loss_without_waiting():
    scene = running_scene()
    scene.hello(OTHER)
    scene.worker(W, Goodbye("stopped"))
    assert scene.submitted_ids(OTHER) == ["r0"]
    assert list(scene.ledger.fleet.workers) == [OTHER]


def test_replayed_requests_go_first_in_the_order_of_their_arrival():
    scene = running_scene(3, slots=3)
    scene.lose_worker()
    scene.ask("urgent", priority=-5)
    scene.ask("patient")
    scene.hello(NEXT, slots=8)
    assert scene.submitted_ids(NEXT) == ["r0", "r1", "r2", "urgent", "patient"]


def test_usage_of_former_lives_is_handed_on():
    scene = running_scene()
    usage = Usage(3, 2, parks=2, parked_ms=70, recomputed_tokens=9)
    scene.worker(W, Notice("r0", "resumed", parked_ms=70, usage=usage))
    scene.lose_worker()
    scene.hello(NEXT)
    assert scene.submits(NEXT)[0].usage == usage


def test_a_stream_parked_when_its_worker_died_is_told_when_it_goes_on():
    scene = running_scene()
    scene.worker(W, Notice("r0", "parked", "forced", usage=Usage(3, 2, parks=1)))
    scene.lose_worker()
    scene.now += 0.5
    scene.heard(b"ann")
    assert scene.ledger.parked == 1
    scene.hello(NEXT)
    (notice,) = scene.heard(b"ann", Notice)
    assert (notice.event, notice.kind, notice.mode, notice.parked_ms) == ("resumed", "forced", "recompute", 500)
    assert scene.submits(NEXT)[0].usage == Usage(3, 2, parks=1, parked_ms=500)
    assert scene.ledger.parked == 0


# silence --------------------------------------------------------------------------------------------------------------
def test_a_silent_worker_gets_no_new_work_and_is_then_lost():
    scene = running_scene()
    scene.wait(SUSPECT_S + 0.5, alive=())
    scene.ask("new")
    assert scene.submitted_ids() == []
    scene.load()
    assert scene.submitted_ids() == ["new"]
    scene.hello(OTHER)
    scene.wait(LOST_S + 0.5 + 20 * SUSPECT_S * 1.5, alive=(OTHER,))
    assert scene.submitted_ids(OTHER) == ["r0", "new"]


def test_heartbeats_without_a_step_are_no_progress():
    """The loop turns, but the device hangs."""
    scene = running_scene()
    scene.hello(OTHER)
    for _ in range(50):
        scene.now += 0.25
        scene.load(stuck=True)
        scene.load(OTHER)
        scene._note(scene.ledger.tick(scene.now))
    assert scene.submitted_ids(OTHER) == ["r0"]


def test_a_worker_whose_steps_are_long_is_given_twenty_of_them():
    scene = running_scene()
    scene.hello(OTHER)
    scene.wait(5, alive=(OTHER,))
    scene.load()  # it was one step of 5 s
    scene.wait(60, alive=(OTHER,))
    assert scene.submitted_ids(OTHER) == []
    scene.wait(45, alive=(OTHER,))
    assert scene.submitted_ids(OTHER) == ["r0"]


def test_an_idle_worker_that_only_answers_pings_stays_alive():
    scene = Scene()
    scene.hello()
    for _ in range(200):
        scene.now += 0.25
        scene.load(stuck=True, running=0)
        scene._note(scene.ledger.tick(scene.now))
    assert scene.probes[W] >= 200
    scene.ask("r")
    assert scene.submitted_ids() == ["r"]


def test_a_router_that_stood_still_blames_nobody():
    scene = running_scene()
    scene.wait(0.25)
    scene.stall(120)
    scene.load()
    assert scene.ledger.totals.workers_lost == 0
    scene.tokens("r0", 2, [12])
    assert scene.delivered(b"ann", "r0") == [10, 11, 12]


def test_a_worker_that_returns_is_told_to_end_what_is_no_longer_its():
    scene = running_scene()
    scene.hello(OTHER)
    scene.wait(LOST_S + 1, alive=(OTHER,))
    assert scene.submitted_ids(OTHER) == ["r0"]
    scene.tokens("r0", 2, [98])  # before it knows
    scene.load()
    assert scene.heard(W) == [Cancel("r0")]
    scene.tokens("r0", 3, [99])
    scene.finished("r0", "cancelled", completion=4)
    scene.tokens("r0", 2, [12], identity=OTHER)
    assert scene.delivered(b"ann", "r0") == [10, 11, 12]
    scene.load(OTHER, cells=PoolCells(active=2048))
    scene.ask("new")
    assert scene.submitted_ids() == ["new"]


def test_a_lone_worker_that_returns_gets_its_request_again_once_it_has_let_go():
    scene = running_scene()
    scene.wait(LOST_S + 1, alive=())
    scene.load()
    assert scene.heard(W) == [Cancel("r0")]
    scene.finished("r0", "cancelled", completion=2)
    assert scene.submits()[0].delivered == [10, 11]


def test_sequences_of_a_former_router_are_cancelled_when_a_load_lists_them():
    scene = Scene()
    scene.hello()
    scene.load(lists=["orphan"])
    scene.load(lists=["orphan"])
    assert scene.heard(W) == [Cancel("orphan")]


def test_a_request_that_its_worker_no_longer_lists_is_started_again():
    """A message was lost on a broken connection."""
    scene = running_scene()
    for _ in range(30):
        scene.now += 0.25
        scene.load(lists=[], running=0)
        scene._note(scene.ledger.tick(scene.now))
    assert scene.heard(W) == [Cancel("r0")]
    for _ in range(60):
        scene.now += 0.25
        scene.load(lists=[], running=0)
        scene._note(scene.ledger.tick(scene.now))
    assert scene.submits()[0].delivered == [10, 11]  # it knows nothing of the id, so no Finished will come


def test_a_request_that_waits_in_the_worker_is_not_missed():
    scene = Scene()
    scene.hello()
    scene.ask("r")
    scene.heard(W)
    for _ in range(100):
        scene.now += 0.25
        scene.load(lists=[], waiting=1, running=0)
        scene._note(scene.ledger.tick(scene.now))
    assert scene.heard(W) == []
    assert (scene.ledger.queued, scene.ledger.fleet.running) == (1, 0)


# poison ---------------------------------------------------------------------------------------------------------------
def test_a_request_that_kills_every_worker_ends_with_an_error():
    scene = Scene()
    scene.ask("poison")
    for life in range(MAX_REPLAYS + 1):
        assert scene.heard(b"ann", Finished) == []
        identity = f"cpu0-{life}-x".encode()
        scene.hello(identity)
        assert scene.submitted_ids(identity) == ["poison"]
        scene.lose_worker(identity)
    (last,) = scene.heard(b"ann", Finished)
    assert (last.reason, last.code) == ("error", "worker_lost")
    scene.assert_empty()


def test_each_new_token_gives_a_request_its_tries_back():
    scene = Scene()
    scene.ask("r")
    for life in range(5 * MAX_REPLAYS):
        identity = f"cpu0-{life}-x".encode()
        scene.hello(identity)
        scene.tokens("r", life, [life], identity)
        scene.lose_worker(identity)
    assert scene.heard(b"ann", Finished) == []
    assert scene.delivered(b"ann", "r") == [] and len(scene.ledger.requests["r"].tokens) == 5 * MAX_REPLAYS


def test_innocents_do_not_die_with_the_poison():
    """Whoever is in a worker with the poison gets no token; after some deaths each is tried alone."""
    scene = Scene()
    for request_id in ("i0", "poison", "i1", "i2"):
        scene.ask(request_id)
    ended: set[str] = set()
    for life in range(60):
        identity = f"cpu0-{life}-x".encode()
        scene.hello(identity)
        alive = True
        while alive and (submits := scene.submitted_ids(identity)):
            alive = "poison" not in submits
            for request_id in submits if alive else ():
                scene.tokens(request_id, len(scene.ledger.requests[request_id].tokens), [1], identity)
                scene.finished(request_id, identity=identity, completion=1)
        scene.lose_worker(identity)
        ended |= {m.request_id for m in scene.said[b"ann"] if isinstance(m, Finished)}
        if len(ended) == 4:
            break
    reasons = {m.request_id: m.reason for m in scene.heard(b"ann", Finished)}
    assert reasons == {"i0": "length", "i1": "length", "i2": "length", "poison": "error"}


# totals ---------------------------------------------------------------------------------------------------------------
def test_counters_add_up_over_the_lives_of_a_worker():
    scene = Scene()
    scene.hello()
    scene.load(counters=Counters(preempt={"pressure": 3}, resumed=2, recomputed_tokens=50, denied={"full": 1}))
    scene.hello(NEXT)
    scene.load(NEXT, counters=Counters(preempt={"pressure": 1, "forced": 4}, resumed=5))
    scene.load(NEXT, counters=Counters(preempt={"pressure": 2, "forced": 4}, resumed=5))
    total = scene.ledger.totals.workers()
    assert total.preempt == {"pressure": 5, "forced": 4}
    assert (total.resumed, total.recomputed_tokens, total.denied) == (7, 50, {"full": 1})


def test_parks_by_how_and_why_add_up():
    scene = Scene()
    scene.hello()
    assert 'parkade_parks_total{mode="recompute",reason="denied_lost"} 0.0' in Metrics(scene.ledger).text(None, scene.now)
    scene.load(counters=Counters(parks={"save cheaper": 3, "recompute denied_full": 1}, stalled=1, damaged=3))
    scene.hello(NEXT)
    scene.load(NEXT, counters=Counters(parks={"save cheaper": 2, "recompute brand_new": 4}, stalled=2, damaged=1))
    text = Metrics(scene.ledger).text(None, scene.now)
    for mode, reason, value in (("save", "cheaper", 5), ("recompute", "denied_full", 1), ("recompute", "brand_new", 4)):
        assert f'parkade_parks_total{{mode="{mode}",reason="{reason}"}} {float(value)}\n' in text
    assert "parkade_recompute_stalled_total 3.0\n" in text and "parkade_images_damaged_total 4.0\n" in text


def test_drafts_add_up_by_position():
    scene = Scene()
    scene.hello(draft=1)
    assert 'parkade_drafted_tokens_total{position="1"} 0.0' in Metrics(scene.ledger).text(None, scene.now)
    scene.load(counters=Counters(drafted=[30], accepted=[20]))
    scene.hello(NEXT, draft=3)
    scene.load(NEXT, counters=Counters(drafted=[10, 8], accepted=[5, 2]))
    text = Metrics(scene.ledger).text(None, scene.now)
    for kind, values in (("drafted", (40, 8, 0)), ("accepted", (25, 2, 0))):
        for position, value in enumerate(values, 1):
            assert f'parkade_{kind}_tokens_total{{position="{position}"}} {float(value)}\n' in text


def test_without_a_head_no_position_is_shown():
    scene = Scene()
    scene.hello()
    assert "position=" not in Metrics(scene.ledger).text(None, scene.now)


def test_seats_of_two_workers_have_numbers_of_their_own():
    scene = Scene()
    scene.hello(b"cpu0-1-a")
    scene.hello(b"cpu1-1-a")
    for identity in (b"cpu0-1-a", b"cpu1-1-a"):
        scene.load(identity, lists=["", ""], running=0)
    assert sorted(slot.id for slot in scene.ledger.fleet.slots()) == [0, 1, 2, 3]
    before = [slot.id for slot in scene.ledger.fleet.slots()]
    scene.lose_worker(b"cpu0-1-a")
    assert [slot.id for slot in scene.ledger.fleet.slots()] == before[2:]
