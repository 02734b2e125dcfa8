"""Limits of API keys as stories: how many requests, how many waiting tokens, and what share of the cells each may have."""

from router.keys import KeyLimits
from tests.router.scene import Scene
from wire.messages import Accepted, Cancel, Notice, Park, Rejected, Resume

WORKER = b"cpu0-1-a"


def rejected(said: list) -> Rejected:
    (only,) = said
    assert isinstance(only, Rejected)
    return only


def test_each_key_has_its_number_of_requests():
    s = Scene(limits=KeyLimits(requests=2))
    s.hello()
    assert all(isinstance(s.ask(name, key="ann")[0], Accepted) for name in ("a", "b"))
    answer = rejected(s.ask("c", key="ann"))
    assert (answer.code, answer.numbers) == ("key_limit", {"requests": 2, "key_requests": 2})
    assert s.ledger.totals.rejected["key_limit"] == 1
    for name, key in (("d", "bob"), ("e", ""), ("f", ""), ("g", "")):  # others', and nobody's
        assert isinstance(s.ask(name, key=key)[0], Accepted)
    s.finished("a")
    assert isinstance(s.ask("c", key="ann")[0], Accepted)


def test_one_answer_with_more_choices_than_its_key_may_have_is_no_matter_of_time():
    s = Scene(limits=KeyLimits(requests=2))
    s.hello()
    assert isinstance(s.ask("a", key="ann")[0], Accepted)
    assert isinstance(s.ask("b", key="ann", sibling_of="a")[0], Accepted)
    answer = rejected(s.ask("c", key="ann", sibling_of="a"))
    assert (answer.code, answer.numbers) == ("bad_request", {"key_requests": 2})
    assert rejected(s.ask("d", key="ann")).code == "key_limit"  # another one may come again
    assert rejected(s.ask("e", key="ann", sibling_of="d")).code == "key_limit"


def test_each_key_has_its_number_of_waiting_prompt_tokens():
    s = Scene(limits=KeyLimits(queued_tokens=10))
    s.hello(slots=1)
    assert isinstance(s.ask("runs", prompt=100, key="ann")[0], Accepted)  # it does not wait
    assert isinstance(s.ask("b", prompt=7, key="ann")[0], Accepted)
    answer = rejected(s.ask("c", prompt=4, key="ann"))
    assert (answer.code, answer.numbers) == ("key_limit", {"queued_tokens": 7, "key_queued_tokens": 10})
    assert isinstance(s.ask("d", prompt=3, key="ann")[0], Accepted)
    assert isinstance(s.ask("e", prompt=10, key="bob")[0], Accepted)
    s.finished("runs")
    assert isinstance(s.ask("f", prompt=7, key="ann")[0], Accepted)


def test_beyond_its_share_a_key_waits_and_others_pass():
    s = Scene(limits=KeyLimits(cells=50))
    s.hello(cells=1000)
    s.ask("a", prompt=299, key="ann")
    s.ask("b", prompt=299, key="ann")
    s.ask("c", prompt=10, key="ann")  # it would fit, but came later
    s.ask("d", prompt=299, key="bob")
    s.ask("e", prompt=299)
    assert s.submitted_ids() == ["a", "d", "e"]
    s.finished("a")
    assert s.submitted_ids() == ["b", "c"]


def test_a_key_that_grows_beyond_its_share_sets_its_newest_aside_until_there_is_room():
    s = Scene(limits=KeyLimits(cells=50))
    s.hello(cells=100)
    s.ask("a", prompt=19, key="ann")
    s.ask("b", prompt=19, key="ann")
    s.ask("c", prompt=19, key="bob")
    s.heard(WORKER)
    s.tokens("a", 0, [1] * 10)
    s.wait(0.25)
    assert s.heard(WORKER, Park, Resume) == []  # 30 and 20 of 100
    s.tokens("a", 10, [1])
    s.wait(0.25)
    assert s.heard(WORKER, Park, Resume) == [Park("b", "share")]
    s.worker(WORKER, Notice("b", "parked", "explicit"))
    assert len(s.heard(b"ann", Notice)) == 1  # the client hears of the pause
    s.tokens("a", 11, [1] * 9)
    s.wait(0.25)
    assert s.heard(WORKER, Park, Resume) == []
    s.finished("a", completion=20)
    assert s.heard(WORKER, Park, Resume) == [Resume("b", "share")]


def test_a_request_larger_than_the_share_runs_alone():
    s = Scene(limits=KeyLimits(cells=10))
    s.hello(cells=1000)
    s.ask("a", prompt=500, key="ann")
    s.ask("b", prompt=1, key="ann")
    assert s.submitted_ids() == ["a"]
    s.finished("a")
    assert s.submitted_ids() == ["b"]


def test_the_better_class_has_the_share():
    s = Scene(limits=KeyLimits(cells=50))
    s.hello(cells=100)
    s.ask("a", prompt=39, key="ann")
    s.heard(WORKER)
    s.ask("b", prompt=39, key="ann", priority=-1)
    assert s.heard(WORKER, Park) == [Park("a", "share")]
    s.finished("b")
    assert s.heard(WORKER, Resume) == [Resume("a", "share")]


def test_who_is_set_aside_by_hand_leaves_his_share_to_others_of_his_key():
    s = Scene(limits=KeyLimits(cells=50))
    s.hello(cells=100)
    s.ask("a", prompt=39, key="ann")
    s.ask("b", prompt=39, key="ann")
    assert s.submitted_ids() == ["a"]
    s.client(b"op", Park("a"))
    assert s.submitted_ids() == ["b"]
    s.heard(WORKER)
    s.client(b"op", Resume("a"))
    assert s.heard(WORKER, Park, Resume) == [Resume("a"), Park("b", "share")]


def test_what_waits_for_its_share_can_be_cancelled_and_survives_its_worker():
    s = Scene(limits=KeyLimits(cells=50))
    s.hello(cells=100)
    s.ask("a", prompt=39, key="ann")
    s.ask("b", prompt=39, key="ann")
    s.ask("c", prompt=39, key="ann")
    s.client(b"ann", Cancel("b"))
    s.heard(WORKER)
    s.lose_worker()
    s.hello(b"cpu0-2-b", cells=100)
    assert s.submitted_ids(b"cpu0-2-b") == ["a"]
    s.finished("a", identity=b"cpu0-2-b")
    assert s.submitted_ids(b"cpu0-2-b") == ["c"]
    s.finished("c", identity=b"cpu0-2-b")
    s.assert_empty()


def test_what_waits_for_its_share_counts_as_queued():
    """Or a key at its share could pile up requests without end while seats are free."""
    s = Scene(max_queued=2, limits=KeyLimits(cells=50))
    s.hello(cells=100)
    s.ask("a", prompt=49, key="ann")
    assert isinstance(s.ask("b", key="ann")[0], Accepted)
    assert isinstance(s.ask("c", key="ann")[0], Accepted)
    assert rejected(s.ask("d", key="ann")).code == "queue_full"
    assert isinstance(s.ask("e", key="bob")[0], Accepted)  # it need not wait
