"""`parkade status` and `parkade top`: the state of a server as one picture, once or live."""

import sys
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from parkade.api import Api, ApiError
from parkade.drafts import Drafts

BAR_CHARS = 50
CELLS = (("active", "green"), ("parking", "yellow"), ("resuming", "cyan"), ("reusable", "blue"), ("free", "bright_black"))
STATES = {"running": "green", "parked": "yellow", "parking": "yellow", "resuming": "cyan", "waiting": "magenta", "idle": "dim"}
MAX_SLOTS_SHOWN = 40


@dataclass(frozen=True)
class Snapshot:
    """What a server says of itself at one moment."""

    url: str
    at: float
    props: dict[str, Any]
    slots: list[dict[str, Any]]
    metrics: dict[str, float]

    def figure(self, name: str) -> float:
        """One figure, 0 if it is not there."""
        return self.metrics.get(name, 0.0)


def look(api: Api) -> Snapshot:
    """Ask a server for everything that is shown. ApiError if it does not answer."""
    props = api.get("/props")
    if not isinstance(props, dict) or "draining" not in props:
        raise ApiError(f"what answers at {api.url} is no Parkade server")
    return Snapshot(api.url, time.monotonic(), props, api.get("/slots"), api.metrics())


def status(url: str, api_key: str) -> None:
    """Print the picture once."""
    console = Console(width=None if sys.stdout.isatty() else 140)  # in a pipe nothing is cut off
    console.print(picture(look(Api(url, api_key)), None))


def top(url: str, api_key: str, every_s: float) -> int:
    """Show the picture until Ctrl-C. A server that goes away and comes back is waited for."""
    api = Api(url, api_key)
    before = now = look(api)
    with Live(picture(now, None), console=Console(), screen=False, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every_s)
                try:
                    before, now = now, look(api)
                    live.update(picture(now, before), refresh=True)
                except ApiError as error:
                    live.update(Text(str(error), style="red"), refresh=True)
        except KeyboardInterrupt:
            return 0


def picture(now: Snapshot, before: Snapshot | None) -> RenderableType:
    """Everything about a server in one view; `before` gives the rate of tokens."""
    return Group(_headline(now, before), pool_bar(now.metrics), _figures(now), _slots(now.slots))


def pool_bar(metrics: dict[str, float]) -> Text:
    """The pool as a bar, a colour for each kind of cells, and the numbers."""
    cells = {state: int(metrics.get(f'parkade_kv_cells{{state="{state}"}}', 0)) for state, _ in CELLS}
    total = sum(cells.values())
    bar = Text("pool ")
    drawn = seen = 0
    for state, colour in CELLS:
        seen += cells[state]
        until = round(BAR_CHARS * seen / total) if total else 0
        bar.append(("░" if state == "free" else "█") * (until - drawn), style=colour)
        drawn = until
    bar.append(f" {total - cells['free'] - cells['reusable']} of {total} cells:")
    for state, colour in CELLS:
        bar.append(f" {state} {cells[state]}", style=colour)
    return bar


def _headline(now: Snapshot, before: Snapshot | None) -> Text:
    props = now.props
    ready = ("draining", "yellow") if props["draining"] else ("ready", "green") if props["ready"] else ("not ready", "red")
    line = Text.assemble(
        ("parkade ", "bold"), f"{now.url}  {props['model']}  ", ready, f"  exact {'yes' if props['exact'] else 'no'}"
    )
    if before is not None and now.at > before.at:
        name = "parkade_tokens_generated_total"
        rate = max(0.0, now.figure(name) - before.figure(name)) / (now.at - before.at)
        line.append(f"  {rate:.0f} tokens/s", style="bold")
    return line


def _figures(now: Snapshot) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(6):
        table.add_column()
    used, held, budget = (now.figure(f"parkade_hostcache_{name}_bytes") / 2**20 for name in ("used", "held", "budget"))
    preempts = " ".join(
        f"{kind} {int(now.figure(_of('parkade_preempt_total', kind=kind)))}" for kind in ("pressure", "forced", "explicit")
    )
    drafts = Drafts.of(now.metrics)
    denied = int(sum(value for name, value in now.metrics.items() if name.startswith("parkade_park_denied_total")))
    rows = (
        ("running", now.figure("parkade_requests_running"), "queued", now.figure("parkade_requests_queued"),
         "parked", now.figure("parkade_requests_preempted")),
        ("tokens", now.figure("parkade_tokens_generated_total"), "resumes", now.figure("parkade_resume_total"),
         "recomputed", now.figure("parkade_recompute_tokens_total")),
        ("parks", preempts, "denied", denied, "park RAM", f"{used:.0f} used, {held:.0f} held of {budget:.0f} MiB"),
        ("drafts", f"up to {most}" if (most := now.props["draft"]) else f"none: {now.props['draft_note']}",
         "drafted", sum(drafts.drafted), "accepted", drafts.shares()),
    )  # fmt: skip
    for row in rows:
        table.add_row(
            *(Text(x, style="dim") if i % 2 == 0 else f"{x:.0f}" if isinstance(x, float) else str(x) for i, x in enumerate(row))
        )
    return table


def _slots(slots: list[dict[str, Any]]) -> Table:
    names = ("slot", "state", "request", "priority", "tokens", "parks", "recomputes", "parked ms", "drafted", "accepted")
    table = Table(*names, box=None, header_style="dim")
    for slot in sorted(slots, key=lambda slot: (slot["state"] == "idle", slot["id"]))[:MAX_SLOTS_SHOWN]:
        state = slot["state"]
        shown = f"{state}, set aside" if slot["held"] else state
        table.add_row(
            str(slot["id"]), Text(shown, style=STATES.get(state, "")), slot["request_id"], str(slot["priority"]),
            str(slot["n_tokens"]), str(slot["n_preempt"]), str(slot["n_recompute"]), str(slot["parked_ms"]), str(slot["drafted"]),
            "-" if slot["acceptance"] is None else f"{slot['acceptance']:.0%}",
        )  # fmt: skip
    if len(slots) > MAX_SLOTS_SHOWN:
        table.add_row("…", f"{len(slots) - MAX_SLOTS_SHOWN} more")
    return table


def _of(name: str, **labels: str) -> str:
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}"
