"""`parkade systemd wait-drained`, which a worker's unit runs before its worker is told to stop."""

from pathlib import Path

import pytest

from parkade import systemd
from wire.config import Config
from wire.messages import Status


class Answers:
    """A client whose router says in turn whether it drains, and then nothing more."""

    def __init__(self, *drains: bool | None) -> None:
        self.drains = list(drains)

    def __call__(self, address: str) -> "Answers":
        return self

    async def __aenter__(self) -> "Answers":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def status(self, timeout_s: float) -> Status:
        said = self.drains.pop(0) if self.drains else None
        if said is None:
            raise TimeoutError
        return Status("q", ready=True, draining=said)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "FIRST_ANSWER_S", 0.0)
    monkeypatch.setattr(systemd, "AGAIN_S", 0.0)
    monkeypatch.setattr(systemd, "ASK_S", 0.1)


def left(monkeypatch: pytest.MonkeyPatch, *drains: bool | None) -> list[bool | None]:
    """The answers that were not asked for."""
    answers = Answers(*drains)
    monkeypatch.setattr(systemd, "Client", answers)
    assert systemd.wait_drained(Config(run_dir="/run/x")) == 0
    return answers.drains


def test_a_drain_is_waited_for_until_the_router_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left(monkeypatch, True, True, True) == []


def test_one_question_without_an_answer_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left(monkeypatch, True, None, True, None, None, True) == [True]


def test_a_router_that_does_not_drain_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left(monkeypatch, False, False, True) == [False, True]


def test_a_router_has_a_moment_to_hear_that_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "FIRST_ANSWER_S", 60.0)
    assert left(monkeypatch, False, False, True, True) == []


def test_no_router_is_not_waited_for(tmp_path: Path) -> None:
    assert systemd.wait_drained(Config(run_dir=str(tmp_path))) == 0
