"""Parked, recomputed and cancelled while it drafts, on a hybrid: cells, recurrent state and head come back as they were."""

import asyncio

import pytest

from router.client import Client
from tests.system.models import model_of
from tests.system.stack import STREAM_TIMEOUT_S, Answer, Stack, prompt, stream, together
from wire.messages import Status, Tokens

CTX = 4096
DRAFT = 2
KINDS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 7}}
LENGTHS = {7: 600, 50: 1000, 200: 2000}  # forced parks every N tokens -> tokens generated: 85 + 19 + 9 parks for each of KINDS


def one(stack: Stack, kind: str, tokens: int) -> Answer:
    return together(request(stack, kind, tokens))[0]


def request(stack: Stack, kind: str, tokens: int, **options: object):
    return stream(stack.url, prompt=prompt(1), max_tokens=tokens, logprobs=1, **KINDS[kind], **options)


def company(stack: Stack, tokens: int) -> list:
    return [stream(stack.url, prompt=prompt(2 + i, 60 + 40 * i), max_tokens=tokens, temperature=1.0, seed=i) for i in range(3)]


def assert_equal(answer: Answer, whole: Answer) -> None:
    """`answer` is what `whole` began with."""
    assert answer.error is None and answer.finish_reason == "length"
    assert answer.ids == whole.ids[: len(answer.ids)]
    assert whole.text.startswith(answer.text.rstrip("\ufffd"))
    assert answer.logprobs == whole.logprobs[: len(answer.ids)]


def since(before: dict, after: dict) -> dict[int, tuple[int, int]]:
    """(drafted, accepted) by position between two readings."""
    return {n: (after[n][0] - before.get(n, (0, 0))[0], after[n][1] - before.get(n, (0, 0))[1]) for n in after}


@pytest.fixture(scope="module")
def unparked(tmp_path_factory):
    """(model, dtype, tokens) -> kind -> (answer, drafts), each alone and never parked."""
    known = {}

    def ask(model: str, dtype: str, tokens: int) -> dict[str, tuple[Answer, dict]]:
        if (model, dtype, tokens) not in known:
            folder = tmp_path_factory.mktemp("unparked")
            with Stack(folder / "run", model=model_of(model, folder), ctx=CTX, dtype=dtype, draft=DRAFT) as stack:
                found = known[model, dtype, tokens] = {}
                for kind in KINDS:
                    before = stack.drafts()
                    answer = one(stack, kind, tokens)
                    assert (len(answer.ids), answer.parkade["parks"], answer.parkade["exact"]) == (tokens, 0, True)
                    found[kind] = answer, since(before, stack.drafts())
        return known[model, dtype, tokens]

    return ask


def cases(fast: set) -> list:
    every = [(model, dtype, n) for model, dtype in (("bard", "f32"), ("bard", "auto"), ("smollm2", "auto")) for n in LENGTHS]
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.long, id="-".join(map(str, case))) for case in every]


@pytest.mark.parametrize(("model", "dtype", "every"), cases({("bard", "f32", 7)}))
def test_saved_parks_change_neither_the_text_nor_what_the_head_gets_right(tmp_path, unparked, model, dtype, every):
    tokens = LENGTHS[every]
    expected = unparked(model, dtype, tokens)
    with Stack(tmp_path / "run", model=model_of(model, tmp_path), ctx=CTX, dtype=dtype, draft=DRAFT, park_every=every) as stack:
        for kind, (whole, whole_drafts) in expected.items():
            before = stack.drafts()
            answer = one(stack, kind, tokens)
            assert_equal(answer, whole)
            assert answer.parkade["parks"] == (tokens - 1) // every
            assert answer.parkade["recomputed_tokens"] == 0
            assert since(before, stack.drafts()) == whole_drafts, "the head does not draft what it did"
        assert stack.metric("parkade_hostcache_used_bytes") == 0


