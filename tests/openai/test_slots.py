"""The seats over HTTP: the list, and setting a request aside and bringing it back by the number of its seat."""

import pytest

from router.openai import slots
from tests.openai.conftest import Adapter
from tests.openai.fake_router import ready_status
from tests.openai.test_bad_input import error_of
from wire.messages import HoldAnswer, Slot

PARK, RESUME = "/slots/1/park", "/slots/1/resume"
KEYS = ("id", "request_id", "state", "n_tokens", "is_preempted", "n_preempt", "n_recompute", "parked_ms", "drafted", "accepted")
KEYS += ("priority", "held", "acceptance")


@pytest.fixture(autouse=True)
def no_second_look(monkeypatch):
    """Seats that look idle are looked at again at once."""
    monkeypatch.setattr(slots, "LISTED_S", 0)


async def test_slots_have_every_key(adapter: Adapter) -> None:
    idle = (0, "", "idle", 0, False, 0, 0, 0, 0, 0, 0, False, None)
    parked = (1, "chatcmpl-1", "parked", 300, True, 2, 1, 45, 30, 20, 0, False, 0.6667)
    told = (await adapter.http.get("/slots")).json()
    assert told == [dict(zip(KEYS, slot, strict=True)) for slot in (idle, parked)]


@pytest.mark.parametrize(
    ("body", "deadline_s"),
    [
        (b"", 300),
        (b"{}", 300),
        (b'{"deadline_s": null}', 300),
        (b'{"deadline_s": 0.5}', 0.5),
        (b'{"deadline_s": 604800}', 604800),
    ],
)
async def test_a_park_is_answered_with_the_entry(adapter: Adapter, body: bytes, deadline_s: float) -> None:
    adapter.router.hold_answer = HoldAnswer("chatcmpl-1", slot=Slot(1, "chatcmpl-1", "parked", 301, priority=-5, held=True))
    answer = await adapter.http.post(PARK, content=body)
    assert answer.status_code == 200
    assert answer.json() == dict(zip(KEYS, (1, "chatcmpl-1", "parked", 301, False, 0, 0, 0, 0, 0, -5, True, None), strict=True))
    assert adapter.router.holds == [("park", "chatcmpl-1", deadline_s)]


async def test_a_resume_is_answered_with_the_entry(adapter: Adapter) -> None:
    adapter.router.hold_answer = HoldAnswer("chatcmpl-1")  # its worker is away: the line known before is shown
    for body in (b"", b"{}"):
        answer = await adapter.http.post(RESUME, content=body)
        assert (answer.status_code, answer.json()["n_tokens"], answer.json()["held"]) == (200, 300, False)
    assert adapter.router.holds == [("resume", "chatcmpl-1", None)] * 2


@pytest.mark.parametrize("number", ["2", "-1", "99999999999999999999", "one", "01", "1.0", "%20"])
@pytest.mark.parametrize("what", ["park", "resume"])
async def test_a_seat_that_is_not_there(adapter: Adapter, number: str, what: str) -> None:
    assert "There is no slot" in error_of(await adapter.http.post(f"/slots/{number}/{what}"), 404)["message"]
    assert adapter.router.holds == []


@pytest.mark.parametrize("what", ["park", "resume"])
async def test_an_idle_seat(adapter: Adapter, what: str) -> None:
    error = error_of(await adapter.http.post(f"/slots/0/{what}"), 409)
    assert (error["message"], error["code"]) == ("Slot 0 is idle.", "conflict")
    assert adapter.router.holds == []


async def test_a_seat_whose_owner_is_too_new_to_be_listed_at_first(adapter: Adapter) -> None:
    adapter.router.later = ready_status(slots=[Slot(0, "new", "running")])
    assert (await adapter.http.post("/slots/0/park")).json()["request_id"] == "new"


@pytest.mark.parametrize("path", [PARK, RESUME])
async def test_what_the_state_does_not_allow(adapter: Adapter, path: str) -> None:
    adapter.router.hold_answer = HoldAnswer("chatcmpl-1", "conflict", "the request is set aside already")
    error = error_of(await adapter.http.post(path), 409)
    assert (error["message"], error["code"]) == ("Slot 1: the request is set aside already.", "conflict")
    adapter.router.hold_answer = HoldAnswer("chatcmpl-1", "unknown_request", "no living request has this id")
    assert error_of(await adapter.http.post(path), 409)["message"] == "The request in slot 1 has just ended."


@pytest.mark.parametrize(("failure", "code"), [(TimeoutError(), "timeout"), (ConnectionError("gone"), "router_lost")])
@pytest.mark.parametrize("path", [PARK, RESUME])
async def test_no_answer(adapter: Adapter, path: str, failure: Exception, code: str) -> None:
    adapter.router.hold_answer = failure
    assert error_of(await adapter.http.post(path), 503)["code"] == code


@pytest.mark.parametrize("value", ["0", "-1", "604801", "1e999", '"5"', "true", "[5]", "9" * 400])
async def test_deadlines_that_cannot_be(adapter: Adapter, value: str) -> None:
    error = error_of(await adapter.http.post(PARK, content=f'{{"deadline_s": {value}}}'))
    assert error["param"] == "deadline_s"
    assert adapter.router.holds == []


@pytest.mark.parametrize("body", [b"{", b"5", b"null", b"[]", b'{"deadline": 5}', b"\xff"])
@pytest.mark.parametrize("path", [PARK, RESUME])
async def test_bodies_that_cannot_be(adapter: Adapter, path: str, body: bytes) -> None:
    error_of(await adapter.http.post(path, content=body))
    assert adapter.router.holds == []


async def test_a_resume_takes_no_deadline_and_other_methods_are_told(adapter: Adapter) -> None:
    error_of(await adapter.http.post(RESUME, json={"deadline_s": 5}))
    for path in (PARK, RESUME):
        assert (await adapter.http.get(path)).headers["allow"] == "POST"
