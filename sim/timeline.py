"""Timeline: the pool over the time of one run, for a plot; bounded for a run of any length."""

from msgspec import Struct

from gpu_worker.policy.limits import Limits
from gpu_worker.policy.policies import policy_of


class Moment(Struct, frozen=True):
    """The pool at one time. `parked_cells`: tokens of those that are off the device."""

    at_s: float
    used_cells: int
    parked_cells: int
    running: int
    parked: int
    waiting: int


class Timeline:
    """Moments, thinned out as they become more, so that a run of any length keeps at most MOST of them."""

    MOST = 1000

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self._every_s = 0.0
        self._next_s = 0.0

    def due(self, now: float) -> bool:
        return now >= self._next_s

    def add(self, moment: Moment) -> None:
        self.moments.append(moment)
        if len(self.moments) >= self.MOST:
            self.moments = self.moments[::2]
            self._every_s = 2 * (moment.at_s - self.moments[0].at_s) / self.MOST
        self._next_s = moment.at_s + self._every_s


def lines_of(limits: Limits) -> tuple[int, int]:
    """Used cells above which the policy parks somebody, and up to which somebody comes in; the pool where there is no line."""
    policy = policy_of(limits)
    return policy.park_line * limits.block_size, policy.enter_line * limits.block_size
