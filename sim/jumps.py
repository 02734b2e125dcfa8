"""Jumps: how many steps can be played as one, because nothing in them can change the next plan but their tokens.

In each of them every running sequence decodes, except perhaps some prompts; the first of these gets a whole chunk each time.
A jump of k steps is one plan of the scheduler itself, in which each decode has k - 1 drafts, all of which agree, and the step's
budget is k times as large. This file only says how large k may be; too small is never wrong.
"""

from bisect import bisect_right
from math import inf

from msgspec import Struct

from gpu_worker.policy import preemption
from gpu_worker.policy.scheduler import Scheduler
from gpu_worker.policy.sequence import Sequence
from sim.costs import CostModel, attended


class Jump(Struct, frozen=True):
    """`steps` steps of `decodes` decodes that read `decode_cells` cells in the first, and of a chunk that begins at `start`."""

    steps: int
    decodes: int = 0
    decode_cells: int = 0
    chunk: int = 0
    start: int = 0

    def seconds(self, costs: CostModel, steps: int) -> float:
        """Of the first `steps` of them: a step takes evenly longer with each."""
        grown = steps * self.decode_cells + self.decodes * (steps * (steps - 1) // 2)
        same = steps * costs.step_s(self.decodes, self.chunk, 0, 0)
        return same + costs.decode_cell_s * grown + costs.prefill_cell_s * attended(self.start, steps * self.chunk)


ONE = Jump(1)


def longest_jump(scheduler: Scheduler, costs: CostModel, until_s: float) -> Jump:
    """The longest that begins now. `until_s`: seconds until something happens that a plan must know of."""
    book, policy, limits = scheduler.book, scheduler.policy, scheduler.limits
    if book.changed or book.parking or book.resuming or not book.running or limits.park_every:
        return ONE
    size = book.pool.block_size
    most = 1 << 62
    decodes = cells = 0
    by_room = [0] * (size + 2)  # decodes that have room for so many more tokens in their blocks, from -1 on
    behind = []
    for seq in book.running.values():
        known = len(seq.tokens)
        if known - seq.computed != 1:
            behind.append(seq)
            continue
        left = seq.end_len - known
        if left < most:
            most = left
        decodes += 1
        cells += known
        by_room[min(len(seq.blocks) * size - known, size) + 1] += 1
    if most < 2:
        return ONE
    chunk = start = 0
    if behind:
        if limits.park_mode == "auto" or any(preemption.missing(seq, book.pool) for seq in behind):
            return ONE  # auto learns from each chunk what one takes
        first = _first(behind, scheduler)
        chunk, start = limits.step_budget - decodes, first.computed
        if chunk < 1:
            return ONE
        most = min(most, (len(first.tokens) - start - 1) // chunk)  # its last chunk yields a token
        if most < 2:
            return ONE
    jump = Jump(most, decodes, cells, chunk, start)
    most = _before_anything(jump, until_s, costs)
    if most < 2:
        return ONE

    rooms = [(room - 1, number) for room, number in enumerate(by_room) if number]
    used = book.pool.used + sum(preemption.missing(seq, book.pool, policy.park_ahead) for seq in behind)

    def blocks_after(steps: int) -> int:
        """Used blocks that the policy counts before the last of `steps` steps. A bound: near its end a sequence grows less."""
        ahead = steps - 1 + policy.park_ahead - 1
        return used + sum(number * max(0, -(-(ahead - room) // size)) for room, number in rooms)

    if blocks_after(most) > policy.park_line:
        within = bisect_right(range(1, most + 1), policy.park_line, key=blocks_after)
        if rooms and (policy.park_ahead == 1 or len(book.running) == 1):
            # nobody asks who must leave while everybody stays in the blocks that they have; nor is there anybody who could
            within = max(within, min(most, rooms[0][0] + 1))
        most = max(1, within)
    return ONE if most < 2 else Jump(most, decodes, cells, chunk, start)


def _first(behind: list[Sequence], scheduler: Scheduler) -> Sequence:
    """Whose prompt is computed first."""
    top, now = scheduler.book.top_class, scheduler.now
    return min(behind, key=lambda seq: (preemption.class_of(seq, top, now), seq.arrival))


def _before_anything(jump: Jump, until_s: float, costs: CostModel) -> int:
    """Its steps, as far as the last one begins before `until_s`."""
    if until_s == inf or jump.seconds(costs, jump.steps - 1) < until_s:
        return jump.steps
    low, high = 0, jump.steps - 1  # `low` steps end before it, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        if jump.seconds(costs, middle) < until_s:
            low = middle
        else:
            high = middle
    return low + 1
