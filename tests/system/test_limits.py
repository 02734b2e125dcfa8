"""Where it ends: a full queue, a drain, the context's last cell, a client that does not read, one of two workers."""

import asyncio
import contextlib
import json
import signal
import socket

import pytest

from router.client import Client, RejectedError
from tests.system.stack import STREAM_TIMEOUT_S, Answer, Stack, each, prompt, stream, together
from wire.messages import Finished, Notice, Tokens

CTX = 512
SHORT = {"prompt": "The sea", "temperature": 0}
RECEIVE_BUFFER = 4096


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with Stack(tmp_path_factory.mktemp("limits") / "run", ctx=CTX, slots=4) as stack:
        yield stack


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, STREAM_TIMEOUT_S))


def status_of_another(stack: Stack) -> int:
    return stack.http.post("/v1/completions", json={**SHORT, "max_tokens": 1}).status_code


def wholes(answers: list[Answer]) -> list[tuple]:
    return [(len(answer.ids), answer.finish_reason, answer.done, answer.error) for answer in answers]


# the queue ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("max_queued", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_full_queue_refuses_the_next_with_the_time_to_come_again(tmp_path, max_queued):
    with Stack(tmp_path / "run", ctx=CTX, slots=1, max_queued=max_queued) as stack:
        refused = []

        async def scenario() -> list[Answer]:
            first_runs = asyncio.Event()

            def on_tokens(answer: Answer) -> None:
                first_runs.set()
                if len(answer.ids) >= 20 and not refused:
                    stack.until(lambda: stack.metric("parkade_requests_queued") == max_queued, "as many wait as may")
                    refused.append(stack.http.post("/v1/completions", json={**SHORT, "max_tokens": 1}))

            first = asyncio.create_task(stream(stack.url, max_tokens=150, on_tokens=on_tokens, **SHORT))
            await first_runs.wait()
            return await asyncio.gather(first, *(stream(stack.url, max_tokens=30, **SHORT) for _ in range(max_queued)))

        answers = run(scenario())
        assert wholes(answers) == [(150, "length", True, None), *[(30, "length", True, None)] * max_queued]
        (answer,) = refused
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert (answer.json()["error"]["code"], answer.json()["error"]["type"]) == ("queue_full", "rate_limit_error")
        assert status_of_another(stack) == 200


# the drain ------------------------------------------------------------------------------------------------------------
def test_a_drain_finishes_what_runs_and_what_is_parked_and_refuses_the_rest(tmp_path):
    with Stack(tmp_path / "run", ctx=CTX, slots=3, drain_s=120) as stack:
        refused = []

        def drain_once(_: Answer) -> None:
            if not refused and stack.metric("parkade_requests_preempted") > 0:
                stack.process.send_signal(signal.SIGTERM)
                stack.until(lambda: stack.http.get("/health").status_code == 503, "draining")
                refused.append(stack.http.post("/v1/completions", json={**SHORT, "max_tokens": 1}))

        bodies = [{"prompt": prompt(i, 100), "temperature": 0, "max_tokens": 200} for i in range(3)]
        answers = together(*(stream(stack.url, on_tokens=each(8, drain_once), **body) for body in bodies))
        assert refused, "nobody was parked: the test shows nothing"
        assert wholes(answers) == [(200, "length", True, None)] * 3
        assert refused[0].status_code == 503
        assert refused[0].json()["error"]["code"] == "draining"
        assert stack.process.wait(30) == 0


def test_a_second_signal_ends_the_streams_with_an_error_that_they_can_read(tmp_path):
    with Stack(tmp_path / "run", ctx=2048, slots=2, drain_s=600) as stack:
        told = []

        def on_tokens(answer: Answer) -> None:
            if len(answer.ids) >= 10 and not told:
                told.append(stack.process.send_signal(signal.SIGTERM))
                stack.until(lambda: stack.http.get("/health").status_code == 503, "draining")
                stack.process.send_signal(signal.SIGTERM)

        answers = together(*(stream(stack.url, max_tokens=1900, on_tokens=on_tokens, **SHORT) for _ in range(2)))
        for answer in answers:
            assert 0 < len(answer.ids) < 1900 and answer.done
            assert answer.error["type"] == "server_error" and answer.error["code"] in ("draining", "drain_timeout")
        assert stack.process.wait(30) == 1


# the context ----------------------------------------------------------------------------------------------------------
def test_a_prompt_that_leaves_one_cell_yields_one_token_and_a_longer_one_is_refused(stack):
    ids = list(range(1000, 1000 + CTX))
    answer = together(stream(stack.url, prompt=ids[:-1], max_tokens=50, temperature=0))[0]
    assert (len(answer.ids), answer.finish_reason) == (1, "length")
    assert answer.usage["total_tokens"] == CTX
    refused = together(stream(stack.url, prompt=ids, max_tokens=1))[0]
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert refused.error["message"].count(str(CTX)) == 2

    async def by_zeromq() -> None:
        async with Client(stack.address) as client:
            with pytest.raises(RejectedError) as caught:
                async for _ in client.generate(ids, max_tokens=1):
                    pass
            assert (caught.value.code, caught.value.numbers) == (
                "context_length_exceeded", {"prompt_tokens": CTX, "max_context": CTX},
            )  # fmt: skip
            tokens = [m.tokens async for m in client.generate(ids[:-1], max_tokens=1, temperature=0) if isinstance(m, Tokens)]
            assert sum(tokens, []) == answer.ids

    run(by_zeromq())


