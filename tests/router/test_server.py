"""The router with real sockets: streams, losses, vanishing clients, a thousand streams, status."""

import asyncio
import socket

import pytest
import zmq

import router.hostcache_link
import router.server
import wire.codec
from router.client import Client
from tests.router.stage import RawReader, ids_of, stage, until
from wire.codec import bundles, frames, pack, unbundle
from wire.messages import PROTOCOL, Accepted, Budget, Cancel, Finished, Generate, GetBudget, Goodbye, Submit, Tokens, Usage
from wire.sockets import client_address, hostcache_path


def test_one_stream_through_real_sockets(run):
    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker(plays=True)
            messages = [message async for message in client.generate([1, 2, 3], max_tokens=5)]
            assert [m.tokens for m in messages[:-1]] == [[0], [1], [2], [3], [4]]
            assert isinstance(messages[-1], Finished) and messages[-1].reason == "length"
            submit = await worker.next(Submit)
            assert submit.generate.sampling.seed is not None

    run(story())


def test_a_killed_workers_stream_goes_on_in_another(run):
    async def story():
        async with stage() as s, s.client() as client:
            first = await s.worker(b"cpu0-1-a")
            reading = asyncio.create_task(ids_of(client.generate([1], max_tokens=6, request_id="r")))
            await first.next(Submit)
            await first.say(Tokens("r", 0, [0, 1]))
            await until(client, lambda status: "parkade_tokens_generated_total 2.0" in status.metrics)
            second = await s.worker(b"cpu1-1-a", plays=True)
            await first.die()
            submit = await second.next(Submit)
            assert submit.delivered == [0, 1]
            assert await reading == [0, 1, 2, 3, 4, 5]

    run(story())


def test_requests_wait_for_the_first_worker_and_for_the_next_after_the_last(run):
    async def story():
        async with stage() as s, s.client() as client:
            reading = asyncio.create_task(ids_of(client.generate([1], max_tokens=3)))
            assert (await until(client, lambda status: status.queued == 1)).ready is False
            first = await s.worker()
            await first.next(Submit)
            await first.say(Goodbye("stopped"))
            await until(client, lambda status: not status.workers)
            await s.worker(b"cpu0-2-b", plays=True)
            assert await reading == [0, 1, 2]

    run(story())


def test_what_a_worker_tells_together_reaches_each_client_together(run):
    async def story():
        async with stage() as s, s.client() as other:
            worker = await s.worker()
            raw = s.raw()
            for request_id in ("a", "b"):
                await raw.send_multipart(frames(Generate(request_id, [1], max_tokens=1)))
                await worker.next(Submit)
            stream = other.submit(Generate("c", [1], max_tokens=1))
            await worker.next(Submit)
            reader = RawReader(raw)
            for _ in ("a", "b"):
                await reader.next(Accepted)
            told = [Tokens("a", 0, [5]), Tokens("c", 0, [6]), Tokens("b", 0, [7]), Finished("a", "length", Usage(1, 1))]
            (payload,) = bundles([pack(message) for message in told])
            await worker.socket.send_multipart([PROTOCOL, payload])
            heard = unbundle(await raw.recv_multipart())
            assert [bytes(payload) for payload in heard] == [pack(told[at]) for at in (0, 2, 3)]
            assert (await anext(stream)).tokens == [6]

    run(story())


def test_of_a_bundle_only_what_is_garbage_is_dropped(run):
    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            stream = client.submit(Generate("r", [1], max_tokens=2))
            await worker.next(Submit)
            (payload,) = bundles([pack(Tokens("r", 0, [5])), pack(Cancel("r")), b"\xc0", pack(Tokens("r", 1, [6]))])
            await worker.socket.send_multipart([PROTOCOL, payload])
            await until(client, lambda status: 'sender="worker"} 2.0' in status.metrics)
            assert [(await anext(stream)).tokens for _ in range(2)] == [[5], [6]]
            assert not stream._ended

    run(story())


