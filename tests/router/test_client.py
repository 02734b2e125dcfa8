"""The reference client: ways to leave, credits, refusals, a router that vanishes and returns."""

import asyncio
import contextlib
import select
import shutil
import tempfile

import pytest
import zmq

from router.client import WINDOW_BYTES, Client, RejectedError, generate_message
from router.server import Server
from tests.router.stage import Stage, ids_of, stage, until
from wire.codec import frames
from wire.messages import Cancel, Finished, Generate, Notice, Park, Resume, Sampling, Submit, Tokens, Usage
from wire.sockets import client_address

LIMIT_MS = 30_000


def test_options_find_their_place():
    assert generate_message([1], "r", {"max_tokens": 5, "temperature": 0.0, "top_k": 3, "ignore_eos": True}) == Generate(
        "r", [1], max_tokens=5, sampling=Sampling(temperature=0.0, top_k=3), ignore_eos=True
    )
    assert generate_message([1], None, {}).request_id != generate_message([1], None, {}).request_id
    with pytest.raises(TypeError):
        generate_message([1], "r", {"colour": "red"})


@pytest.mark.parametrize("way", ["break", "exception", "aclose", "task cancelled", "client closed"])
def test_leaving_the_loop_cancels(run, way):
    async def leave(client, started: asyncio.Event) -> None:
        with contextlib.suppress(ZeroDivisionError):
            stream = client.generate([1], request_id="r")
            if way == "aclose":
                await anext(stream)
                await stream.aclose()
            else:
                async for _ in stream:
                    started.set()
                    if way == "break":
                        break
                    if way == "exception":
                        raise ZeroDivisionError

    async def story():
        async with stage() as s:
            worker = await s.worker()
            async with s.client() as client:
                started = asyncio.Event()
                task = asyncio.create_task(leave(client, started))
                await worker.next(Submit)
                await worker.say(Tokens("r", 0, [0]))
                if way in ("task cancelled", "client closed"):
                    await started.wait()
                if way == "task cancelled":
                    task.cancel()
                elif way == "client closed":
                    client.close()
                assert await worker.next(Cancel) == Cancel("r")
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await worker.finish("r", "cancelled", 1)
            async with s.client() as client:
                await until(client, lambda status: status.running == 0)
            assert not s.server.ledger.requests

    run(story())


def test_a_refusal_is_an_exception_with_its_numbers(run):
    async def story():
        async with stage() as s, s.client() as client:
            await s.worker()
            await until(client, lambda status: status.ready)
            with pytest.raises(RejectedError) as caught:
                await ids_of(client.generate([1] * 5000))
            assert caught.value.code == "context_length_exceeded"
            assert caught.value.numbers == {"prompt_tokens": 5000, "max_context": 4096}
            with pytest.raises(RejectedError, match=r"Expected `int` <= 9007199254740992"):
                await ids_of(client.generate([1], max_tokens=2**60))

    run(story())


def test_an_id_that_is_alive_here_is_refused_without_confusing_the_living(run):
    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            first = client.submit(Generate("r", [1], max_tokens=1))
            second = client.submit(Generate("r", [1]))
            with pytest.raises(RejectedError) as caught:
                await second.accepted()
            assert caught.value.code == "duplicate_id"
            await worker.play(await worker.next(Submit))
            assert await ids_of(first) == [0]

    run(story())


def test_a_long_stream_earns_credit_while_it_is_read(run):
    count = 4 * WINDOW_BYTES // 50

    async def story():
        async with stage() as s, s.client() as client:
            await s.worker(plays=True)
            assert await ids_of(client.generate([1], max_tokens=count)) == list(range(count))

    run(story())


def test_an_unread_stream_holds_no_more_than_the_window(run):
    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            stream = client.submit(Generate("r", [1], max_tokens=6000))
            await worker.play(await worker.next(Submit))
            await until(client, lambda status: "parkade_tokens_generated_total 6000.0" in status.metrics)
            held = sum(len(one) if isinstance(one, bytes) else one[1] for one in stream._messages)
            assert WINDOW_BYTES // 2 < held < WINDOW_BYTES + 200
            assert await ids_of(stream) == list(range(6000))

    run(story())


