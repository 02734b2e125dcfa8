"""How a sequence ends, and what it may say before."""

import pytest

from gpu_worker.policy.events import Emit, Finish, Reserve, RowResult, StepDone
from tests.policy.story import Story
from wire.messages import Logprob

EOS, STOP = 2, 3


def test_a_prompt_that_cannot_fit_is_refused_at_once_with_the_numbers():
    story = Story()
    story.submit("a", 80)
    finish = story.ending("a")
    assert (finish.reason, finish.code) == ("error", "context_length_exceeded")
    assert "80 tokens" in finish.error and "may use 80 cells (pool 80, context 1000)" in finish.error
    assert finish.usage.prompt_tokens == 80
    assert story.scheduler.idle


def test_the_models_context_counts_like_the_pool():
    story = Story(max_context=30)
    story.submit("long", 30)
    assert story.ending("long").code == "context_length_exceeded"
    story.submit("a", 29)
    story.until(lambda: story.scheduler.idle)
    assert (story.ending("a").reason, story.ending("a").usage.completion_tokens) == ("length", 1)


def test_a_prompt_that_just_fits_gets_one_token():
    story = Story()
    story.submit("a", 79, max_tokens=1000)
    story.until(lambda: story.scheduler.idle)
    assert (story.ending("a").reason, story.said["a"]) == ("length", [7])


def test_a_prompt_without_tokens_is_an_error():
    story = Story()
    story.submit("a", [])
    assert story.ending("a").code == "bad_request"


def test_more_than_fits_is_no_error_but_length_also_after_a_park():
    story = Story()
    story.submit("a", 20, max_tokens=10**6)
    story.submit("b", 10, max_tokens=10**6)
    story.until(lambda: story.scheduler.idle, most=1000)
    assert story.parked()
    for name, tokens in (("a", 60), ("b", 70)):
        assert (story.ending(name).reason, story.ending(name).usage.completion_tokens) == ("length", tokens)


def test_max_tokens():
    story = Story()
    story.submit("a", 5, max_tokens=3)
    story.until(lambda: story.scheduler.idle)
    assert (story.ending("a").reason, story.said["a"]) == ("length", [7, 7, 7])


@pytest.mark.parametrize(
    ("token", "options", "reason"),
    [
        (EOS, {}, "stop"),
        (STOP, {"stop_token_ids": [STOP]}, "stop"),
        (STOP, {}, "length"),
        (EOS, {"ignore_eos": True}, "length"),
        (STOP, {"ignore_eos": True, "stop_token_ids": [STOP]}, "stop"),
    ],
)
def test_end_tokens(token, options, reason):
    story = Story(eos_token_ids=(EOS,))
    story.submit("a", 5, max_tokens=4, **options)
    story.step()
    story.step(tokens={"a": [token]})
    story.until(lambda: story.scheduler.idle)
    assert story.ending("a").reason == reason
    assert story.said["a"][:2] == [7, token], "the stop token is delivered too"
    assert len(story.said["a"]) == (2 if reason == "stop" else 4)


def test_an_accepted_run_is_cut_at_the_first_end_token():
    story = Story(eos_token_ids=(EOS,), draft_max=3)
    story.submit("a", 5)
    story.step()
    story.step(tokens={"a": [8, EOS, 9, 10]})
    assert story.ending("a").reason == "stop"
    assert story.said["a"] == [7, 8, EOS]
    assert story.ending("a").usage.completion_tokens == 3


def test_an_accepted_run_is_cut_at_max_tokens_and_its_logprobs_with_it():
    story = Story(draft_max=3)
    story.submit("a", 5, max_tokens=3)
    story.step()
    plan = story.plan()
    (row,) = plan.rows
    assert row.draft == 1, "two tokens are left: one draft and one drawn"
    logprobs = [Logprob(token, -1.0) for token in (8, 9, 10)]
    story.handle(StepDone([RowResult("a", [8, 9, 10], logprobs)], plan.epoch))
    story.plan()
    emit = story.actions(Emit)[-1]
    assert (emit.offset, emit.tokens, emit.logprobs) == (1, [8, 9], logprobs[:2])
    assert story.ending("a").reason == "length"


def test_before_min_tokens_the_end_tokens_are_banned_and_no_draft_crosses_the_border():
    story = Story(eos_token_ids=(EOS,), draft_max=3)
    story.submit("a", 5, min_tokens=4, stop_token_ids=[STOP])
    plan = story.step()
    assert story.row(plan, "a").banned == (EOS, STOP)
    plan = story.step(tokens={"a": [7, 7]})
    assert story.row(plan, "a").draft == 2, "tokens 2, 3 and 4 are banned, 5 is not"
    plan = story.step()
    assert story.row(plan, "a").draft == 0, "token 4 is banned, 5 is not"
    assert story.row(plan, "a").banned == (EOS, STOP)
    assert story["a"].generated == 4
    plan = story.step(tokens={"a": [EOS]})
    assert story.row(plan, "a").banned == ()
    assert story.ending("a").reason == "stop"


def test_a_row_that_could_not_be_computed_ends_its_sequence_only():
    story = Story()
    story.submit("a", 5)
    story.submit("b", 5, max_tokens=5)
    plan = story.plan()
    story.handle(StepDone([RowResult("a", error="logits are not finite"), RowResult("b", [7])], plan.epoch))
    story.until(lambda: story.scheduler.idle)
    assert (story.ending("a").reason, story.ending("a").error) == ("error", "logits are not finite")
    assert story.ending("b").reason == "length"
    assert story.used == 0


def test_the_last_word_comes_once_and_after_the_last_tokens():
    story = Story(park_every=2)
    story.submit("a", 5, max_tokens=6)
    story.until(lambda: story.scheduler.idle)
    story.steps(3)
    of_a = [action for action in story.log if getattr(action, "request_id", "") == "a" and not isinstance(action, Reserve)]
    assert isinstance(of_a[-1], Finish)
    assert sum(isinstance(action, Finish) for action in of_a) == 1
    offsets = [action.offset for action in of_a if isinstance(action, Emit)]
    assert offsets == list(range(6))
