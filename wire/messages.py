"""Every message that two processes exchange; one union per direction, so a decoder accepts only what its peer may say.

Structs are frozen, tagged and closed. Limits on numbers are part of the types: what is out of range is refused in decoding.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

PROTOCOL = b"PK1"
MAX_REQUEST_ID_CHARS = 64
MAX_LOGPROBS = 20
MAX_PRIORITY = 100  # and as far below 0
DEFAULT_PARK_S = 300.0
MAX_PARK_S = 7 * 86400.0

RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
ParkKind = Literal["pressure", "forced", "explicit"]
HoldReason = Literal["explicit", "credit", "share"]


class Message(Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of everything that travels as a message of its own."""


class Part(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of what travels inside a message."""


# parts ----------------------------------------------------------------------------------------------------------------
class Sampling(Part):
    """How the next token is drawn from the logits. `temperature` 0 is greedy; `seed` None lets the router draw one."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0  # 0: off
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0  # over prompt and output
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0  # over the output only, as OpenAI defines it
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-1000, le=1000)]] = {}
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None  # alternatives beside the token; None: off


class Logprob(Part):
    """The token's log probability under the model's own distribution (before penalties, temperature and filters)."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []  # (token, logprob), most likely first


class Usage(Part):
    """What a request has cost so far, over all lives of its worker. `prompt_tokens` is the client's prompt, once."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found computed at its first admission
    parks: int = 0
    parked_ms: int = 0
    recomputed_tokens: int = 0
    exact: bool = False


class Slot(Part):
    """One line of `/slots`. `id` is the seat and stays for life."""

    id: int
    request_id: str = ""
    state: Literal["idle", "waiting", "running", "parking", "parked", "resuming"] = "idle"
    n_tokens: int = 0
    is_preempted: bool = False
    n_preempt: int = 0
    n_recompute: int = 0
    parked_ms: int = 0
    drafted: int = 0
    accepted: int = 0  # of the drafted
    priority: int = 0
    held: bool = False  # set aside by a Park: it does not come back before its Resume


class PoolCells(Part):
    """Cells of the pool by who holds them; the five add up to the pool."""

    active: int = 0  # referenced by running sequences
    reusable: int = 0  # only findable by hash; given up on demand
    parking: int = 0
    resuming: int = 0
    free: int = 0


class Counters(Part):
    """Totals since this worker's boot; the router adds them up over lives."""

    preempt: dict[str, int] = {}  # by ParkKind
    resumed: int = 0
    recomputed_tokens: int = 0
    denied: dict[str, int] = {}  # by reason
    parks: dict[str, int] = {}  # by how and why, as "save cheaper"; see docs/protocol.md
    stalled: int = 0  # sequences ended because their recompute made no progress
    damaged: int = 0  # images that were not what was saved
    steps: int = 0
    prefill_tokens: int = 0  # rows fed that produced no new token, recomputed ones included
    drafted: list[int] = []  # by position: the first draft behind a sequence's newest token, the second, ...
    accepted: list[int] = []  # of those, by position


# client -> router -----------------------------------------------------------------------------------------------------
class Generate(Message):
    """Ask for one stream. `max_tokens` may exceed what fits: the stream then ends with `length`."""

    request_id: RequestId
    prompt_token_ids: list[TokenId]
    max_tokens: Annotated[int, Meta(ge=1, le=2**53)] = 2**31
    min_tokens: Count = 0
    sampling: Sampling = Sampling()
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] = []
    ignore_eos: bool = False
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0  # class: a lower number is more important
    sibling_of: Annotated[str, Meta(max_length=MAX_REQUEST_ID_CHARS)] = ""  # starts once that one has computed the same prompt
    key: Annotated[str, Meta(max_length=MAX_REQUEST_ID_CHARS)] = ""  # the name of its key, for limits; never the key itself


class Cancel(Message):
    request_id: RequestId


class Park(Message):
    """Off the device until `Resume`, or for `deadline_s`, which the router minds. A client's is answered by HoldAnswer. Our own
    reasons: `credit`, its client does not read; `share`, its key has more than its share of the cells."""

    request_id: RequestId
    reason: HoldReason = "explicit"
    deadline_s: Annotated[float, Meta(gt=0, le=MAX_PARK_S)] = DEFAULT_PARK_S
    ask: Count = 0


class Resume(Message):
    """Let a sequence that was set aside come back as soon as it fits. A client's is answered by HoldAnswer."""

    request_id: RequestId
    reason: HoldReason = "explicit"
    ask: Count = 0


class Credit(Message):
    request_id: RequestId
    consumed_bytes: Count  # of this stream's encoded messages, taken in by the client since its start


class GetStatus(Message):
    request_id: RequestId  # echoed in Status


# router -> client -----------------------------------------------------------------------------------------------------
class Accepted(Message):
    request_id: str
    seed: int


class Rejected(Message):
    """The request never started. `code`: queue_full, key_limit, context_length_exceeded, bad_request, duplicate_id, draining."""

    request_id: str
    code: str
    message: str
    numbers: dict[str, int] = {}


class Tokens(Message):
    """`tokens` start at `offset` of the output. Prompt logprobs start at `prompt_offset` of the prompt (position 0 has none)."""

    request_id: str
    offset: int
    tokens: list[int]
    logprobs: list[Logprob] = []
    prompt_offset: int = 0
    prompt_logprobs: list[Logprob] = []


class HoldAnswer(Message):
    """The answer to Park, when the sequence has left the batch, and to Resume, at once. `code`: unknown_request, conflict (the
    request's state does not allow it), or nothing. `slot`: its line of the worker's newest list, if it has a seat."""

    request_id: str
    code: Literal["", "unknown_request", "conflict"] = ""
    message: str = ""
    slot: Slot | None = None
    ask: int = 0


