"""Four chats that fit alone but not together: all of them finish, however much of the parking is denied."""

import pytest

from tests.system.stack import Stack, prompt, stream, together

GENERATED = 400
CTX = 1024  # four chats of about 240 + 400 cells want 2,560


def chats(stack: Stack, **body: object) -> list:
    return together(*(stream(stack.url, prompt=prompt(i), max_tokens=GENERATED, temperature=0, **body) for i in range(4)))


@pytest.mark.parametrize("park_ram", [pytest.param("8GiB", marks=pytest.mark.long), "16MiB", "0"])
def test_four_chats_that_do_not_fit_together_all_finish(tmp_path, park_ram):
    with Stack(tmp_path / "run", ctx=CTX, slots=4, park_ram=park_ram) as stack:
        alone = [together(stream(stack.url, prompt=prompt(i), max_tokens=GENERATED, temperature=0))[0] for i in (0, 3)]
        answers = chats(stack)
        for answer in answers:
            assert (len(answer.ids), answer.finish_reason, answer.done) == (GENERATED, "length", True), answer
        assert sum(answer.parkade["parks"] for answer in answers) > 0, "the pool was never short: the test shows nothing"
        assert answers[0].same_as(alone[0]) and answers[3].same_as(alone[1])
        recomputed = sum(answer.parkade["recomputed_tokens"] for answer in answers)
        assert (recomputed == 0) == (park_ram == "8GiB"), recomputed
        assert stack.metric("parkade_preempt_total", kind="pressure") == sum(answer.parkade["parks"] for answer in answers)
        assert stack.metric("parkade_hostcache_used_bytes") == 0
        assert stack.metric("parkade_requests_preempted") == 0
        assert {slot["state"] for slot in stack.slots()} == {"idle"}
        parked = [answer for answer in answers if answer.parkade["parks"]]
        assert all("preempted" in answer.comments and "resumed" in answer.comments for answer in parked)
        assert stack.stop() == 0


def test_without_parking_a_full_pool_fails_with_a_clear_error(tmp_path):
    with Stack(tmp_path / "run", ctx=CTX, slots=4, policy="off") as stack:
        answers = chats(stack)
        failed = [answer for answer in answers if answer.error]
        assert failed, "the pool was never full: the test shows nothing"
        for answer in failed:
            assert answer.error["code"] == "kv_cache_full" and f"of {CTX} cells" in answer.error["message"], answer.error
        again = together(stream(stack.url, prompt=prompt(9), max_tokens=5, temperature=0))[0]
        assert len(again.ids) == 5