def test_a_router_that_fails_while_it_tells_says_nothing_more(run, monkeypatch):
    """A word after one that was lost would leave a gap in a stream."""
    monkeypatch.setattr(router.server, "BATCH", 1)  # a frame a turn
    heard = []

    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            stream = client.submit(Generate("r", [1], max_tokens=9))
            await worker.next(Submit)
            await worker.say(Tokens("r", 0, [0]))
            assert (await anext(stream)).tokens == [0]

            def tell_clients_once(*_: object) -> None:
                monkeypatch.undo()
                assert s.server._workers.poll(5000)  # the next word has come
                s.server._loop.call_soon(s.server._turn)  # and is the next thing that the loop turns to
                raise RuntimeError("planted")

            monkeypatch.setattr(s.server, "_tell_clients", tell_clients_once)
            at_once = zmq.Socket.shadow(worker.socket.underlying)
            for offset in range(1, 9):
                at_once.send_multipart(frames(Tokens("r", offset, [offset])))
            heard.extend([message async for message in stream])

    with pytest.raises(RuntimeError, match="planted"):
        run(story())
    (last,) = heard
    assert isinstance(last, Finished) and last.code == "router_lost"


def test_clients_do_not_send_bundles(run):
    async def story():
        async with stage() as s, s.client() as client:
            (payload,) = bundles([pack(Generate("r", [1])), pack(Generate("s", [1]))])
            await s.raw().send_multipart([PROTOCOL, payload])
            status = await until(client, lambda status: 'sender="client"} 1.0' in status.metrics)
            assert status.queued == 0

    run(story())


@pytest.mark.parametrize("where", ["queued", "running"])
def test_a_vanished_client_is_noticed_and_its_request_cancelled(run, where):
    async def story():
        async with stage() as s, s.client() as watcher:
            worker = await s.worker() if where == "running" else None
            raw = s.raw()
            await raw.send_multipart(frames(Generate("r", [1])))
            await RawReader(raw).next(Accepted)
            if worker is not None:
                await worker.next(Submit)
            raw.close(linger=0)
            if worker is not None:
                assert await worker.next(Cancel) == Cancel("r")
                await worker.finish("r", "cancelled", 0)
            status = await until(watcher, lambda status: status.queued == status.running == 0)
            assert 'reason="client_lost"} 1.0' in status.metrics
            assert not s.server.ledger.requests

    run(story())


def test_a_thousand_streams_of_one_client_are_whole(run):
    async def story():
        async with stage() as s, s.client() as client:
            await s.worker(slots=1000, plays=True)
            streams = [ids_of(client.generate([1, 2], max_tokens=10)) for _ in range(1000)]
            assert await asyncio.gather(*streams) == [list(range(10))] * 1000
            assert not s.server.ledger.requests

    run(story())


def test_two_hundred_clients_with_streams_of_their_own(run):
    async def one(client: Client) -> list[int]:
        async with client:
            return await ids_of(client.generate([1], max_tokens=5))

    async def story():
        async with stage() as s:
            await s.worker(slots=1000, plays=True)
            assert await asyncio.gather(*(one(s.client()) for _ in range(200))) == [list(range(5))] * 200

    run(story())


def test_a_client_that_does_not_read_does_not_stop_the_others(run, monkeypatch):
    monkeypatch.setattr(wire.codec, "MAX_BUNDLE_BYTES", 0)  # each message in a frame of its own: a pipe holds a number of these

    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker(slots=100)
            raw = s.raw()
            for number in range(60):
                await raw.send_multipart(frames(Generate(f"stuck-{number}", [1])))
                await worker.next(Submit)
            for offset in range(300):  # 60 x 300 messages: more than its pipe takes
                for number in range(60):
                    await worker.say(Tokens(f"stuck-{number}", offset, [offset]))
            worker.plays = True
            assert await ids_of(client.generate([1], max_tokens=50)) == list(range(50))
            assert s.server._to_clients.full

    run(story())


