"""`parkade sim --journal`: what it prints, and its exit status."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from gpu_worker.journal import Journal, JournaledScheduler
from gpu_worker.policy import preemption
from gpu_worker.policy.events import RowResult, StepDone, Submitted
from gpu_worker.policy.limits import Limits
from gpu_worker.policy.recording import Header
from parkade.cli import main
from parkade.replay import replay_journal
from wire.config import ConfigError
from wire.messages import Generate, Submit

LIMITS = Limits(num_blocks=10, block_size=4, slots=3, max_context=40, policy="watermark", park_mode="recompute")


@pytest.fixture
def journal(tmp_path: Path) -> str:
    """Three sequences that outgrow the pool together."""
    scheduler = JournaledScheduler(LIMITS, Journal(tmp_path / "run.journal", Header(LIMITS, "cpu0", "bard", "f32")))
    for number in range(3):
        generate = Generate(f"r{number}", [number + 1] * 8, max_tokens=20)
        scheduler.handle(Submitted(Submit(generate, arrival=number)), 0.0)
    now = 0.0
    while not scheduler.idle:
        plan = scheduler.plan(now)
        results = [RowResult(row.request_id, [50] if row.samples else []) for row in plan.rows]
        now += 0.5
        scheduler.handle(StepDone(results, plan.epoch), now)
        assert now < 1000
    scheduler.journal.close()
    return str(tmp_path / "run.journal")


def test_the_same_plans(journal: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_journal(journal) == 0
    out = capsys.readouterr().out
    assert "cpu0 bard f32: ctx 40, slots 3, policy watermark, park-mode recompute" in out
    assert "pressure" in out and "all plans are the same" in out


def test_other_plans(journal: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "victims", lambda *_: [])
    assert replay_journal(journal) == 1
    assert "not the same: plan " in capsys.readouterr().out


def test_no_journal_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--journal .*nothing: No such file"):
        replay_journal(str(tmp_path / "nothing"))
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="--journal .*text: this is no journal"):
        replay_journal(str(tmp_path / "text"))


def test_another_option_beside_it_is_refused(journal: str) -> None:
    result = CliRunner().invoke(main, ["sim", "--journal", journal, "--policy", "off"])
    assert result.exit_code == 1
    assert "--journal brings its own settings; leave --policy out" in result.output
