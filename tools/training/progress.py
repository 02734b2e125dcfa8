"""A progress bar with the newest figures; one line now and then where there is no terminal."""

import sys
import time

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_EVERY_S = 30.0


class Progress:
    """Use as a context."""

    def __init__(self, what: str) -> None:
        columns = [TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
        self._bar = Bar(*columns, TextColumn("{task.fields[figures]}"), disable=not sys.stdout.isatty())
        self._task = self._bar.add_task(what, total=None, figures="")
        self._line_at = 0.0
        self._means: dict[str, float] = {}

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, done: int, total: int, **figures: float) -> None:
        """How far it is, with running means of the figures."""
        for name, value in figures.items():
            self._means[name] = value if name not in self._means else 0.95 * self._means[name] + 0.05 * value
        text = ", ".join(f"{name} {value:.3f}" for name, value in self._means.items())
        self._bar.update(self._task, completed=done, total=total, figures=text)
        if self._bar.disable and time.monotonic() - self._line_at >= LINE_EVERY_S:
            self._line_at = time.monotonic()
            print(f"{done} of {total}: {text}", flush=True)

    def note(self, text: str) -> None:
        """A line that stays."""
        print(text, flush=True) if self._bar.disable else self._bar.console.print(text)
