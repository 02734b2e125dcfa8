"""`parkade sim --journal FILE`: a journal of `parkade serve --journal` through a fresh scheduler, which must plan the same."""

from pathlib import Path

from rich.console import Console

from sim.replay import JournalError, replay
from wire.config import ConfigError


def replay_journal(path: str) -> int:
    """Print what was replayed; status 1 if a plan differs. ConfigError is one line for the user."""
    try:
        found = replay(Path(path))
    except OSError as error:
        raise ConfigError(f"--journal {path}: {error.strerror}") from None
    except JournalError as error:
        raise ConfigError(f"--journal {path}: {error}") from None
    console, header = Console(soft_wrap=True), found.header
    limits = header.limits
    parks = ", ".join(f"{count} {kind}" for kind, count in sorted(found.parks.items()) if count)
    console.print(
        f"{header.worker} {header.model} {header.dtype}: ctx {limits.pool_cells}, slots {limits.slots}, policy {limits.policy}, "
        f"park-mode {limits.park_mode}; {found.seconds:.1f} s of a real run",
        markup=False,
    )
    console.print(
        f"{found.plans} plans and {found.events} events, {found.steps} steps with {found.rows} rows; parks: {parks or 'none'}",
        markup=False,
    )
    if found.difference:
        console.print(f"not the same: {found.difference}", style="red", markup=False)
        return 1
    console.print("all plans are the same", style="green")
    return 0
