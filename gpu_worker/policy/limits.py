"""Limits: what the operator has set and what the device has, as the policy needs it."""

from typing import Literal

from msgspec import Struct


class Limits(Struct, frozen=True, kw_only=True):
    """`num_blocks` blocks of `block_size` cells; `max_context` is the most cells one sequence may use; `high` and `low` percent.

    `slots` sequences may run at once. `step_tokens` is what one step may feed. `park_every` 0: never. What `policy`, `high`,
    `low` and `lookahead_steps` mean together is in policies.py. A sequence that pressure has parked `protect_after` times is
    passed over while another candidate exists; one that waits to come back for `max_park_s` comes back first (0: never).
    `draft_max` is the most tokens the head may draft for one row in a step, `draft_rows` the most rows, drafts included, that the
    decodes of a step with drafts may feed. `draft_cost[d - 1]` is what one draft for each of d decodes costs, in percent of the
    step without drafts; the last entry stands for all larger d. `state_slots` sequences have room for a recurrent state on the
    device; None: the model has no such state. `park_mode` recompute never asks for a lease; auto compares what both ways cost,
    for which `block_bytes` and `state_bytes` say how large an image is. ValueError if nothing could ever run.
    """

    num_blocks: int
    block_size: int
    slots: int
    max_context: int
    step_tokens: int = 256
    policy: Literal["watermark", "lookahead", "ondemand", "off"] = "watermark"
    high: int = 94
    low: int = 80
    lookahead_steps: int = 8
    protect_after: int = 3
    resume_order: Literal["most-parked", "head"] = "most-parked"
    max_park_s: float = 0.0
    park_mode: Literal["save", "recompute", "auto"] = "save"
    block_bytes: int = 0
    state_bytes: int = 0
    park_every: int = 0
    reuse: bool = True
    draft_max: int = 0
    draft_rows: int = 64
    draft_cost: tuple[int, ...] = (30, 40, 50, 60)
    state_slots: int | None = None
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
