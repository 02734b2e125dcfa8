"""A router for tests of the HTTP adapter: says what a script tells it to say, and writes down what it was asked."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from router.client import RejectedError
from wire.messages import Finished, Generate, HoldAnswer, Logprob, Message, Notice, Slot, Status, Tokens, Usage, WorkerStatus

Script = Callable[["FakeStream"], AsyncIterator[Message]]


class FakeStream:
    """One scripted stream. `cancelled` is set when the adapter cancels it or when its script has ended by itself."""

    def __init__(self, generate: Generate, script: Script, accept: asyncio.Event | None, rejection: RejectedError | None) -> None:
        self.generate = generate
        self.cancelled = asyncio.Event()
        self.taken = 0  # messages that the adapter has asked for
        self._script = script
        self._accept = accept
        self._rejection = rejection

    async def accepted(self) -> None:
        if self._accept is not None:
            await self._accept.wait()
        if self._rejection is not None:
            raise self._rejection

    async def __aiter__(self) -> AsyncIterator[Message]:
        async for message in self._script(self):
            self.taken += 1
            yield message

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.cancelled.set()


class FakeClient:
    """What the adapter sees of router.client.Client."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.streams: list[FakeStream] = []
        self.submitted = asyncio.Event()
        self.accept: asyncio.Event | None = None
        self.rejections: dict[int, RejectedError] = {}  # by number of the stream
        self.answer: Status | None = ready_status()
        self.later: Status | None = None  # what it answers after the first time
        self.holds: list[tuple[str, str, float | None]] = []  # what was parked or resumed, and for how long
        self.hold_answer: HoldAnswer | Exception = HoldAnswer("r")

    def submit(self, generate: Generate) -> FakeStream:
        stream = FakeStream(generate, self.script, self.accept, self.rejections.get(len(self.streams)))
        self.streams.append(stream)
        self.submitted.set()
        return stream

    async def status(self) -> Status:
        if self.answer is None:
            await asyncio.Event().wait()
        answer, self.answer = self.answer, self.later or self.answer
        return answer

    async def park(self, request_id: str, deadline_s: float) -> HoldAnswer:
        return self._hold("park", request_id, deadline_s)

    async def resume(self, request_id: str) -> HoldAnswer:
        return self._hold("resume", request_id, None)

    def _hold(self, what: str, request_id: str, deadline_s: float | None) -> HoldAnswer:
        self.holds.append((what, request_id, deadline_s))
        if isinstance(self.hold_answer, Exception):
            raise self.hold_answer
        return self.hold_answer

    @property
    def asked(self) -> Generate:
        """The newest request."""
        return self.streams[-1].generate


def ready_status(**changes: object) -> Status:
    """A router with one healthy worker."""
    worker = WorkerStatus(
        "cpu0", "smollm2", "cpu", "bf16", True, pool_cells=2048, block_size=16, slots=4, max_context=2048, exact=True,
        weight_bytes=1000, pool_bytes=500, state_bytes=70, state_slots=6, draft=2, reuse=False,
    )  # fmt: skip
    given = {
        "request_id": "status",
        "ready": True,
        "slots": [Slot(0), Slot(1, "chatcmpl-1", "parked", 300, True, 2, 1, 45, 30, 20)],
        "workers": [worker],
        "metrics": 'parkade_preempt_total{kind="pressure"} 0\n',
    }
    return Status(**(given | changes))


def says(
    tokens: Sequence[Sequence[int]],
    *,
    reason: str = "stop",
    code: str = "",
    error: str = "",
    notices: dict[int, str] | None = None,
    logprobs: Callable[[int], Logprob] | None = None,
    usage: Usage | None = None,
    wait_after: int | None = None,
) -> Script:
    """A script that sends `tokens`, one message an entry, then Finished. A notice before entry i says parked or resumed.

    `wait_after`: after that many messages nothing more comes until the stream is cancelled.
    """

    async def script(stream: FakeStream) -> AsyncIterator[Message]:
        me = stream.generate.request_id
        offset = 0
        for i, some in enumerate(tokens):
            if wait_after is not None and i >= wait_after:
                break
            if notices and i in notices:
                yield Notice(me, notices[i])
            if stream.cancelled.is_set():
                break
            yield Tokens(me, offset, list(some), [logprobs(token) for token in some] if logprobs else [])
            offset += len(some)
        if wait_after is not None:
            await stream.cancelled.wait()
        given = usage or Usage(exact=True)
        cost = Usage(
            len(stream.generate.prompt_token_ids), offset, given.cached_tokens, given.parks, given.parked_ms,
            given.recomputed_tokens, given.exact,
        )  # fmt: skip
        yield Finished(me, "cancelled" if stream.cancelled.is_set() else reason, cost, error, code)

    return script