@pytest.mark.parametrize(("model", "dtype", "every"), cases({("bard", "f32", 50)}))
def test_recomputed_accompanied_and_replayed_runs_equal_the_unparked_run(tmp_path, unparked, model, dtype, every):
    tokens = {7: 120, 50: 150, 200: 700}[every]
    expected = unparked(model, dtype, LENGTHS[every if tokens > LENGTHS[7] else 7])
    settings = {"ctx": CTX, "dtype": dtype, "draft": DRAFT, "park_every": every, "park_ram": "0", "step_tokens": 48}
    with Stack(tmp_path / "run", model=model_of(model, tmp_path), no_reuse=True, **settings) as stack:
        answer, *others = together(request(stack, "seeded", tokens), *company(stack, tokens))
        assert_equal(answer, expected["seeded"][0])
        assert answer.parkade["recomputed_tokens"] > tokens
        assert all(len(other.ids) == tokens for other in others)
        killed: list[int] = []
        at_half = stack.kill_worker_at(tokens // 2, killed)
        answer, *others = together(request(stack, "greedy", tokens, on_tokens=at_half), *company(stack, tokens))
        assert killed
        assert_equal(answer, expected["greedy"][0])
        assert all(len(other.ids) == tokens and other.done for other in others)


def test_cancelled_in_the_middle_of_drafting_everything_comes_back_and_nobody_is_touched(tmp_path):
    """Cancels land in whatever step is under way: of one in its prompt, drafting, parking, parked, resuming."""
    ids = list(range(300, 450))
    options = {"ignore_eos": True, "temperature": 0}

    async def read(client: Client, request_id: str) -> list[int]:
        messages = client.generate(ids[:50], request_id=request_id, max_tokens=400, **options)
        return sum([message.tokens async for message in messages if isinstance(message, Tokens)], [])

    async def everything_is_back(client: Client) -> Status:
        while (status := await client.status()).running or status.parked or status.queued:
            pass
        return status

    async def scenario() -> None:
        async with Client(stack.address) as client:
            expected = await read(client, "alone")
            neighbour = asyncio.create_task(read(client, "neighbour"))
            for number in range(24):
                victim = client.generate(ids, max_tokens=300, request_id=f"victim-{number}", **options)
                seen = 0
                while seen < number % 9:
                    message = await anext(victim)
                    seen += len(message.tokens) if isinstance(message, Tokens) else 0
                if number % 2:
                    parking = asyncio.create_task(client.park(f"victim-{number}"))
                    await asyncio.sleep(0)  # it is sent
                    for _ in range(number % 4):
                        await client.status()  # a round trip: the copy goes on meanwhile
                    if number % 3:
                        await client.resume(f"victim-{number}")
                await client.cancel(f"victim-{number}")
                await victim.aclose()
                if number % 2:
                    assert (await parking).code in ("", "conflict", "unknown_request")  # parked; cancelled before; not even sent
            assert await neighbour == expected
            cells = (await everything_is_back(client)).workers[0].cells
            assert (cells.active, cells.parking, cells.resuming, cells.free + cells.reusable) == (0, 0, 0, 1024)
            assert await read(client, "after") == expected  # in a state slot that others have used
            assert (await everything_is_back(client)).used_bytes == 0

    with Stack(tmp_path / "run", model="bard", ctx=1024, slots=2, draft=DRAFT, step_tokens=64) as stack:
        asyncio.run(asyncio.wait_for(scenario(), STREAM_TIMEOUT_S))
        assert stack.drafts()[1][1] > 0


@pytest.mark.parametrize("ctx", [256, pytest.param(8192, marks=pytest.mark.long)])
def test_four_at_once_each_reach_the_last_cell_of_the_pool(tmp_path, ctx):
    """Drafts stop at the edge: none is cut short for cells that its drafts would need, none fails."""
    bodies = [{"prompt": prompt(i, 16), "max_tokens": 10**6, "temperature": 0.8, "seed": i} for i in range(4)]
    with Stack(tmp_path / "run", model="bard", ctx=ctx, slots=4, draft=8) as stack:
        alone = together(stream(stack.url, **bodies[2]))[0]
        answers = together(*(stream(stack.url, **body) for body in bodies))
        for answer in [alone, *answers]:
            assert (answer.finish_reason, answer.error, answer.usage["total_tokens"]) == ("length", None, ctx)
        assert answers[2].same_as(alone)
        assert sum(answer.parkade["parks"] for answer in answers) > 0
        assert stack.drafts()[1][1] > 0