# status ---------------------------------------------------------------------------------------------------------------
def test_status_is_never_older_than_an_ended_stream(run):
    async def story():
        async with stage() as s, s.client() as client:
            await s.worker(plays=True)
            for number in range(1, 30):
                await ids_of(client.generate([1], max_tokens=2))
                status = await client.status()
                assert f"parkade_tokens_generated_total {2.0 * number}\n" in status.metrics
                assert status.slots == [] and status.running == 0

    run(story())


def test_status_tells_the_host_caches_budget(run):
    async def story():
        async with stage() as s, s.client() as client:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(hostcache_path(s.run_dir))
                listener.listen()
                listener.setblocking(False)
                asking = asyncio.create_task(client.status())
                peer = await asyncio.to_thread(_accept, listener)
                with peer:
                    assert await asyncio.to_thread(peer.recv, 1000) == pack(GetBudget())
                    peer.send(pack(Budget(1000, 300, 500, 2, 1)))
                    status = await asking
            assert (status.budget_bytes, status.used_bytes, status.held_bytes) == (1000, 300, 500)
            assert "parkade_hostcache_used_bytes 300.0" in status.metrics
            status = await client.status()  # the host cache is gone: its budget is remembered, nothing is in use
            assert status.used_bytes == 0
            assert "parkade_hostcache_used_bytes 0.0" in status.metrics
            assert "parkade_hostcache_budget_bytes 1000.0" in status.metrics

    run(story())


def _accept(listener: socket.socket) -> socket.socket:
    listener.settimeout(20)
    peer, _ = listener.accept()
    peer.settimeout(20)
    return peer


def test_a_host_cache_that_does_not_answer_costs_its_deadline_only(run, monkeypatch):
    monkeypatch.setattr(router.hostcache_link, "ANSWER_S", 0.02)

    async def story():
        async with stage() as s, s.client() as client:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(hostcache_path(s.run_dir))
                listener.listen()
                statuses = await asyncio.gather(*(client.status() for _ in range(50)))
            assert {status.used_bytes for status in statuses} == {0}

    run(story())


def test_ready_needs_a_worker_that_lives(run):
    async def story():
        async with stage() as s, s.client() as client:
            assert (await client.status()).reason == "no worker is connected"
            worker = await s.worker()
            assert (await until(client, lambda status: status.ready)).workers[0].alive
            await worker.die()
            assert (await until(client, lambda status: not status.ready)).reason == "no worker answers"

    run(story())


# the end --------------------------------------------------------------------------------------------------------------
def test_a_drain_lets_streams_end_and_the_server_returns(run):
    async def story():
        async with stage() as s:
            async with s.client() as client:
                worker = await s.worker()
                stream = client.submit(Generate("r", [1], max_tokens=2))
                submit = await worker.next(Submit)
                s.server.stop()
                late = client.submit(Generate("late", [1]))
                with pytest.raises(router.client.RejectedError) as caught:
                    await late.accepted()
                assert caught.value.code == "draining"
                assert (await client.status()).draining
                await worker.play(submit)
                assert await ids_of(stream) == [0, 1]
            async with asyncio.timeout(20):
                await s.ended

    run(story())


def test_a_second_stop_gives_every_stream_its_last_word(run):
    async def story():
        async with stage(drain_s=1000) as s, s.client() as client:
            await s.worker()
            streams = [client.submit(Generate(f"r{number}", [1])) for number in range(10)]
            await asyncio.gather(*(stream.accepted() for stream in streams))
            s.server.stop()
            s.server.stop()
            last = [[message async for message in stream][-1] for stream in streams]
            assert {(message.reason, message.code) for message in last} == {("error", "drain_timeout")}
            async with asyncio.timeout(20):
                await s.ended

    run(story())


def test_addresses_are_those_of_the_contract():
    assert client_address("/run/x") == "ipc:///run/x/client.sock"
