"""Fake cards for the tests in this folder."""

from tests.cuda.fake.fixtures import card, fake_driver, mode

__all__ = ["card", "fake_driver", "mode"]
