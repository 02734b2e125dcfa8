"""What a reader that stops costs: real processes, a worker that goes on producing, readers that take nothing."""

import pytest

from benchmarks.sse import bench
from benchmarks.stopped import measure

pytestmark = pytest.mark.system

MOST_BYTES = 256 << 10  # of router, adapter and the kernel's send queue together
READERS = 32


@pytest.mark.parametrize("how", ["http", "zeromq"])
def test_a_reader_that_stops_costs_little(how: str) -> None:
    with bench() as running:
        running.measure(4, 2_000)
        cost = measure(running, READERS, how)
    assert cost.total < MOST_BYTES, cost
