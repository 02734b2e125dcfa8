"""A client that floods, and one that uses another's id: the stream that was there goes on and says what it says alone."""

from tests.router.stage import RawReader, ids_of, stage, until
from wire.codec import frames
from wire.messages import Credit, Generate, GetStatus, Rejected, Submit

MANY = 2000


def test_an_id_in_use_is_refused_and_its_stream_goes_on(run):
    async def story():
        async with stage() as s, s.client() as client:
            worker = await s.worker()
            stream = client.submit(Generate("mine", [1], max_tokens=3))
            submit = await worker.next(Submit)
            thief = s.raw()
            for _ in range(5):
                await thief.send_multipart(frames(Generate("mine", [2], max_tokens=9)))
            reader = RawReader(thief)
            for _ in range(5):
                refused = await reader.next()
                assert isinstance(refused, Rejected)
                assert (refused.request_id, refused.code) == ("mine", "duplicate_id")
            await worker.play(submit)
            assert await ids_of(stream) == [0, 1, 2]

    run(story())


def test_a_flood_of_questions_credit_and_requests_leaves_the_others_alone(run):
    async def story():
        async with stage(max_queued=100) as s, s.client() as client:
            worker = await s.worker()
            stream = client.submit(Generate("good", [1], max_tokens=20))
            submit = await worker.next(Submit)
            flood = s.raw()
            for number in range(MANY):
                await flood.send_multipart(frames(GetStatus(f"q{number}")))
                await flood.send_multipart(frames(Credit("good", 1 << 40)))
                await flood.send_multipart(frames(Generate(f"r{number}", [1])))
            await worker.play(submit)
            assert await ids_of(stream) == list(range(20))
            await until(client, lambda status: len(s.server.ledger.requests) <= 108)

    run(story())
