"""Each policy with real processes: who is parked, that all are whole and equal their solo run, and what `off` does instead."""

import asyncio

import pytest

from tests.system.stack import Answer, Stack, by_zeromq, hear, prompt_ids, stream, together

PARKING = ("watermark", "lookahead", "ondemand")
ONE_FAST = ["watermark", *(pytest.param(policy, marks=pytest.mark.long) for policy in PARKING[1:])]
OVER = (1.5, 2, 4)
CHATS = 4
PROMPT, GENERATED = 32, 480
WANTED = CHATS * (PROMPT + GENERATED)  # cells
HUGE = {"prompt": prompt_ids(9, 500), "max_tokens": 400, "temperature": 0.8, "seed": 9}
SHORT = [{"prompt": prompt_ids(20 + i, 24 + 8 * i), "max_tokens": 150, "temperature": 0.8, "seed": i} for i in range(8)]


def bodies(model: str = "bard") -> list[dict]:
    """Four chats, drawn at random on bard and greedy on SmolLM2."""
    heat = {"bard": 0.8, "smollm2": 0}[model]
    return [{"prompt": prompt_ids(i, PROMPT), "max_tokens": GENERATED, "temperature": heat, "seed": i} for i in range(CHATS)]


def pool(over: float) -> int:
    """Cells of a pool that the four chats oversubscribe so many times; at 4 each of them needs all of it."""
    return int(WANTED / over) // 16 * 16


def ask(stack: Stack, requests: list[dict]) -> list[Answer]:
    return together(*(stream(stack.url, **request) for request in requests))


def assert_whole(answers: list[Answer], alone: list[Answer]) -> None:
    ends = [(answer.finish_reason, answer.error, answer.done) for answer in answers]
    assert ends == [("length", None, True)] * len(alone)
    assert [(answer.ids, answer.text) for answer in answers] == [(answer.ids, answer.text) for answer in alone]


