"""Two processes that claim to be the same worker, an old boot that comes late, another version: over real sockets."""

import asyncio

import pytest

import wire.sockets
from tests.router.stage import ids_of, stage, until
from wire import codec
from wire.codec import frames
from wire.messages import Attach, Counters, Generate, Load, PoolCells, Submit, Tokens

pytestmark = pytest.mark.system


def test_the_newest_boot_owns_the_streams_and_an_old_one_is_not_heard(run):
    async def story():
        async with stage() as s, s.client() as client:
            old = await s.worker(b"cpu0-1-a")
            reading = asyncio.create_task(ids_of(client.generate([1], max_tokens=4, request_id="r")))
            await old.next(Submit)
            await old.say(Tokens("r", 0, [0, 1]))
            await until(client, lambda status: "parkade_tokens_generated_total 2.0" in status.metrics)
            new = await s.worker(b"cpu0-2-b")
            submit = await new.next(Submit)
            assert submit.delivered == [0, 1]
            await old.say(Tokens("r", 2, [98, 99]))  # it lives and goes on
            await old.say_hello()
            await old.finish("r", "length", 4)
            await client.status()
            await new.play(submit)
            assert await reading == [0, 1, 2, 3]
            status = await until(client, lambda status: len(status.workers) == 1)
            assert "parkade_requests_replayed_total 1.0" in status.metrics

    run(story())


def test_of_two_with_one_identity_the_newest_connection_is_spoken_to(run):
    """A process that was cloned: whoever says Hello last gets the work; the stream is whole whoever it was."""

    async def story():
        async with stage() as s, s.client() as client:
            await s.worker(b"cpu0-1-a")
            twin = await s.worker(b"cpu0-1-a", plays=True)
            assert await ids_of(client.generate([1], max_tokens=4)) == [0, 1, 2, 3]
            assert await twin.next(Submit)
            assert len((await client.status()).workers) == 1

    run(story())


@pytest.mark.parametrize("name", [b"PK0", b"PK2", b"PK10", b""])
def test_another_version_of_the_protocol_is_counted_and_never_obeyed(run, name):
    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            stream = client.submit(Generate("r", [1], max_tokens=2))
            submit = await worker.next(Submit)
            other = s._peer(wire.sockets.worker_address(s.run_dir), b"cpu1-1-a")
            hello = Load(1, PoolCells(free=64), 0, 0, 0, [], Counters(), True)
            await other.send_multipart([name, frames(hello)[1]])
            await other.send_multipart([name, frames(Tokens("r", 0, [7]))[1]])
            guest = s.raw()
            await guest.send_multipart([name, frames(Generate("mine", [1]))[1]])
            await until(client, lambda status: 'bad_messages_total{sender="worker"} 2.0' in status.metrics)
            status = await until(client, lambda status: 'bad_messages_total{sender="client"} 1.0' in status.metrics)
            assert [each.name for each in status.workers] == ["cpu0"] and status.running == 1 and status.queued == 0
            await worker.play(submit)
            assert await ids_of(stream) == [0, 1]

    run(story())


def test_the_version_is_part_of_every_message():
    assert frames(Attach("w", 4096))[0] == codec.PROTOCOL == b"PK1"
