"""What this adapter serves: the model, its text, the way to the router, keys, limits, and how many answers are under way."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from router.client import Client
from router.openai.errors import ApiError, context_too_small, router_lost, shutting_down
from router.openai.keys import Keys
from router.openai.text import Text
from wire.config import Config
from wire.messages import Status
from wire.model_files import ModelFiles

STATUS_TIMEOUT_S = 1.5  # an error has to be out within 2 s
INLINE_BYTES = 8192  # tokenised on the event loop; more goes to a thread, so that no stream waits for it
T = TypeVar("T")
log = logging.getLogger("parkade")


class Serving:
    """One model behind one router. Made once, shared by all requests."""

    def __init__(self, client: Client, files: ModelFiles, text: Text, config: Config, keys: Keys) -> None:
        self.client = client
        self.keys = keys
        self.text = text
        self.name = files.name
        self.created_s = int(Path(files.path).stat().st_mtime)
        self.fingerprint = _fingerprint(files, config)
        self.max_context = min(config.ctx, files.spec.max_context)  # an upper bound; the router knows what really fits
        self.vocab_size = text.vocab_size
        self.end_ids = frozenset(files.eos_token_ids)
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.cut = asyncio.Event()  # set when a drain has no more time: answers under way end with an error
        self._longest_token_bytes = max(len(text.token_bytes(i)) for i in range(text.vocab_size))
        self.active = 0
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenise")

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Counts one answer under way; `idle` is set while there is none. ApiError 503 once draining."""
        if self.draining:
            raise shutting_down()
        self.active += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()

    def check_model(self, model: str | None) -> None:
        """ApiError 404 unless `model` is the one served; None means it."""
        if model is not None and model != self.name:
            told = model if len(model) <= 100 else model[:100] + "..."
            message = f"The model {told!r} does not exist; this server has {self.name!r}."
            raise ApiError(404, message, code="model_not_found", param="model")

    async def tokens(self, nbytes: int, tokenise: Callable[[], list[int]], param: str) -> list[int]:
        """`tokenise()`, beside the event loop if `nbytes` of text is much.

        ApiError 400 with the numbers if the text cannot fit: by its bytes without tokenising, else by its tokens.
        """
        if nbytes > self.max_context * self._longest_token_bytes:
            least = -(-nbytes // self._longest_token_bytes)
            raise context_too_small(f"{nbytes} bytes, which are at least {least} tokens", self.max_context, param)
        ids = await self.beside(nbytes, tokenise)
        self.check_fits(len(ids), param)
        return ids

    async def beside(self, nbytes: int, work: Callable[[], T]) -> T:
        """`work()`, in a thread if `nbytes` is more than a moment's work."""
        if nbytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def check_fits(self, num_tokens: int, param: str) -> None:
        """ApiError 400 unless a prompt of `num_tokens` leaves room for one more token."""
        if num_tokens + 1 > self.max_context:
            raise context_too_small(f"{num_tokens} tokens", self.max_context, param)

    async def status(self) -> Status:
        """The router's word, never older than this call. ApiError 503 if it does not answer in time."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await self.client.status()
        except (TimeoutError, OSError):
            raise router_lost() from None


def _fingerprint(files: ModelFiles, config: Config) -> str:
    told = msgspec.json.encode([files.name, files.spec, config.dtype, config.exact])
    return "fp_" + hashlib.blake2b(told, digest_size=5).hexdigest()
