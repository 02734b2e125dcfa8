"""Sequence: one generation with all its progress in one object, so that parking it can neither lose nor reset any of it."""

import enum

from msgspec import Struct

from gpu_worker.policy.events import Choice
from gpu_worker.policy.limits import Limits
from gpu_worker.policy.pool import ROOT, block_digest
from wire.messages import ParkKind, Sampling, Submit, Usage

LIKELY_ONE = 1 << 16  # certainty, in the unit of `Sequence.likely`
LIKELY_START = -(-LIKELY_ONE * 3 // 5)  # before anything is known: what costs much is given up after few refusals
LIKELY_PRIOR = LIKELY_ONE * 3 // 4  # what is not tried drifts towards this


class State(enum.Enum):
    WAITING = "waiting"  # never admitted in this life of the worker
    RUNNING = "running"  # holds blocks, has a row in each step
    PARKING = "parking"  # out of the batch; holds its blocks until its cells are saved, or refused
    PARKED = "parked"  # holds no block; `lease` says whether its cells survive in the host cache
    RESUMING = "resuming"  # holds blocks again; its image is being copied in
    FINISHED = "finished"


class Sequence(Struct, eq=False, gc=False):
    """`tokens` are known; the first `computed` of them have cells. A step feeds tokens[computed:], whatever they are.

    While PARKED, `computed` is the number of cells in the image that `lease` holds, 0 without a lease.
    """

    request_id: str
    arrival: int
    priority: int
    tokens: list[int]  # prompt, then output; only ever appended to
    prompt_len: int
    end_len: int  # as many tokens end it with `length`
    min_len: int  # before as many tokens no end token may be drawn
    end_tokens: frozenset[int]
    banned: tuple[int, ...]  # the same, sorted, for the rows
    sampling: Sampling
    prompt_logprobs: int | None
    sibling_of: str
    base: Usage  # what earlier lives have cost
    exact: bool
    since: float  # when the park under way began
    wants_since: float  # since when it could come in but for the others: holding oneself back earns nothing

    state: State = State.WAITING
    seat: int = -1
    computed: int = 0
    high_computed: int = 0  # the most cells it ever had; feeding a position below it is a recompute
    scored: int = 0  # prompt positions 1..scored have their log probability delivered
    draft: int = 0  # drafts in the step that is planned or under way; 0 in any other state, and between steps
    likely: list[int] = []  # how often each draft agrees; see drafting.py
    drafted: int = 0
    accepted: int = 0
    state_slot: int = -1  # of its recurrent state while it is on the device
    blocks: list[int] = []
    digests: list[bytes] = []  # of its full blocks, as far as anybody has asked
    published: int = 0  # its first blocks that can be found
    prompt_done: bool = False  # its prompt was computed in this life: siblings can find it
    replaying: bool = False  # resumed without an image and not yet caught up
    next_forced_len: int = 0  # at as many tokens it is parked by force; 0: never

    lease: int | None = None
    image_bytes: int = 0  # that its lease holds, or its Reserve asks for
    ask: int = 0  # the Reserve that is not answered yet; 0: none
    copying: bool = False  # a copy touches its blocks: they may not change hands
    kind: ParkKind = "pressure"  # of the park under way, or the last one
    choice: Choice | None = None  # how its cells are kept, of the same

    cancelled: bool = False
    held: set[str] = set()  # why it may not run: explicit, credit, share
    parks: int = 0
    pressure_parks: int = 0
    restarts: int = 0  # times that it was recomputed, or fed again for want of a result, since its newest token
    promoted: int = 0  # classes gained by waiting
    parked_s: float = 0.0
    cached: int = 0
    recomputed: int = 0

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens it may still get."""
        return self.end_len - len(self.tokens)


def sequence_of(submit: Submit, limits: Limits, now: float) -> Sequence:
    """What a Submit becomes. Tokens that were delivered by an earlier life are part of it; so is what that life has cost."""
    generate = submit.generate
    prompt_len = len(generate.prompt_token_ids)
    delivered = len(submit.delivered)
    end_tokens = frozenset(generate.stop_token_ids) | (frozenset() if generate.ignore_eos else frozenset(limits.eos_token_ids))
    return Sequence(
        request_id=generate.request_id,
        arrival=submit.arrival,
        priority=generate.priority,
        tokens=[*generate.prompt_token_ids, *submit.delivered],
        prompt_len=prompt_len,
        end_len=min(prompt_len + generate.max_tokens, limits.sequence_cells),
        min_len=prompt_len + generate.min_tokens,
        end_tokens=end_tokens,
        banned=tuple(sorted(end_tokens)),
        sampling=generate.sampling,
        prompt_logprobs=generate.prompt_logprobs,
        sibling_of=generate.sibling_of,
        base=submit.usage,
        exact=limits.exact,
        since=now,
        wants_since=now,
        # the newest delivered token was drawn, not computed
        high_computed=prompt_len + delivered - 1 if delivered else 0,
        scored=prompt_len - 1 if delivered else 0,
        replaying=bool(delivered),
        likely=[LIKELY_START] * limits.draft_max,
        next_forced_len=prompt_len + (delivered // limits.park_every + 1) * limits.park_every if limits.park_every else 0,
    )


def chain(seq: Sequence, count: int, block_size: int) -> list[bytes]:
    """Digests of its first `count` full blocks. Each is computed once in the sequence's life."""
    digests = seq.digests
    for index in range(len(digests), count):
        tokens = seq.tokens[index * block_size : (index + 1) * block_size]
        digests.append(block_digest(digests[-1] if digests else ROOT, tokens))
    return digests if len(digests) == count else digests[:count]


def usage_of(seq: Sequence, now: float) -> Usage:
    """What the request has cost so far, earlier lives and the pause under way included."""
    return Usage(
        prompt_tokens=seq.prompt_len,
        completion_tokens=seq.generated,
        cached_tokens=seq.base.cached_tokens + seq.cached,
        parks=seq.base.parks + seq.parks,
        parked_ms=seq.base.parked_ms + round((seq.parked_s + pause_s(seq, now)) * 1000),
        recomputed_tokens=seq.base.recomputed_tokens + seq.recomputed,
        exact=seq.exact,
    )


def pause_s(seq: Sequence, now: float) -> float:
    """Seconds since the park under way began; 0 if there is none."""
    return max(0.0, now - seq.since) if seq.state in (State.PARKING, State.PARKED, State.RESUMING) else 0.0