def assert_all_is_back(stack: Stack) -> None:
    assert stack.metric("parkade_hostcache_used_bytes") == 0
    assert stack.metric("parkade_requests_preempted") == 0
    assert {slot["state"] for slot in stack.slots()} == {"idle"}
    assert stack.stop() == 0


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(requests, model) -> the answers of each of them alone, in a pool that holds everything."""
    stacks: dict[str, Stack] = {}
    known: dict[tuple[str, str], Answer] = {}

    def one(request: dict, model: str) -> Answer:
        if (key := (model, repr(request))) not in known:
            if model not in stacks:
                stacks[model] = Stack(tmp_path_factory.mktemp("alone") / "run", model=model, ctx=4096, slots=4)
            (known[key],) = ask(stacks[model], [request])
            assert known[key].parkade["parks"] == 0
        return known[key]

    yield lambda requests, model="bard": [one(request, model) for request in requests]
    for stack in stacks.values():
        stack.stop()


# four that do not fit together ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("policy", PARKING)
@pytest.mark.parametrize("model", ["bard", pytest.param("smollm2", marks=pytest.mark.long)])
def test_four_chats_are_whole_however_small_the_pool(tmp_path, alone, model, policy, over):
    with Stack(tmp_path / "run", model=model, ctx=pool(over), slots=CHATS, policy=policy) as stack:
        answers = ask(stack, bodies(model))
        assert_whole(answers, alone(bodies(model), model))
        parks = sum(answer.parkade["parks"] for answer in answers)
        assert parks > 0, "the pool was never short: the test shows nothing"
        assert parks == stack.metric("parkade_preempt_total", kind="pressure")
        assert sum(answer.parkade["recomputed_tokens"] for answer in answers) == 0
        assert_all_is_back(stack)


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ({"resume_order": "head"}, {"save asked"}),
        ({"park_mode": "recompute"}, {"recompute asked"}),
        ({"park_ram": "0"}, {"recompute asked"}),
        ({"park_ram": "1MiB"}, {"save asked", "recompute denied_full"}),
        ({"park_mode": "auto"}, {"save unmeasured", "save cheaper", "recompute copy_dearer"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ONE_FAST)
def test_neither_the_order_nor_the_way_of_coming_back_changes_a_text(tmp_path, alone, policy, settings, reasons):
    with Stack(tmp_path / "run", model="bard", ctx=pool(4), slots=CHATS, policy=policy, **settings) as stack:
        answers = ask(stack, bodies())
        assert_whole(answers, alone(bodies()))
        parked = [answer for answer in answers if answer.parkade["parks"]]
        assert parked, "the pool was never short: the test shows nothing"
        assert all({"preempted", "resumed"} <= set(answer.comments) for answer in parked)
        kept = stack.parks()
        assert sum(kept.values()) == sum(answer.parkade["parks"] for answer in answers)
        assert set(kept) <= reasons if settings.get("park_mode") == "auto" else set(kept) == reasons, kept
        recomputed = sum(answer.parkade["recomputed_tokens"] for answer in answers)
        assert (recomputed > 0) == any(how.startswith("recompute") for how in kept)
        if reasons == {"recompute asked"}:
            assert stack.metric("parkade_hostcache_held_bytes") == 0, "somebody was given a lease"
        assert_all_is_back(stack)


@pytest.mark.parametrize("over", [pytest.param(1.5, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)])
def test_without_parking_who_finds_no_cell_fails_with_a_clear_error_and_nobody_else(tmp_path, alone, over):
    with Stack(tmp_path / "run", model="bard", ctx=pool(over), slots=CHATS, policy="off") as stack:
        answers = ask(stack, bodies())
        failed = [answer for answer in answers if answer.error]
        assert failed, "the pool was never full: the test shows nothing"
        for answer, whole in zip(answers, alone(bodies()), strict=True):
            assert answer.done and answer.ids == whole.ids[: len(answer.ids)]
            if answer.error:
                assert answer.error["code"] == "kv_cache_full"
                assert f"{pool(over)} of {pool(over)} cells" in answer.error["message"]
                assert "--policy off" in answer.error["message"]
            else:
                assert_whole([answer], [whole])
        assert stack.metric("parkade_preempt_total", kind="pressure") == 0
        assert_whole(ask(stack, bodies()[:1]), alone(bodies()[:1]))
        assert_all_is_back(stack)


# who is parked --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "first"), [("watermark", 2), ("lookahead", 0), pytest.param("ondemand", 0, marks=pytest.mark.long)]
)
def test_the_newest_is_parked_first_at_the_watermark_and_else_the_smallest(tmp_path, policy, first):
    """The oldest is the smallest, the largest neither the oldest nor the newest. At which line is for tests/policy to say: until
    the client hears of a park, the others have gone on."""
    order = []

    async def scenario(client):
        def listener(number):
            def listen(heard):
                if heard.notices and number not in order:
                    order.append(number)

            return listen

        calls = [hear(client, prompt_ids(i, size), max_tokens=450, on_message=listener(i)) for i, size in enumerate(sizes)]
        return await asyncio.gather(*calls)

    sizes = (40, 200, 120)
    with Stack(tmp_path / "run", model="bard", ctx=960, slots=3, policy=policy, draft=0) as stack:
        heard = by_zeromq(stack, scenario)
    assert [len(one.ids) for one in heard] == [450] * 3
    assert order[0] == first
    assert heard[1].parks == 0, "the largest was parked"
    assert all(one.notices[i].kind == "pressure" for one in heard for i in range(len(one.notices)))


@pytest.mark.parametrize("policy", ONE_FAST)
def test_one_that_is_still_in_its_prompt_may_be_parked(tmp_path, alone, policy):
    """Three decodes leave one token of each step to the prompt of the fourth, the newest and smallest: they outgrow it."""
    sizes, lengths = (220, 220, 220, 200), (300, 300, 300, 50)
    options = [{"max_tokens": length, "temperature": 0.8, "seed": i} for i, length in enumerate(lengths)]

    async def scenario(client):
        asked = [
            hear(client, prompt_ids(i, size), max_tokens=length, temperature=0.8, seed=i)
            for i, (size, length) in enumerate(zip(sizes, lengths, strict=True))
        ]
        return await asyncio.gather(*asked)

    with Stack(tmp_path / "run", model="bard", ctx=1216, slots=4, policy=policy, step_tokens=4, draft=0) as stack:
        heard = by_zeromq(stack, scenario)
        assert heard[3].notices and heard[3].known[0] == 0, "it was never parked in its prompt: the test shows nothing"
        whole = alone([{"prompt": prompt_ids(i, size), **options[i]} for i, size in enumerate(sizes)])
        assert [one.ids for one in heard] == [answer.ids for answer in whole]
        assert_all_is_back(stack)


# shapes of load -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ONE_FAST)
def test_many_short_ones_beside_a_huge_one_that_is_never_parked(tmp_path, alone, policy):
    with Stack(tmp_path / "run", model="bard", ctx=960, slots=5, policy=policy) as stack:
        answers = ask(stack, [HUGE, *SHORT])
        assert_whole(answers, alone([HUGE, *SHORT]))
        assert answers[0].parkade["parks"] == 0
        assert sum(answer.parkade["parks"] for answer in answers) > 0, "the pool was never short: the test shows nothing"
        assert_all_is_back(stack)


@pytest.mark.parametrize("policy", ONE_FAST)
def test_siblings_that_do_not_fit_together_are_what_they_are_in_a_large_pool(tmp_path, policy):
    def answers(stack: Stack) -> list[dict]:
        body = {"prompt": prompt_ids(3, 100), "max_tokens": 200, "n": 4, "seed": 5, "ignore_eos": True, "return_token_ids": True}
        reply = stack.http.post("/v1/completions", json=body).raise_for_status().json()
        parks.append(reply["parkade"]["parks"])
        return [(choice["finish_reason"], choice["token_ids"], choice["text"]) for choice in reply["choices"]]

    parks: list[int] = []
    with Stack(tmp_path / "large", model="bard", ctx=4096, slots=4) as stack:
        whole = answers(stack)
    with Stack(tmp_path / "run", model="bard", ctx=608, slots=4, policy=policy) as stack:
        assert answers(stack) == whole
        assert len({text for _, _, text in whole}) == 4
        assert parks[0] == 0 < parks[1]
        assert_all_is_back(stack)


@pytest.mark.parametrize("policy", [*ONE_FAST, "off"])
def test_what_outgrows_the_pool_alone_ends_with_length_and_what_never_fits_is_refused_at_once(tmp_path, policy):
    ctx, refused = 512, []
    endless = {"prompt": prompt_ids(1, 60), "max_tokens": 10**6, "temperature": 0.8, "seed": 1}

    with Stack(tmp_path / "run", model="bard", ctx=ctx, slots=3, policy=policy) as stack:

        def ask_too_much(answer: Answer) -> None:
            if not refused and (policy == "off" or stack.metric("parkade_requests_preempted") > 0):
                body = {"prompt": prompt_ids(2, ctx), "max_tokens": 1}
                refused.append(stack.http.post("/v1/completions", json=body))

        requests = [endless, {**endless, "seed": 2}][: 1 if policy == "off" else 2]
        answers = together(*(stream(stack.url, on_tokens=ask_too_much, **request) for request in requests))
        for answer in answers:
            assert (answer.finish_reason, answer.error, answer.usage["total_tokens"]) == ("length", None, ctx)
        (refusal,) = refused
        assert refusal.status_code == 400
        assert refusal.json()["error"]["code"] == "context_length_exceeded"
        assert refusal.json()["error"]["message"].count(str(ctx)) == 2, "the numbers are missing"
        assert_all_is_back(stack)
