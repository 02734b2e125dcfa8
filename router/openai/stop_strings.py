"""Stop strings across token borders: text goes in piece by piece, and comes out as soon as it cannot be part of a stop string.

The first stop string that is complete wins, of several complete at the same character the longest. That depends on the
characters only, never on how they were cut into pieces.
"""

from collections.abc import Sequence


class StopStrings:
    """`push` text until `matched` is set. Held back is the longest end of the text that begins a stop string, no more."""

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        self.matched: str | None = None
        self._strings = strings
        self._include = include
        self._tables = [_borders(string) for string in strings]
        self._states = [0] * len(strings)  # how many characters of each string the text ends with
        self._held = ""

    def push(self, text: str) -> str:
        """The text that may be shown now. After a match: what precedes it (or includes it, if so asked), later nothing."""
        if self.matched is not None:
            return ""
        if not self._strings:
            return text
        for at, character in enumerate(text):
            if ended := self._advance(character):
                self.matched = ended
                shown = self._held + text[: at + 1]
                return shown if self._include else shown[: len(shown) - len(ended)]
        shown = self._held + text
        held = max(self._states)
        self._held = shown[len(shown) - held :]
        return shown[: len(shown) - held]

    def finish(self) -> str:
        """The text still held back, when no more will come."""
        held, self._held = ("", "") if self.matched is not None else (self._held, "")
        return held

    def _advance(self, character: str) -> str:
        ended = ""
        for i, string in enumerate(self._strings):
            state, table = self._states[i], self._tables[i]
            while state and string[state] != character:
                state = table[state - 1]
            if string[state] == character:
                state += 1
            if state == len(string):
                ended = max(ended, string, key=len)
                state = table[state - 1]
            self._states[i] = state
        return ended


def _borders(string: str) -> list[int]:
    """Knuth, Morris and Pratt's table: for each prefix, the length of its longest proper prefix that is also its end."""
    table = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = table[length - 1]
        if string[i] == string[length]:
            length += 1
        table[i] = length
    return table
