"""What the host does for a decode step, counted in calls of Python: benchmarks/host_cost.py says what they take."""

import sys

import pytest

from benchmarks import host_cost
from gpu_worker.on_card import OpenCard
from tests.cuda.fake import environ

SEQUENCES = 8


class Calls:
    """A clock that counts calls, of Python's functions and of others'."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> float:
        return self._count / 1e6  # measure() tells millionths

    def __enter__(self) -> "Calls":
        sys.setprofile(self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _heard(self, _frame: object, event: str, _argument: object) -> None:
        self._count += event in ("call", "c_call")


@pytest.fixture
def mode() -> str:
    return "eager"


def calls(card, layers: int, draft: int) -> dict[str, int]:
    """Of a step of SEQUENCES decodes, the driver and torch left out."""
    bench = host_cost.make(OpenCard(card.card, card.torch, 0), SEQUENCES, layers)
    whole = host_cost.measure(bench, draft, 3)
    assert whole["calls"] > whole["graph"], "nothing was enqueued: the test shows nothing"
    attributes = dict(vars(card.card)), dict(vars(card.torch))
    host_cost.silence(bench)
    try:
        with Calls() as counted:
            return {name: round(count) for name, count in host_cost.measure(bench, draft, 9, counted).items()}
    finally:
        for one, before in zip((card.card, card.torch), attributes, strict=True):
            vars(one).clear()
            vars(one).update(before)


@pytest.mark.parametrize("draft", [0, 2])
def test_a_graph_costs_the_same_for_any_number_of_layers_and_a_prepared_step_little_more(card, draft):
    environ.configure(mode="eager", run=False)
    few, many = calls(card, 4, draft), calls(card, 16, draft)
    assert few["graph"] == many["graph"] < 100 + 40 * SEQUENCES
    assert many["calls"] - few["calls"] <= 12 * 16  # one call for each launch and each product
    assert many["first"] > 2 * many["calls"]