class Notice(Message):
    """The stream pauses or goes on. `usage` is the state after it, `reason` why its cells were saved, or not."""

    request_id: str
    event: Literal["parked", "resumed"]
    kind: ParkKind = "pressure"
    mode: Literal["save", "recompute"] = "save"
    parked_ms: int = 0  # of this pause, when resumed
    usage: Usage = Usage()
    reason: str = ""


class Finished(Message):
    """The one last word of an accepted stream. If reason is error, `error` says why, `code` is a name (see docs/protocol.md)."""

    request_id: str
    reason: Literal["stop", "length", "cancelled", "error"]
    usage: Usage
    error: str = ""
    code: str = ""


class WorkerStatus(Part):
    name: str
    model: str
    device: str
    dtype: str
    alive: bool
    pool_cells: int
    block_size: int
    slots: int
    max_context: int
    exact: bool
    exact_note: str = ""
    cells: PoolCells = PoolCells()
    step: int = 0
    weight_bytes: int = 0
    pool_bytes: int = 0
    state_bytes: int = 0
    state_slots: int = 0
    draft: int = 0
    draft_note: str = ""
    reuse: bool = True


class Status(Message):
    """`ready`: a request would be decoded now. `metrics` is Prometheus text. Slots of several workers follow one another."""

    request_id: str
    ready: bool
    reason: str = ""  # why not ready
    draining: bool = False
    queued: int = 0
    running: int = 0
    parked: int = 0
    slots: list[Slot] = []
    workers: list[WorkerStatus] = []
    metrics: str = ""
    budget_bytes: int = 0
    used_bytes: int = 0
    held_bytes: int = 0


# router -> worker -----------------------------------------------------------------------------------------------------
class Submit(Message):
    """`generate` with its seed drawn. `delivered` are the tokens, and `usage` the cost, of earlier lives of its worker. `arrival`
    orders requests and survives replays."""

    generate: Generate
    arrival: int
    delivered: list[int] = []
    usage: Usage = Usage()


class Drain(Message):
    """Finish what you have, then say Goodbye and exit."""


class Ping(Message):
    """Answered by a Load. A worker that hears nothing from its router for 10 s ends its sequences."""


# worker -> router -----------------------------------------------------------------------------------------------------
class Hello(Message):
    name: str
    pid: int
    model: str
    device: str
    dtype: str
    pool_cells: int
    block_size: int
    slots: int
    max_context: int  # cells one sequence may use: min(pool, model)
    exact: bool
    exact_note: str = ""
    weight_bytes: int = 0
    pool_bytes: int = 0
    state_bytes: int = 0  # of one sequence's recurrent state; 0: the model has none
    state_slots: int = 0
    draft: int = 0  # most tokens drafted in one row of a step; 0: none
    draft_note: str = ""  # why none
    reuse: bool = True  # whether a prompt's cells may be those of an earlier one
    vocab: int = 0  # token ids at or above it are refused; 0: not told


class Load(Message):
    """Heartbeat from the engine loop, and the state after its last event. Sent before any Finished it explains."""

    step: int
    cells: PoolCells
    waiting: int
    running: int
    parked: int
    slots: list[Slot]
    counters: Counters
    hostcache: bool  # connected


class Goodbye(Message):
    reason: str = ""


# worker -> host cache -------------------------------------------------------------------------------------------------
class HeldLease(Part):
    """A committed lease of a former life of the host cache, whose arena the worker still maps."""

    lease: int
    extents: list[tuple[int, int]]


class Attach(Message):
    """`held` names leases in the arena of that `generation`, if that outlived its process; `Attached.kept` says which stay."""

    worker: str  # name-pid-boot
    unit_bytes: Annotated[int, Meta(ge=4096, le=2**40)]  # the block's bytes rounded up to 4 KiB
    generation: int = 0  # 0: of no arena yet
    held: list[HeldLease] = []


class Reserve(Message):
    ask: int
    request_id: str
    nbytes: Annotated[int, Meta(ge=1, le=2**53)]


class Commit(Message):
    lease: int
    checksum: int
    position: int  # cells in the image


class Release(Message):
    lease: int


class Reclaimed(Message):
    slab: int


class GetBudget(Message):
    """From the router: an observer that never attaches."""


# host cache -> worker, router -----------------------------------------------------------------------------------------
class Attached(Message):
    """Comes with the arena's descriptor. `stored`: the arena outlives the host cache's process, so wait for it to return."""

    generation: int
    arena_bytes: int
    slab_bytes: int
    stored: bool = False
    kept: list[int] = []  # leases of Attach.held that are still the worker's


class Granted(Message):
    ask: int
    lease: int  # a number of this worker's own: another may hold the same one
    extents: list[tuple[int, int]]  # (offset, bytes) in the arena, multiples of the unit
    used_bytes: int = 0  # of the budget, by live leases of all workers, this one included


class Denied(Message):
    ask: int
    reason: Literal["full", "fragmented", "memory", "not_attached", "too_many"]
    used_bytes: int = 0


class Reclaim(Message):
    slab: int


class Budget(Message):
    budget_bytes: int
    used_bytes: int  # of live leases
    held_bytes: int  # of resident slabs; held <= budget always
    leases: int
    generation: int


ClientToRouter = Generate | Cancel | Park | Resume | Credit | GetStatus
RouterToClient = Accepted | Rejected | Tokens | HoldAnswer | Notice | Finished | Status
RouterToWorker = Submit | Cancel | Park | Resume | Drain | Ping
WorkerToRouter = Hello | Tokens | Notice | Finished | Load | Goodbye
ToHostCache = Attach | Reserve | Commit | Release | Reclaimed | GetBudget
FromHostCache = Attached | Granted | Denied | Reclaim | Budget
