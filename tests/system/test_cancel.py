"""Cancel in every state: what the stream held comes back, and nobody else is touched."""

import asyncio

import pytest

from router.client import Client
from tests.system.stack import STREAM_TIMEOUT_S, Stack, prompt, stream, together
from wire.messages import Notice, Status, Tokens

CTX = 512
PROMPT_IDS = list(range(1000, 1150))


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with Stack(tmp_path_factory.mktemp("cancel") / "run", ctx=CTX, slots=2, step_tokens=64) as stack:
        yield stack


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, STREAM_TIMEOUT_S))


async def until(client: Client, condition) -> Status:
    """Ask the router until its status is as wanted; each question waits for its answer."""
    for _ in range(20_000):
        status = await client.status()
        if condition(status):
            return status
    raise AssertionError(f"never came: {status}")


async def assert_everything_is_back(client: Client) -> None:
    status = await until(client, lambda s: s.running == s.parked == s.queued == 0)
    cells = status.workers[0].cells
    assert (cells.active, cells.parking, cells.resuming) == (0, 0, 0)
    assert cells.free + cells.reusable == CTX
    assert status.used_bytes == 0
    assert all(slot.state == "idle" for slot in status.slots)


def state_of(status: Status, request_id: str) -> str:
    return next((slot.state for slot in status.slots if slot.request_id == request_id), "")


async def keep_reading(client: Client, request_id: str, count: int, **options) -> list[int]:
    ids = []
    options |= {"request_id": request_id, "max_tokens": count, "ignore_eos": True, "temperature": 0}
    async for message in client.generate(PROMPT_IDS[:50], **options):
        if isinstance(message, Tokens):
            ids += message.tokens
    return ids


@pytest.mark.parametrize("when", ["queued", "prefill", "running", "parked"])
def test_cancel_gives_everything_back_and_touches_nobody(stack, when):
    async def scenario() -> None:
        async with Client(stack.address) as client:
            expected = await keep_reading(client, "alone", 120)
            neighbour = asyncio.create_task(keep_reading(client, "neighbour", 120))
            others = []
            if when == "queued":
                others = [asyncio.create_task(keep_reading(client, "other", 120))]
                await until(client, lambda s: s.running == 2)
            victim = client.generate(PROMPT_IDS, max_tokens=300, request_id="victim", ignore_eos=True, temperature=0)
            reading = asyncio.create_task(anext(victim))
            if when == "queued":
                await until(client, lambda s: s.queued >= 1)
            elif when == "prefill":
                await until(client, lambda s: state_of(s, "victim") in ("running", "waiting"))
            else:
                assert isinstance(await reading, Tokens)
            if when == "parked":
                await client.park("victim")
                async for message in victim:
                    if isinstance(message, Notice) and message.event == "parked":
                        break
            await client.cancel("victim")
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await victim.aclose()
            assert await neighbour == expected
            await asyncio.gather(*others)
            await assert_everything_is_back(client)

    run(scenario())


def test_cancel_at_random_moments_of_parking_and_resuming(stack):
    """Park and resume again and again; the cancel lands wherever it lands."""

    async def scenario() -> None:
        async with Client(stack.address) as client:
            expected = await keep_reading(client, "alone", 150)
            neighbour = asyncio.create_task(keep_reading(client, "neighbour", 150))
            for number in range(12):
                victim = client.generate(PROMPT_IDS, max_tokens=300, request_id=f"victim-{number}", ignore_eos=True)
                await anext(victim)
                parking = asyncio.create_task(client.park(f"victim-{number}"))
                await asyncio.sleep(0)  # it is sent
                for _ in range(number % 4):
                    await client.status()  # a round trip: the copy goes on meanwhile
                if number % 3:
                    await client.resume(f"victim-{number}")
                await client.cancel(f"victim-{number}")
                await victim.aclose()
                assert (await parking).code in ("", "conflict")  # parked, or resumed or cancelled before
            assert await neighbour == expected
            await assert_everything_is_back(client)

    run(scenario())


def test_a_hang_up_cancels(stack):
    answer = together(stream(stack.url, prompt=prompt(3), max_tokens=400, on_tokens=lambda answer: len(answer.ids) < 5))[0]
    assert 5 <= len(answer.ids) < 400

    async def scenario() -> None:
        async with Client(stack.address) as client:
            await assert_everything_is_back(client)

    run(scenario())
