"""Parks and resumes by hand, with real processes: a request is set aside and brought back, and its text is untouched."""

import asyncio

import pytest
from click.testing import CliRunner

from parkade.cli import main
from router.client import Client
from tests.system.stack import Answer, Stack, by_zeromq, each, stream, together
from wire.messages import Finished, Notice, Tokens

BODY = {
    "prompt": list(range(100, 150)),
    "max_tokens": 800,
    "temperature": 0.8,
    "seed": 7,
}  # long: the park must not come too late
OTHER = {"prompt": list(range(300, 340)), "max_tokens": 100, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
WAYS = [pytest.param("64MiB", id="save"), pytest.param("0", id="recompute")]


def served(folder, **settings: object) -> Stack:
    return Stack(folder / "run", model="bard", **({"ctx": 1024, "slots": 2} | settings))


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with served(tmp_path_factory.mktemp("parks")) as stack:
        yield stack


@pytest.fixture(scope="module")
def alone(stack) -> Answer:
    """The undisturbed run."""
    return together(stream(stack.url, **BODY))[0]


def once(at: int, call):
    """An `on_tokens` that calls `call()` when the answer has as many tokens."""
    called = []

    def on_tokens(answer: Answer) -> None:
        if len(answer.ids) >= at and not called:
            called.append(True)
            call()

    return on_tokens


def owned(stack: Stack) -> dict:
    """The entry of the only request."""
    stack.until(lambda: [slot for slot in stack.slots() if slot["request_id"]], "the request has a seat")
    (slot,) = [slot for slot in stack.slots() if slot["request_id"]]
    return slot


def ask(stack: Stack, what: str, slot: int, **body: object) -> dict:
    """POST /slots/{slot}/{what}, which must succeed; the entry."""
    answer = stack.http.post(f"/slots/{slot}/{what}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(stack: Stack, path: str) -> tuple[int, str, str]:
    answer = stack.http.post(path)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


# over HTTP ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("park_ram", WAYS)
def test_the_only_request_is_set_aside_and_brought_back(tmp_path, alone, park_ram):
    with served(tmp_path, slots=1, park_ram=park_ram) as stack:

        def set_aside() -> None:
            slot = owned(stack)
            entry = ask(stack, "park", slot["id"])
            assert (entry["request_id"], entry["state"], entry["held"], entry["n_preempt"]) == (
                slot["request_id"], "parked", True, 1,
            )  # fmt: skip
            assert stack.metric("parkade_requests_preempted") == 1
            other = stack.http.post("/v1/completions", json=OTHER).json()  # the only seat is free
            assert len(other["choices"][0]["token_ids"]) == 100
            assert [s for s in stack.slots() if s["held"]] == [entry | {"parked_ms": owned(stack)["parked_ms"]}]
            assert refusal(stack, f"/slots/{entry['id']}/park") == (
                409, "conflict", f"Slot {entry['id']}: the request is set aside already.",
            )  # fmt: skip
            entry = ask(stack, "resume", entry["id"])
            assert (entry["request_id"], entry["held"]) == (slot["request_id"], False)

        answer = together(stream(stack.url, **BODY, on_tokens=once(100, set_aside)))[0]
        assert answer.same_as(alone)
        assert (answer.parkade["parks"], answer.parkade["recomputed_tokens"] > 0) == (1, park_ram == "0")
        assert [comment for comment in answer.comments if comment != "keep-alive"] == ["preempted", "resumed"]
        assert stack.metric("parkade_preempt_total", kind="explicit") == 1
        assert stack.metric("parkade_requests_preempted") == 0


def test_again_and_again(stack, alone):
    def there_and_back(answer: Answer) -> None:
        slot = ask(stack, "park", owned(stack)["id"], deadline_s=60)
        ask(stack, "resume", slot["id"])

    answer = together(stream(stack.url, **BODY, on_tokens=each(80, there_and_back)))[0]
    assert answer.same_as(alone)
    assert answer.parkade["parks"] >= 5


def test_without_a_resume_it_comes_back_after_its_deadline(stack, alone):
    answer = together(
        stream(stack.url, **BODY, on_tokens=once(100, lambda: ask(stack, "park", owned(stack)["id"], deadline_s=0.3)))
    )[0]
    assert answer.same_as(alone)
    assert answer.parkade["parks"] == 1 and answer.parkade["parked_ms"] >= 290


def test_by_the_commands(stack, alone):
    def command(*words: object) -> tuple[int, str]:
        ran = CliRunner().invoke(main, [*map(str, words), "--url", stack.url])
        return ran.exit_code, ran.output

    def there_and_back() -> None:
        number, request_id = (owned(stack)[key] for key in ("id", "request_id"))
        status, said = command("park", number, "--deadline-s", 60)
        assert status == 0 and request_id in said and "set aside for 60 s at most" in said
        status, said = command("park", number)
        assert (status, said) == (1, f"error: Slot {number}: the request is set aside already. (HTTP 409)\n")
        status, said = command("resume", number)
        assert status == 0 and request_id in said

    assert together(stream(stack.url, **BODY, on_tokens=once(100, there_and_back)))[0].same_as(alone)


def test_what_the_state_does_not_allow(stack, alone):
    assert refusal(stack, "/slots/0/park") == (409, "conflict", "Slot 0 is idle.")
    assert refusal(stack, "/slots/0/resume") == (409, "conflict", "Slot 0 is idle.")
    assert refusal(stack, "/slots/99/park")[:2] == (404, "slot_not_found")

    def meddle() -> None:
        number = owned(stack)["id"]
        assert refusal(stack, f"/slots/{number}/resume") == (
            409, "conflict", f"Slot {number}: the request is not set aside.",
        )  # fmt: skip
        assert stack.http.post(f"/slots/{number}/park", json={"deadline_s": 0}).status_code == 400

    assert together(stream(stack.url, **BODY, on_tokens=once(50, meddle)))[0].same_as(alone)


def test_a_server_that_stops_lets_the_one_set_aside_end(tmp_path, alone):
    with served(tmp_path) as stack:

        def stop() -> None:
            ask(stack, "park", owned(stack)["id"])
            stack.process.terminate()

        assert together(stream(stack.url, **BODY, on_tokens=once(100, stop)))[0].same_as(alone)
        assert stack.process.wait(60) == 0


# by ZeroMQ ------------------------------------------------------------------------------------------------------------
IDS, OPTIONS = BODY["prompt"], {"max_tokens": 400, "temperature": 0.8, "seed": 7}


async def read(client: Client, request_id: str, on_message=None, **options: object) -> list[int]:
    """The tokens of one request like BODY, to its end. `on_message(message, ids)` is awaited after each message."""
    ids: list[int] = []
    async for message in client.generate(IDS, request_id=request_id, ignore_eos=True, **(OPTIONS | options)):
        if isinstance(message, Tokens):
            ids += message.tokens
        if isinstance(message, Finished):
            assert message.reason == "length", message
        if on_message is not None:
            await on_message(message, ids)
    return ids


@pytest.mark.parametrize("park_ram", ["64MiB", pytest.param("0", marks=pytest.mark.long)])
def test_one_set_aside_outlives_its_worker(tmp_path, alone, park_ram):
    with served(tmp_path, park_ram=park_ram) as stack:

        async def scenario(client: Client) -> None:
            killed = []

            async def kill(message, ids: list[int]) -> None:
                if len(ids) >= 100 and not killed:
                    killed.append(stack.pid_of("gpu_worker"))
                    assert (await client.park("r", 600)).slot.state == "parked"
                    stack.kill("gpu_worker")
                    assert len(await read(client, "other", max_tokens=100)) == 100  # in the next life
                    status = await client.status()
                    assert (status.parked, status.running) == (1, 0)
                    assert not [slot for slot in status.slots if slot.request_id]  # it waits in the router, without a seat
                    answer = await client.resume("r")
                    assert (answer.code, answer.slot) == ("", None)

            assert await read(client, "r", kill, max_tokens=800) == alone.ids
            assert killed != [stack.pid_of("gpu_worker")]

        by_zeromq(stack, scenario)


def test_one_that_pressure_has_parked_can_be_set_aside_too(tmp_path, alone):
    with served(tmp_path, ctx=512) as stack:

        async def scenario(client: Client) -> None:
            parked = asyncio.get_running_loop().create_future()

            async def look(message, ids: list[int]) -> None:
                if isinstance(message, Notice) and message.event == "parked" and not parked.done():
                    answer = await client.park(message.request_id)
                    assert (answer.code, answer.slot.state, answer.slot.held) == ("", "parked", True)
                    parked.set_result((message.request_id, message.kind, len(ids)))

            reading = {name: asyncio.create_task(read(client, name, look)) for name in ("a", "b")}
            victim, kind, known = await parked
            (other,) = reading.keys() - {victim}
            assert kind == "pressure"
            assert await reading[other] == alone.ids[:400]
            assert await read(client, "third") == alone.ids[:400]
            status = await client.status()
            (slot,) = [slot for slot in status.slots if slot.request_id]
            assert (status.parked, status.running, slot.request_id, slot.state) == (1, 0, victim, "parked")
            assert slot.n_tokens == len(IDS) + known
            await client.resume(victim)
            assert await reading[victim] == alone.ids[:400]

        by_zeromq(stack, scenario)
        assert stack.metric("parkade_requests_preempted") == 0


def test_one_that_has_not_begun_waits_until_it_is_resumed(tmp_path, alone):
    with served(tmp_path, slots=1) as stack:

        async def scenario(client: Client) -> None:
            first = asyncio.create_task(read(client, "first"))
            await until(client, lambda status: status.running == 1)
            second = asyncio.create_task(read(client, "second"))
            await until(client, lambda status: status.queued == 1)
            answer = await client.park("second")
            assert (answer.code, answer.slot) == ("", None)
            assert await first == alone.ids[:400]
            assert await read(client, "third") == alone.ids[:400]
            assert not second.done()
            await client.resume("second")
            assert await second == alone.ids[:400]

        by_zeromq(stack, scenario)


async def until(client: Client, condition) -> None:
    """Ask for the status until it is as wanted; each question waits for its answer."""
    for _ in range(20_000):
        if condition(await client.status()):
            return
    raise AssertionError("the status never came")