def test_two_that_each_grow_to_the_whole_pool_both_do(stack):
    bodies = [{"prompt": prompt(i, 80), "max_tokens": 10**6, "temperature": 0} for i in range(2)]
    answers = together(*(stream(stack.url, **body) for body in bodies))
    for answer in answers:
        assert (answer.finish_reason, answer.error, answer.usage["total_tokens"]) == ("length", None, CTX)
    assert sum(answer.parkade["parks"] for answer in answers) > 0


@pytest.mark.long
def test_four_that_each_grow_to_a_large_pool_all_do(tmp_path):
    with Stack(tmp_path / "run", ctx=2048, slots=4) as stack:
        bodies = [{"prompt": prompt(i), "max_tokens": 10**6, "temperature": 0} for i in range(4)]
        alone = together(stream(stack.url, **bodies[3]))[0]
        answers = together(*(stream(stack.url, **body) for body in bodies))
        for answer in answers:
            assert (answer.finish_reason, answer.error, answer.usage["total_tokens"]) == ("length", None, 2048)
        assert answers[3].same_as(alone)


# parked by hand, and by not reading -----------------------------------------------------------------------------------
def test_a_stream_parked_by_hand_lets_the_others_finish_and_goes_on_when_told(stack):
    ids = list(range(2000, 2100))
    options = {"max_tokens": 150, "temperature": 0, "ignore_eos": True}

    async def scenario() -> None:
        async with Client(stack.address) as client:
            alone = sum([m.tokens async for m in client.generate(ids, **options) if isinstance(m, Tokens)], [])
            mine, seen, last, others = [], [], None, []
            async for message in client.generate(ids, request_id="by-hand", **options):
                match message:
                    case Tokens():
                        mine += message.tokens
                        if len(mine) >= 40 and not others:
                            others = [asyncio.create_task(stream(stack.url, max_tokens=100, **SHORT)) for _ in range(3)]
                            await client.park("by-hand")
                    case Notice(event="parked"):
                        seen.append((message.event, message.kind))
                        assert (await client.status()).parked == 1
                        parked = await asyncio.gather(*others)
                        assert wholes(parked) == [(100, "length", True, None)] * 3
                        slots = {slot["request_id"]: slot for slot in stack.slots()}
                        assert (slots["by-hand"]["state"], slots["by-hand"]["is_preempted"]) == ("parked", True)
                        await client.resume("by-hand")
                    case Notice():
                        seen.append((message.event, message.kind))
                    case Finished():
                        last = message
            assert seen == [("parked", "explicit"), ("resumed", "explicit")]
            assert mine == alone
            assert (last.reason, last.usage.parks, last.usage.recomputed_tokens) == ("length", 1, 0)

    before = stack.metric("parkade_preempt_total", kind="explicit")
    run(scenario())
    assert stack.metric("parkade_preempt_total", kind="explicit") == before + 1


def test_a_client_that_stops_reading_is_parked_and_nobody_waits_for_it(tmp_path):
    with Stack(tmp_path / "run", ctx=1024, slots=2) as stack:
        body = {**SHORT, "max_tokens": 700, "logprobs": 20, "return_token_ids": True, "ignore_eos": True, "stream": True}
        host, port = stack.url.removeprefix("http://").split(":")
        with contextlib.closing(socket.socket()) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            slow.settimeout(STREAM_TIMEOUT_S)
            slow.connect((host, int(port)))
            sent = json.dumps(body).encode()
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n%s" % (len(sent), sent))  # fmt: skip
            stack.until(lambda: [slot["state"] for slot in stack.slots()].count("parked") == 1, "the slow one is parked")
            (slot,) = [slot for slot in stack.slots() if slot["state"] == "parked"]
            assert slot["n_tokens"] < 700
            other = together(stream(stack.url, max_tokens=100, **SHORT))[0]
            assert (len(other.ids), other.finish_reason, other.parkade["parks"]) == (100, "length", 0)
            assert [s["n_tokens"] for s in stack.slots() if s["request_id"] == slot["request_id"]] == [slot["n_tokens"]]
            received = bytearray()
            while part := slow.recv(1 << 20):
                received += part
    chunks = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    ids = sum((choice["token_ids"] for chunk in chunks for choice in chunk["choices"]), [])
    assert len(ids) == 700 and ids[:100] == other.ids
    assert chunks[-1]["parkade"]["parks"] > 0
    assert b"data: [DONE]" in received


# two workers ----------------------------------------------------------------------------------------------------------
def test_the_streams_of_one_of_two_workers_go_on_when_it_is_killed(tmp_path):
    with Stack(tmp_path / "run", ctx=CTX, slots=2, device="cpu,cpu") as stack:
        assert len(stack.processes("gpu_worker")) == 2
        bodies = [{"prompt": prompt(i, 60), "max_tokens": 90, "temperature": 0.8, "seed": i} for i in range(4)]
        unhurt = together(*(stream(stack.url, **body) for body in bodies))
        killed = []

        def on_tokens(answer: Answer) -> None:
            if len(answer.ids) >= 40 and not killed:
                assert [slot["state"] for slot in stack.slots()] == ["running"] * 4  # two on each
                killed.append(stack.pid_of("gpu_worker"))
                stack.kill("gpu_worker")

        answers = together(stream(stack.url, on_tokens=on_tokens, **bodies[0]), *(stream(stack.url, **b) for b in bodies[1:]))
        assert killed
        assert wholes(answers) == [(90, "length", True, None)] * 4
        assert all(answer.same_as(other) for answer, other in zip(answers, unhurt, strict=True))
        stack.until(lambda: len(stack.processes("gpu_worker")) == 2, "it is started again")
