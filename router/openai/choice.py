"""One stream of the router as one choice of an answer: tokens in, text, logprobs and the reason of its end out."""

from msgspec import Struct

from router.openai.errors import from_finished
from router.openai.params import Params
from router.openai.stop_strings import StopStrings
from router.openai.text import Detokenizer, Text
from wire.messages import Finished, Logprob, Tokens, Usage


class TokenEntry(Struct):
    """A token with its log probability (None: the first of a prompt) and where its text starts, in characters of the choice."""

    token: int
    logprob: Logprob | None
    offset: int


class Piece(Struct):
    """What a message added to the choice. `entries` only where logprobs are asked for."""

    text: str = ""
    tokens: list[int] = []
    entries: list[TokenEntry] = []

    def add(self, other: "Piece") -> None:
        """Append what came later."""
        self.text += other.text
        self.tokens += other.tokens
        self.entries += other.entries


class Choice:
    """Follows one stream from its first token to its end.

    The text of a stop token is never shown (unless `include_stop`), nor is anything after a stop string: after `matched`
    the caller cancels the stream and waits for its Finished, which says what it has cost.
    """

    def __init__(
        self, index: int, prompt_ids: list[int], prompt_text: str | None, params: Params, text: Text, end_ids: frozenset[int]
    ) -> None:
        self.index = index
        self.prompt_ids = prompt_ids
        self.finish_reason = ""
        self.usage = Usage()
        self.opened = False  # whether the first chunk has been sent
        self._text = text
        self._params = params
        self._end_ids = end_ids
        self._detokenizer = Detokenizer(text, params.skip_special, params.continues)
        self._stops = StopStrings(params.stop, params.include_stop)
        self._count = 0
        self._offset = 0  # characters of the choice's text so far, held-back ones included
        self._echo: list[TokenEntry] | None = None
        self._prompt_text = ""
        if params.echo:
            self._prompt_text = text.decode(prompt_ids, params.skip_special) if prompt_text is None else prompt_text
            if params.logprobs is not None:
                self._echo = self._prompt_entries()
            else:
                self._offset = len(self._prompt_text)

    @property
    def matched(self) -> bool:
        """Whether a stop string has ended the choice."""
        return self._stops.matched is not None

    def opening(self) -> Piece:
        """The echoed prompt, if it can be shown before the first message; empty otherwise."""
        if not self._params.echo or (self._echo is not None and len(self.prompt_ids) > 1):
            return Piece()
        return self._echo_piece()

    def take(self, message: Tokens) -> Piece:
        """What `message` adds. Nothing after a stop string."""
        piece = Piece()
        if self._echo is not None:
            for i, logprob in enumerate(message.prompt_logprobs, message.prompt_offset):
                if 0 < i < len(self._echo):
                    self._echo[i].logprob = logprob
            if message.tokens or message.prompt_offset + len(message.prompt_logprobs) >= len(self._echo):
                piece = self._echo_piece()
        if self._params.discard:
            return piece
        for i, token in enumerate(message.tokens):
            if self.matched:
                break
            self._take_token(piece, token, message.logprobs[i] if i < len(message.logprobs) else None)
        return piece

    def finish(self, finished: Finished) -> Piece:
        """The text still held back, and the end: sets `finish_reason` and `usage`. ApiError if the stream failed."""
        if self.matched:
            self.finish_reason, completion_tokens = "stop", self._count
        elif finished.reason in ("stop", "length"):
            self.finish_reason, completion_tokens = finished.reason, finished.usage.completion_tokens
        else:
            raise from_finished(finished)
        piece = self._echo_piece() if self._echo is not None else Piece()
        if not self.matched:
            piece.text += self._stops.push(self._detokenizer.finish()) + self._stops.finish()
            if self.matched:
                self.finish_reason = "stop"
        if self._params.discard:
            self.finish_reason, completion_tokens = "length", 0
        given = finished.usage
        self.usage = Usage(
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=completion_tokens,
            cached_tokens=given.cached_tokens,
            parks=given.parks,
            parked_ms=given.parked_ms,
            recomputed_tokens=given.recomputed_tokens,
            exact=given.exact,
        )
        return piece

    def _take_token(self, piece: Piece, token: int, logprob: Logprob | None) -> None:
        self._count += 1
        piece.tokens.append(token)
        if logprob is not None and self._params.logprobs is not None:
            piece.entries.append(TokenEntry(token, logprob, self._offset))
        if token in self._end_ids and self._count > self._params.min_tokens and not self._params.include_stop:
            return
        shown = self._detokenizer.push([token])
        self._offset += len(shown)
        piece.text += shown if self._count <= self._params.min_tokens else self._stops.push(shown)

    def _echo_piece(self) -> Piece:
        piece = Piece(self._prompt_text, [], self._echo or [])
        self._echo, self._prompt_text = None, ""
        return piece

    def _prompt_entries(self) -> list[TokenEntry]:
        detokenizer = Detokenizer(self._text, self._params.skip_special)
        entries = []
        for token in self.prompt_ids:
            entries.append(TokenEntry(token, None, self._offset))
            self._offset += len(detokenizer.push([token]))
        self._offset += len(detokenizer.finish())
        return entries
