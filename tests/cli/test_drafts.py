"""Drafts as the operator sees them: by position, per step, in the tables."""

import io

from rich.console import Console

from parkade.bench import empty_table, figures
from parkade.drafts import Drafts
from parkade.status import Snapshot, picture
from parkade.streams import Followed


def metrics(drafted: list[int], accepted: list[int]) -> dict[str, float]:
    return {
        f'parkade_{kind}_tokens_total{{position="{position}"}}': float(value)
        for kind, values in (("drafted", drafted), ("accepted", accepted))
        for position, value in enumerate(values, 1)
    }


def test_drafts_of_the_metrics() -> None:
    before, now = Drafts.of(metrics([10], [5])), Drafts.of(metrics([110, 40, 0], [75, 10, 0]))
    round_ = now.since(before)
    assert round_ == Drafts((100.0, 40.0, 0.0), (70.0, 10.0, 0.0))
    assert round_.shares() == "70% 25% -"
    assert round_.tokens_per_step(180) == 1.8


def test_a_server_without_drafts() -> None:
    nothing = Drafts.of({})
    assert nothing.since(nothing).shares() == "-"
    assert nothing.tokens_per_step(100) == nothing.tokens_per_step(0) == 1.0


def test_a_round_of_the_benchmark() -> None:
    streams = [Followed(f"stream {i}", token_ids=[1] * 90, arrivals=[(1.0, 90)]) for i in range(2)]
    row = figures(streams, 4.0, Drafts((100.0, 40.0), (70.0, 10.0)))
    assert row[:3] == ["45.0", "1.80", "70% 25%"]
    table = empty_table()
    table.add_row("1", *row)
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    assert "…" not in console.file.getvalue() and len(console.file.getvalue().splitlines()) == 3


def test_the_picture_shows_acceptance() -> None:
    slot = {"id": 0, "state": "running", "request_id": "r", "n_tokens": 5, "n_preempt": 0, "n_recompute": 0, "parked_ms": 0}
    slot |= {"priority": 0, "held": False}
    slots = [slot | {"drafted": 30, "accepted": 20, "acceptance": 0.6667}, slot | {"id": 1, "drafted": 0, "acceptance": None}]
    props = {"draining": False, "ready": True, "model": "m", "exact": True, "draft": 2, "draft_note": ""}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(picture(Snapshot("url", 0.0, props, slots, metrics([30, 9], [20, 3])), None))
    text = console.export_text()
    assert "up to 2" in text and "67% 33%" in text and text.count("67%") == 2
    console.print(picture(Snapshot("url", 0.0, props | {"draft": 0, "draft_note": "m has no head"}, slots, {}), None))
    assert "none: m has no head" in console.export_text()


def test_the_picture_shows_who_is_set_aside_and_whose_class_is_which() -> None:
    slot = {"id": 0, "state": "parked", "request_id": "r", "n_tokens": 5, "n_preempt": 1, "n_recompute": 0, "parked_ms": 0}
    slot |= {"priority": -42, "held": True, "drafted": 0, "acceptance": None}
    props = {"draining": False, "ready": True, "model": "m", "exact": True, "draft": 0, "draft_note": ""}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(picture(Snapshot("url", 0.0, props, [slot, slot | {"id": 1, "held": False}], {}), None))
    text = console.export_text()
    assert text.count("parked, set aside") == 1 and text.count("-42") == 2
