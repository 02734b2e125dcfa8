"""What the scheduler hears (events), what it wants done (actions), and the rows of a step. Values only.

The worker's shell, the simulator and the tests all speak this vocabulary to the very same scheduler.
"""

from typing import Literal

from msgspec import Struct

from wire.messages import HoldReason, Logprob, ParkKind, Sampling, Submit, Usage


class Value(Struct, frozen=True, tag=True, gc=False):
    """Base of events and actions. Values refer to no container of themselves, so the garbage collector need not walk them: with
    thousands a step its full passes would cost more than the plan."""


# events ---------------------------------------------------------------------------------------------------------------
class Submitted(Value):
    submit: Submit


class CancelRequested(Value):
    request_id: str


class ParkRequested(Value):
    request_id: str
    reason: HoldReason = "explicit"


class ResumeRequested(Value):
    request_id: str
    reason: HoldReason = "explicit"


class RowResult(Struct, frozen=True, gc=False):
    """What the step made of one row. `tokens` is empty for a chunk that does not reach the newest token; otherwise the drawn one,
    and before it the drafts that the target agreed with."""

    request_id: str
    tokens: list[int] = []
    logprobs: list[Logprob] = []  # one for each of tokens, when asked for
    prompt_logprobs: list[Logprob] = []  # of the prompt tokens start+1 .. start+count, when asked for
    error: str = ""  # the row could not be computed (logits not finite): the sequence ends with this line


class StepDone(Value):
    rows: list[RowResult]
    epoch: int  # of the plan whose rows these are
    seconds: float = 0.0  # that the step took; 0: not measured


class LeaseGranted(Value):
    """`fill`: the share of the budget of `budget_bytes` that is in use after it, 0 to 1."""

    ask: int
    lease: int
    fill: float = 0.0
    budget_bytes: int = 0  # 0: not told


class LeaseDenied(Value):
    """Also the answer to a deadline that passed, or to no host cache at all: then nothing is told of the budget."""

    ask: int
    reason: str
    fill: float = 0.0
    budget_bytes: int = 0


class Saved(Value):
    """The copies of a Save have ended. Not ok: the image is void (host cache lost, lease too small). `nbytes` were copied in
    `seconds` of copying, waits between its pieces not counted; 0: not measured."""

    request_id: str
    ok: bool
    nbytes: int = 0
    seconds: float = 0.0


class Loaded(Value):
    """The copies of a Load have ended and the image was verified. Not ok: recompute."""

    request_id: str
    ok: bool
    nbytes: int = 0
    seconds: float = 0.0


class HostCacheLost(Value):
    """Every lease is void. A copy under way still ends with its Saved or Loaded (not ok)."""


Event = (
    Submitted
    | CancelRequested
    | ParkRequested
    | ResumeRequested
    | StepDone
    | LeaseGranted
    | LeaseDenied
    | Saved
    | Loaded
    | HostCacheLost
)


# actions --------------------------------------------------------------------------------------------------------------
class Choice(Value):
    """How the cells of one park are kept, why, and what it was decided on (0 where that was not asked): see park_cost.py."""

    mode: Literal["save", "recompute"]
    reason: str
    cells: int = 0
    nbytes: int = 0
    copy_s: float = 0.0
    recompute_s: float = 0.0
    stay_s: float = 0.0
    fill: float = 0.0  # of the budget, with this image
    worth: float = 0.0  # seconds won per byte and second in the budget
    price: float = 0.0  # what they must be


class Reserve(Value):
    """Ask for a lease on `num_blocks` blocks, and the state if the model has one; answered by exactly one LeaseGranted or
    LeaseDenied, or by HostCacheLost."""

    ask: int
    request_id: str
    num_blocks: int


class Save(Value):
    """Copy `blocks` and then the state to the lease, in order, then commit. `position` is the number of cells in the image."""

    request_id: str
    lease: int
    blocks: tuple[int, ...]
    position: int
    state_slot: int = -1  # -1: the model has no recurrent state


class Load(Value):
    """Copy the image's blocks from number `first` on into `blocks`, and its state, verifying each; answered by Loaded."""

    request_id: str
    lease: int
    blocks: tuple[int, ...]
    first: int
    state_slot: int = -1


class ReleaseLease(Value):
    lease: int


class Emit(Value):
    request_id: str
    offset: int
    tokens: list[int]
    logprobs: list[Logprob] = []
    prompt_offset: int = 0
    prompt_logprobs: list[Logprob] = []


class Notify(Value):
    request_id: str
    event: Literal["parked", "resumed"]
    kind: ParkKind
    mode: Literal["save", "recompute"]
    parked_ms: int
    usage: Usage
    choice: Choice | None = None  # of a park


class Finish(Value):
    request_id: str
    reason: Literal["stop", "length", "cancelled", "error"]
    usage: Usage
    error: str = ""
    code: str = ""


Action = Reserve | Save | Load | ReleaseLease | Emit | Notify | Finish


# rows -----------------------------------------------------------------------------------------------------------------
class Row(Struct, frozen=True, gc=False):
    """One sequence's share of one step: feed tokens[start : start + count], then `draft` tokens that the head drafts.

    `tokens` is the sequence's own list, to be read only until the step ends. The cells of positions below `start` lie in
    `blocks`, which also has room for what is fed. If `samples`, the row after the last fed token yields the next token at
    position start + count, and each agreeing draft one more. Drafts are made and judged within the step: nothing of them is
    left when it ends.
    """

    request_id: str
    tokens: list[int]
    start: int
    count: int
    blocks: list[int]
    samples: bool
    sampling: Sampling  # with its seed
    prompt_len: int
    draft: int = 0  # only where count is 1, start above 0, and it samples
    state_slot: int = -1  # of its recurrent state; -1: the model has none
    banned: tuple[int, ...] = ()  # end tokens that may not be drawn yet (min_tokens)
    prompt_logprobs: int | None = None  # wanted for the prompt tokens predicted by this row; None: none


class Plan(Struct, frozen=True, gc=False):
    """Do `actions` in order, then run `rows` as one step. `epoch` comes back in StepDone."""

    actions: list[Action]
    rows: list[Row]
    epoch: int
