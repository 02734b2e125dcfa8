"""One request in the ledger: its tokens, what of them its client has, and what it costs to wait. PURE."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from wire.codec import pack
from wire.messages import Finished, Generate, Logprob, Message, Notice, ParkKind, Tokens, Usage

WINDOW_BYTES = 64 << 10  # of a stream's encoded messages that the client has not taken in yet
SUSPECT_REPLAYS = 3  # so many without a token: it runs alone until it gets one
CHUNK_TOKENS = 1024  # most tokens of one message to the client
CHUNK_LOGPROBS = 64  # with 20 alternatives each, about 20 KiB


@dataclass(slots=True, eq=False)
class Request:
    """`tokens` is everything that any worker has ever delivered; a worker is only ever asked for what comes after it."""

    generate: Generate  # with its seed
    client: bytes
    arrival: int
    arrived_at: float
    tokens: list[int] = field(default_factory=list)
    sent: int = 0  # of tokens, to the client
    logprobs: list[Logprob] = field(default_factory=list)  # of tokens[sent:]
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # not yet sent
    prompt_sent: int = 1  # position of the first of them; position 0 of a prompt has none
    sent_bytes: int = 0
    consumed_bytes: int = 0
    usage: Usage = field(init=False)
    rank: int = field(init=False)  # the class it counts as: its priority, or better after waiting long
    waited_s: float = 0.0  # in the queue, while it could have started
    worker: bytes | None = None
    started: bool = False  # some worker has had it
    begun: bool = False  # its worker has said something of it: it has a seat there
    replays: int = 0  # since its newest token
    token_at: float | None = None
    parked_at: float | None = None
    park_kind: ParkKind = "pressure"
    held: bool = False  # by an explicit Park
    credit_held: bool = False  # by our own Park: the client does not read
    share_held: bool = False  # by our own Park: its key has its share of the cells already
    cancelled: bool = False
    blocked_at: float | None = None  # since when something waits for credit
    finished: Finished | None = None  # the last word, waiting behind tokens that wait for credit

    def __post_init__(self) -> None:
        self.usage = Usage(prompt_tokens=self.prompt_tokens)
        self.rank = self.generate.priority

    @property
    def request_id(self) -> str:
        return self.generate.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.generate.prompt_token_ids)

    @property
    def is_paused(self) -> bool:
        """Nobody wants it to run now."""
        return self.held or self.credit_held or self.share_held

    @property
    def is_suspect(self) -> bool:
        """It may be what kills workers."""
        return self.replays >= SUSPECT_REPLAYS

    @property
    def cells(self) -> int:
        """Cells it needs to start on a worker."""
        return self.prompt_tokens + len(self.tokens) + 1

    # in -------------------------------------------------------------------------------------------------------------------
    def append(self, message: Tokens) -> int:
        """Take in what is new of a worker's message; the number of new tokens, or -1 if it skips some or makes no sense."""
        skip = len(self.tokens) - message.offset
        new = message.tokens[skip:] if skip else message.tokens
        if skip < 0 or (new and self.generate.sampling.logprobs is not None and len(message.logprobs) != len(message.tokens)):
            return -1
        if message.prompt_logprobs:
            skip_prompt = self.prompt_sent + len(self.prompt_logprobs) - message.prompt_offset
            if skip_prompt < 0 or message.prompt_offset < 1:
                return -1
            self.prompt_logprobs += message.prompt_logprobs[skip_prompt:]
        self.tokens += new
        if self.generate.sampling.logprobs is not None:
            self.logprobs += message.logprobs[skip:]
        return len(new)

    def resume_elsewhere(self, now: float) -> Notice:
        """Its worker was lost while it was parked: the pause ends where the next life begins. What the client is told."""
        assert self.parked_at is not None
        pause_ms = round(1000 * (now - self.parked_at))
        self.parked_at = None
        self.usage = replace(self.usage, parked_ms=self.usage.parked_ms + pause_ms)
        return Notice(self.request_id, "resumed", self.park_kind, "recompute", pause_ms, self.usage)

    # out ------------------------------------------------------------------------------------------------------------------
    @property
    def waits(self) -> bool:
        """Something has not been sent to the client yet."""
        return self.sent < len(self.tokens) or bool(self.prompt_logprobs)

    @property
    def has_credit(self) -> bool:
        return self.sent_bytes - self.consumed_bytes < WINDOW_BYTES

    def encode(self, message: Message) -> bytes:
        """The message's payload, charged to the window."""
        payload = pack(message)
        self.sent_bytes += len(payload)
        return payload

    def next_chunk(self) -> Tokens:
        """What waits, up to a size, as one message; it counts as sent."""
        few = CHUNK_LOGPROBS if self.generate.sampling.logprobs is not None else CHUNK_TOKENS
        tokens = self.tokens[self.sent : self.sent + few]
        logprobs = self.logprobs[:few]
        prompt_logprobs = self.prompt_logprobs[:CHUNK_LOGPROBS]
        prompt_offset = self.prompt_sent if prompt_logprobs else 0
        chunk = Tokens(self.request_id, self.sent, tokens, logprobs, prompt_offset, prompt_logprobs)
        self.sent += len(tokens)
        if logprobs:
            del self.logprobs[: len(logprobs)]
        if prompt_logprobs:
            del self.prompt_logprobs[: len(prompt_logprobs)]
            self.prompt_sent += len(prompt_logprobs)
        return chunk

    def probe(self) -> Tokens:
        """A message without content: sending it tells whether the client is still there."""
        return Tokens(self.request_id, self.sent, [])
