"""Classes with real processes: who is more important is never parked and first, equals leave each other alone, nobody starves."""

import asyncio

import pytest

from tests.system.stack import Answer, Stack, prompt_ids, stream, together

CTX = 640
URGENT = {"prompt": prompt_ids(9, 150), "max_tokens": 50, "temperature": 0.8, "seed": 9, "priority": 0}
IMPORTANT = [{**URGENT, "max_tokens": 100, "prompt": prompt_ids(10 + i, 100 - 20 * i)} for i in range(2)]
LOW_CLASS = [
    {"prompt": prompt_ids(i, 60 + 20 * i), "max_tokens": 400, "temperature": 0.8, "seed": i, "priority": 10} for i in range(4)
]
PUMPS, PUMPED = 4, 100  # clients, and the most requests that each of them sends
SMALL = 512


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A server with a pool that holds everything, and what it has answered."""
    with Stack(tmp_path_factory.mktemp("alone") / "run", model="bard", ctx=8192, slots=4) as stack:
        stack.known = {}
        yield stack


def alone(large: Stack, request: dict) -> list[int]:
    """Its tokens when nobody else is there."""
    if (key := repr(request)) not in large.known:
        (answer,) = together(stream(large.url, **request))
        assert answer.parkade["parks"] == 0
        large.known[key] = answer.ids
    return large.known[key]


def assert_whole(answers: list[Answer], expected: list[list[int]]) -> None:
    assert [(answer.finish_reason, answer.error, answer.done) for answer in answers] == [("length", None, True)] * len(expected)
    assert [answer.ids for answer in answers] == expected


def amid(stack: Stack, others: list[dict], begin, newcomers: list[dict]) -> tuple[list[Answer], list[bool], list[Answer]]:
    """The newcomers, sent as soon as `begin(others so far)` holds: their answers, which of the others had ended before, and what
    became of the others."""

    async def scenario():
        seen: dict[int, Answer] = {}
        now = asyncio.Event()

        def look(answer: Answer) -> None:
            seen[id(answer)] = answer
            if begin(list(seen.values())):
                now.set()

        tasks = [asyncio.create_task(stream(stack.url, on_tokens=look, **other)) for other in others]
        begins = asyncio.create_task(now.wait())
        await asyncio.wait([begins, *tasks], return_when=asyncio.FIRST_COMPLETED)
        assert now.is_set(), "one of them ended before it began: the test shows nothing"
        new = await asyncio.gather(*(stream(stack.url, **newcomer) for newcomer in newcomers))
        return new, [task.done() for task in tasks], await asyncio.gather(*tasks)

    return together(scenario())[0]


def somebody_is_parked(answers: list[Answer]) -> bool:
    return any("preempted" in answer.comments for answer in answers)


@pytest.mark.parametrize(
    ("policy", "slots"),
    [
        ("watermark", 6),  # there are seats, and no cell
        ("watermark", 2),  # there is neither
        *(pytest.param(policy, slots, marks=pytest.mark.long) for policy in ("lookahead", "ondemand") for slots in (6, 2)),
    ],
)
def test_important_requests_among_pressure_are_never_parked_and_finish_first(tmp_path, large, policy, slots):
    """There are two, as one would be protected anyway."""
    with Stack(tmp_path / "run", model="bard", ctx=CTX, slots=slots, policy=policy) as stack:
        important, ended_before, low = amid(stack, LOW_CLASS, somebody_is_parked, IMPORTANT)
        assert_whole([*important, *low], [alone(large, request) for request in (*IMPORTANT, *LOW_CLASS)])
        assert [answer.parkade["parks"] for answer in important] == [0, 0]
        assert not any(ended_before), "they were not the first to finish"
        assert sum(answer.parkade["parks"] for answer in low) > 1
        assert stack.metric("parkade_requests_preempted") == 0
        assert stack.stop() == 0


@pytest.mark.parametrize(("slots", "ctx"), [(3, 8192), (4, 4096)], ids=["a seat", "cells"])
@pytest.mark.parametrize(("priority", "parks"), [(0, 1), (10, 0)], ids=["better", "equal"])
def test_a_better_class_takes_the_room_of_a_worse_one_and_an_equal_class_does_not(tmp_path, large, slots, ctx, priority, parks):
    """The three that are there fit together to their ends; the newcomer does not fit beside them."""
    here = [{**LOW_CLASS[i], "prompt": prompt_ids(i, 800), "max_tokens": 450} for i in range(3)]
    newcomer = {"prompt": prompt_ids(8, 900), "max_tokens": 50, "temperature": 0.8, "seed": 8, "priority": priority}
    with Stack(tmp_path / "run", model="bard", ctx=ctx, slots=slots, policy="watermark") as stack:
        new, _, others = amid(stack, here, lambda answers: len(answers) == 3, [newcomer])
        assert_whole([*new, *others], [alone(large, {**request, "priority": 0}) for request in (newcomer, *here)])
        assert new[0].parkade["parks"] == 0
        assert sum(answer.parkade["parks"] for answer in others) == parks


def test_a_low_class_that_waited_too_long_comes_back_while_better_ones_keep_coming(tmp_path, large):
    """It is larger than what one of the better ones leaves: without its turn it would wait until there are no more of them."""
    low = {**LOW_CLASS[0], "prompt": prompt_ids(5, 200), "max_tokens": 250}
    came_back, sent = [], []

    async def scenario(stack: Stack):
        grown, over = asyncio.Event(), asyncio.Event()

        def on_tokens(answer: Answer) -> None:
            if len(answer.ids) >= 20:
                grown.set()
            if "resumed" in answer.comments and not over.is_set():
                came_back.append(len(sent))
                over.set()

        async def pump(number: int) -> list[Answer]:
            answers = []
            while len(answers) < PUMPED and not over.is_set():
                sent.append(number)
                answers.append(await stream(stack.url, **{**URGENT, "seed": number}))
            return answers

        task = asyncio.create_task(stream(stack.url, on_tokens=on_tokens, **low))
        await asyncio.wait([task, asyncio.create_task(grown.wait())], return_when=asyncio.FIRST_COMPLETED)
        better = await asyncio.gather(*(pump(number) for number in range(PUMPS)))
        return await task, better

    with Stack(tmp_path / "run", model="bard", ctx=SMALL, slots=2, max_park_s=1) as stack:
        answer, better = together(scenario(stack))[0]
        assert answer.parkade["parks"] > 0, "it was never parked: the test shows nothing"
        assert came_back and came_back[0] < PUMPS * PUMPED, "it came back only when nobody else was left"
        assert_whole([answer], [alone(large, low)])
        for number, answers in enumerate(better):
            assert_whole(answers, [alone(large, {**URGENT, "seed": number})] * len(answers))