def test_notices_and_explicit_parks_travel(run):
    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            stream = client.submit(Generate("r", [1], max_tokens=1))
            submit = await worker.next(Submit)
            await worker.say_load()
            await until(client, lambda status: status.slots != [])
            parking = asyncio.create_task(client.park("r"))
            assert await worker.next() == Park("r")
            assert (await client.park("r")).code == "conflict"  # answered before the first, and to the right asker
            assert not parking.done()
            await worker.say(Notice("r", "parked", "explicit", usage=Usage(3, parks=1)))
            answer = await parking
            assert (answer.code, answer.slot.request_id, answer.slot.held) == ("", "r", True)
            assert (await anext(stream)).event == "parked"
            assert stream.usage.parks == 1
            await until(client, lambda status: status.parked == 1)
            assert not (await client.resume("r")).slot.held
            assert await worker.next() == Resume("r")
            assert (await client.resume("r")).code == "conflict"
            assert (await client.park("nobody")).code == "unknown_request"
            with pytest.raises(ValueError, match="deadline_s must be above 0"):
                await client.park("r", 0)
            await worker.say(Notice("r", "resumed", "explicit", usage=Usage(3, parks=1)))
            assert (await anext(stream)).event == "resumed"
            await worker.play(submit)
            assert await ids_of(stream) == [0]

    run(story())


def test_a_park_that_is_not_answered_ends_in_time_or_with_the_router(run):
    async def story():
        run_dir = tempfile.mkdtemp(prefix="parkade-")
        try:
            s = await _start(run_dir)
            async with s.client() as client:
                worker = await s.worker()
                stream = client.submit(Generate("r", [1], max_tokens=2))
                await worker.next(Submit)
                await worker.say(Tokens("r", 0, [7]))
                await anext(stream)
                with pytest.raises(TimeoutError):
                    await client.park("r", timeout_s=0.01)
                await client.resume("r")
                parking = asyncio.create_task(client.park("r"))
                await worker.next(Park)
                await worker.next(Park)
                await _kill(s)
                with pytest.raises(ConnectionError):
                    await parking
                assert client._holds == {}
                await s.close()
        finally:
            shutil.rmtree(run_dir)

    run(story())


def test_cancel_by_id_from_another_client(run):
    async def story():
        async with stage() as s, s.client() as owner, s.client() as other:
            worker = await s.worker()
            stream = owner.submit(Generate("r", [1]))
            await worker.next(Submit)
            await other.cancel("r")
            await worker.next(Cancel)
            await worker.finish("r", "cancelled", 0)
            assert [m.reason async for m in stream] == ["cancelled"]

    run(story())


def test_a_router_that_vanishes_ends_streams_and_the_next_one_is_found(run):
    async def story():
        run_dir = tempfile.mkdtemp(prefix="parkade-")
        try:
            first = await _start(run_dir)
            async with first.client() as client:
                stream = client.submit(Generate("r", [1]))
                await stream.accepted()
                await _kill(first)
                (last,) = [message async for message in stream]
                assert isinstance(last, Finished) and (last.reason, last.code) == ("error", "router_lost")
                waiting = asyncio.create_task(ids_of(client.generate([1], max_tokens=3)))  # while nobody listens
                second = await _start(run_dir)
                await second.worker(plays=True)
                assert await waiting == [0, 1, 2]
                assert (await client.status()).ready
                await second.close()
                await _kill(second)
        finally:
            shutil.rmtree(run_dir)

    run(story())


def test_what_a_router_had_said_before_it_vanished_still_counts(run, tmp_path):
    """More of it than the client takes in at a time."""

    async def story():
        numbers = [str(number) for number in range(600)]
        router = zmq.Context.instance().socket(zmq.ROUTER)
        router.bind(client_address(tmp_path))
        async with Client(client_address(tmp_path)) as client:
            streams = [client.submit(Generate(number, [1])) for number in numbers]
            for _ in streams:
                assert router.poll(LIMIT_MS)
                identity, *_ = router.recv_multipart()
            await asyncio.sleep(0)  # each send has asked the loop for a look at the socket
            for number in numbers:
                router.send_multipart([identity, *frames(Finished(number, "length", Usage(1, 0)))])
            router.close(linger=LIMIT_MS)
            vanished = client._monitor.getsockopt(zmq.FD)  # readable, and the client's loop had no turn since the router spoke
            assert select.select([vanished], [], [], LIMIT_MS / 1000)[0]
            assert {(await anext(stream)).reason for stream in streams} == {"length"}

    run(story())


async def _start(run_dir: str) -> Stage:
    server = Server(run_dir, 10, 0.0)
    server.open()
    return Stage(server, run_dir, asyncio.create_task(server.run()))


async def _kill(stage: Stage) -> None:
    stage.ended.cancel()
    await asyncio.wait([stage.ended])


def test_nobody_listens_and_everything_has_a_bound(run):
    async def story():
        client = Stage(None, "/nonexistent", None).client()
        async with client:
            with pytest.raises(TimeoutError):
                await client.status(timeout_s=0.01)
            stream = client.submit(Generate("r", [1]))
            client.close()
            assert [m.reason async for m in stream] == []
            with pytest.raises(ConnectionError):
                client.submit(Generate("s", [1]))

    run(story())
