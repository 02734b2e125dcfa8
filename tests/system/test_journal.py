"""The journal of real processes replays to the same plans: parks by pressure, drafts, cancels, a worker's death."""

import pytest

from sim.replay import replay
from tests.system.stack import Answer, Stack, prompt_ids, stream, together

GENERATED = 200
CTX = 768  # four of 60 + 200 cells want 1,040


def hang_up_at(tokens: int):
    return lambda answer: len(answer.ids) < tokens


def chats(stack: Stack, count: int = 4, **options: object) -> list[Answer]:
    body = {"max_tokens": GENERATED, "temperature": 0.8, **options}
    requests = [stream(stack.url, prompt=prompt_ids(i, 60), seed=i, **body) for i in range(count)]
    cancelled = stream(stack.url, prompt=prompt_ids(9, 60), **body | {"on_tokens": hang_up_at(30)})
    return together(*requests, cancelled)[:count]


@pytest.mark.parametrize("policy", ["watermark", pytest.param("lookahead", marks=pytest.mark.long)])
def test_a_run_under_pressure_replays(tmp_path, policy):
    path = tmp_path / "run.journal"
    settings = {"model": "bard", "ctx": CTX, "slots": 5, "draft": 2, "park_mode": "auto", "policy": policy, "journal": path}
    with Stack(tmp_path / "run", **settings) as stack:
        answers = chats(stack)
        assert [answer.finish_reason for answer in answers] == ["length"] * 4
        parks = sum(answer.parkade["parks"] for answer in answers)
        assert parks, "the pool was never short: the test shows nothing"
        assert stack.stop() == 0
    replayed = replay(path)
    assert replayed.difference == ""
    assert replayed.parks["pressure"] >= parks
    assert replayed.rows >= 4 * GENERATED / 3
    assert (replayed.header.worker, replayed.header.model) == ("worker0", "bard")


def test_both_lives_of_a_killed_worker_replay(tmp_path):
    path, killed = tmp_path / "run.journal", []
    with Stack(tmp_path / "run", model="bard", ctx=CTX, slots=5, draft=2, journal=path) as stack:
        chats(stack)
        answers = chats(stack, on_tokens=stack.kill_worker_at(100, killed))
        assert killed and [len(answer.ids) for answer in answers] == [GENERATED] * 4
        assert stack.stop() == 0
    first, second = replay(path), replay(tmp_path / "run.journal.1")
    assert (first.difference, second.difference) == ("", "")
    assert first.steps > GENERATED / 3 and second.steps > 10, "a life is missing"
