"""Limits: what the operator has set and what the device has, as the policy needs it."""

from typing import Literal

from msgspec import Struct


class Limits(Struct, frozen=True, kw_only=True):
    """ValueError if nothing could ever run. What `policy`, `high`, `low` and `lookahead_steps` mean together: see policies.py."""

    num_blocks: int
    block_size: int  # cells
    slots: int  # sequences that may run at once
    max_context: int  # most cells that one sequence may use
    step_tokens: int = 256  # what one step may feed
    policy: Literal["watermark", "lookahead", "ondemand", "off"] = "ondemand"
    high: int = 94  # percent, as `low`
    low: int = 80
    lookahead_steps: int = 8
    protect_after: int = 3  # pressure parks, after which one is passed over while another candidate exists
    resume_order: Literal["most-parked", "head"] = "head"
    max_park_s: float = 0.0  # who waits so long to come back comes back first; 0: nobody
    park_mode: Literal["save", "recompute", "auto"] = "save"  # recompute never asks for a lease, auto compares what both cost
    block_bytes: int = 0  # of a block in an image; as `state_bytes`, of its state, for what a copy costs
    state_bytes: int = 0
    park_every: int = 0  # generated tokens, after which a park is forced; 0: never
    reuse: bool = True  # blocks may be found again by hash
    draft_max: int = 0  # most tokens that the head may draft for one row in a step
    draft_rows: int = 64  # most rows, drafts included, that the decodes of a step with drafts may feed
    # [d - 1]: what one draft for each of d decodes costs, in percent of the step without drafts; the last one is for all larger d
    draft_cost: tuple[int, ...] = (30, 40, 50, 60)
    state_slots: int | None = None  # recurrent states that the device has room for; None: the model has none
    eos_token_ids: tuple[int, ...] = ()
    exact: bool = False

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.block_size, self.slots, self.max_context, self.step_tokens, self.lookahead_steps) < 1:
            raise ValueError("num_blocks, block_size, slots, max_context, step_tokens and lookahead_steps must be at least 1")
        if self.state_slots is not None and self.state_slots < 1:
            raise ValueError("state_slots must be at least 1, or nothing could run")
        if self.state_slots is not None and self.reuse:
            raise ValueError("reuse must be off where there is a recurrent state: blocks alone cannot rebuild it")
        if not self.draft_cost or min(self.draft_cost) < 0:
            raise ValueError("draft_cost must be percents, at least one")

    @property
    def pool_cells(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def sequence_cells(self) -> int:
        """The most tokens one sequence may have: it ends with `length` when it has as many."""
        return min(self.pool_cells, self.max_context)

    @property
    def step_budget(self) -> int:
        """Tokens a step may feed: never so few that the decodes of all slots leave nothing for a prefill."""
        return max(self.step_tokens, self.slots * (1 + self.draft_max))
