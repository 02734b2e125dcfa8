"""What the host does for a decode step stays within its goals, torch and the driver left out; in processor time of its thread."""

import time

import pytest

from benchmarks import host_cost
from gpu_worker.on_card import OpenCard
from tests.cuda.fake import environ


@pytest.fixture
def mode() -> str:
    return "eager"


@pytest.mark.parametrize("draft", [0, 2])
def test_a_step_of_32_sequences(card, draft):
    environ.configure(mode="eager", run=False)
    bench = host_cost.make(OpenCard(card.card, card.torch, 0), 32)
    whole = host_cost.measure(bench, draft, 3)
    attributes = dict(vars(card.card)), dict(vars(card.torch))
    host_cost.silence(bench)
    host = host_cost.measure(bench, draft, 60, time.thread_time)
    for one, before in zip((card.card, card.torch), attributes, strict=True):
        vars(one).clear()
        vars(one).update(before)
    assert whole["calls"] > whole["graph"], "nothing was enqueued: the test shows nothing"
    assert host["graph"] < host_cost.GOAL_US["graph"], host
    assert host["calls"] < host["first"] < host_cost.GOAL_US["calls"], host
