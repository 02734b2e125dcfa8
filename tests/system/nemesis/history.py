"""The history of a run in JSON Lines: what was asked, said and done, each with the seconds since the run began."""

import json
import time
from pathlib import Path


class History:
    """Events as dicts, in order; each is written at once."""

    def __init__(self, path: Path | None = None) -> None:
        self.events: list[dict] = []
        self._file = path.open("w") if path else None
        self.begin()

    def begin(self) -> None:
        """The run begins now."""
        self._began = time.monotonic()
        self.token_at = 0.0  # the newest

    @property
    def now(self) -> float:
        return round(time.monotonic() - self._began, 4)

    def record(self, event: str, **fields: object) -> None:
        entry = {"t": self.now, "event": event, **fields}
        self.events.append(entry)
        if event == "tokens":
            self.token_at = entry["t"]
        if self._file:
            self._file.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        if self._file:
            self._file.close()


def read(path: Path) -> list[dict]:
    """The events of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
