"""Kernels run on the CPU: `schedule` runs a test in three orders of the threads; without g++ the tests say so and are skipped."""

import os
from pathlib import Path

import pytest

from tests.kernels import harness

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if harness.compiler() or "KERNELS_ON" in os.environ:
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason="no g++ to compile kernels for the CPU"))


# a sanitizer sees what is wrong in any order, and a card has its own
@pytest.fixture(params=["random"] if {"KSHIM_SANITIZER", "KERNELS_ON"} & set(os.environ) else ["forward", "reverse", "random"])
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs once in each order; harness.run uses it where the call names none."""
    monkeypatch.setitem(harness.schedule, "order", request.param)
    monkeypatch.setitem(harness.schedule, "seed", 20261130)
    return request.param
