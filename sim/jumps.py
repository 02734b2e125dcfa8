"""Jumps: how many plain decode steps can be played as one, because nothing in them can change the next plan but their tokens.

A jump of k steps is one step in which every running sequence has k - 1 drafts and all of them agree. The scheduler itself plays
it; this only says how large k may be. Too small is never wrong.
"""

from bisect import bisect_right
from math import inf

from gpu_worker.policy.scheduler import Scheduler
from sim.costs import CostModel


def steps_alike(scheduler: Scheduler, costs: CostModel, until_s: float) -> int:
    """Steps, at least 1, that can be played as one. `until_s`: seconds until something happens that a plan must know of."""
    book, policy = scheduler.book, scheduler.policy
    if book.changed or book.parking or book.resuming or not book.running or scheduler.limits.park_every:
        return 1
    size = book.pool.block_size
    most = 1 << 62
    cells = 0
    by_room = [0] * (size + 2)  # how many have room for so many more tokens in their blocks, from -1 on
    for seq in book.running.values():
        known = len(seq.tokens)
        left = seq.end_len - known
        if known - seq.computed != 1 or left < 2:
            return 1
        if left < most:
            most = left
        cells += known
        by_room[min(len(seq.blocks) * size - known, size) + 1] += 1
    count = len(book.running)
    most = _before_anything(most, until_s, costs, count, cells)
    if most < 2:
        return 1

    rooms = [(room - 1, number) for room, number in enumerate(by_room) if number]

    def blocks_after(steps: int) -> int:
        """Used blocks that the policy counts before the last of `steps` steps. A bound: near its end a sequence grows less."""
        ahead = steps - 1 + policy.park_ahead - 1
        return book.pool.used + sum(number * max(0, -(-(ahead - room) // size)) for room, number in rooms)

    if blocks_after(most) <= policy.park_line:
        return most
    within = bisect_right(range(1, most + 1), policy.park_line, key=blocks_after)
    if policy.park_ahead == 1 or count == 1:
        # nobody asks who must leave while everybody stays in the blocks that they have; nor is there anybody who could
        within = max(within, min(most, rooms[0][0] + 1))
    return max(1, within)


def _before_anything(most: int, until_s: float, costs: CostModel, count: int, cells: int) -> int:
    """Steps, up to `most`, of which the last one begins before `until_s`."""
    if until_s == inf or costs.steps_s(most - 1, count, cells) < until_s:
        return most
    low, high = 0, most - 1  # `low` steps end before it, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        if costs.steps_s(middle, count, cells) < until_s:
            low = middle
        else:
            high = middle
    return low + 1
