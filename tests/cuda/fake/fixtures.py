"""Fixtures of tests that use a fake card in their own process: import what you need of them into your test file."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.cuda.fake import environ


@pytest.fixture(scope="session")
def fake_driver() -> Iterator[None]:
    """The fake driver in this process, without cards."""
    if reason := environ.missing():
        pytest.skip(f"no fake card: {reason}")
    environ.load()
    environ.configure(cards=0)
    patch = pytest.MonkeyPatch()
    from gpu_worker.device import nvrtc

    patch.setattr(nvrtc, "cache_folder", lambda: environ.CACHE / "parkade" / "kernels")
    yield
    patch.undo()


@pytest.fixture(params=["lazy", "eager", "random:1", "random:2"])
def mode(request: pytest.FixtureRequest) -> str:
    """How late the streams of `card` run what they are given."""
    return request.param


@pytest.fixture
def card(fake_driver: None, mode: str, request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """A card of 4 GiB: `.card` (device/cuda.py) and `.torch` (torch_on_card). After the test nothing of it may be left, and
    nothing may have gone wrong but what the test puts into `.expected` (environ.WRONG)."""
    from gpu_worker.device import torch_on_card
    from gpu_worker.device.cuda import Card

    environ.configure(mode=mode)
    before = environ.counters()
    opened, expected = Card(0), []
    try:
        yield SimpleNamespace(card=opened, torch=torch_on_card.TorchOnCard(opened), expected=expected)
    finally:
        request.node.funcargs.clear()  # pytest would keep what the test had of the card
        gc.collect()
        opened.close()
        now = environ.counters()
        environ.configure(cards=0)
    complaints = [complaint for complaint in environ.complaints(now, before) if complaint.partition(":")[0] not in expected]
    assert not complaints, complaints
