"""The four policies as one table: how full the pool may get, how far ahead that is asked, and who is parked first.

| policy    | somebody is parked when this passes that      | one comes in when this, with it, stays within that | first victim |
|-----------|-----------------------------------------------|----------------------------------------------------|--------------|
| watermark | the next step: HIGH                           | the next step: LOW                                 | newest       |
| lookahead | the next `lookahead_steps` decodes: the pool  | the next 64: the pool                              | smallest     |
| ondemand  | the next step: the pool                       | the next 64: the pool                              | smallest     |
| off       | never                                         | the next step: the pool                            |              |

Everything else (classes, the protected one, the order of coming back, save or recompute) is common to all of them.
"""

from msgspec import Struct

from gpu_worker.policy.limits import Limits

ENTER_AHEAD = 64  # steps. Without such a gap: 39,976 parks in 40,000 turns. Source: simulator


class Policy(Struct, frozen=True):
    """Lines are used blocks. `..._ahead` are the decode steps whose growth counts as used already."""

    parks: bool
    park_ahead: int
    park_line: int
    enter_ahead: int
    enter_line: int
    newest_first: bool = False  # victims; else smallest first


def policy_of(limits: Limits) -> Policy:
    """The row of the table, with percents turned into blocks."""
    pool = limits.num_blocks
    match limits.policy:
        case "watermark":
            return Policy(True, 1, high_line(limits), 1, low_line(limits), newest_first=True)
        case "lookahead":
            return Policy(True, limits.lookahead_steps, pool, enter_ahead(limits.lookahead_steps), pool)
        case "ondemand":
            return Policy(True, 1, pool, enter_ahead(1), pool)
        case "off":
            return Policy(False, 1, pool, 1, pool)


def high_line(limits: Limits) -> int:
    """More used blocks than this after the next step, and somebody is parked. Source: watermark page, 94 percent."""
    return max(1, limits.num_blocks * limits.high // 100)


def low_line(limits: Limits) -> int:
    """Up to as many used blocks, parked and waiting ones come in. At least one block below HIGH: without a gap a resume would be
    the next park. Sources: watermark page, 80 percent; simulator (the gap)."""
    return min(limits.num_blocks * limits.low // 100, high_line(limits) - 1)


def enter_ahead(park_ahead: int) -> int:
    """Steps for which there must be room when somebody comes in: more than are looked ahead when parking, or a resume would be
    the next park. Sources: both (a look ahead when parking), simulator (the gap)."""
    return max(ENTER_AHEAD, 2 * park_ahead)
