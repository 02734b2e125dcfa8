"""What the draws of a step depend on beside the logits, as `struct DrawParams` of cuda/sample.cu has it: one record a sequence.

What a request's settings decide is packed once (`DrawRecord`). What its tokens decide, the lists behind penalties and bans, is
written anew with each step (`DrawTable`), for those sequences only that have such settings. A record holds the addresses of
its lists and of the scratch rows for its changed logits, so both memories may be replaced between steps, graphs or not.

struct DrawParams, 88 bytes, native alignment:

    u64 key              mix64 of the seed: the draw at a position starts its hash at mix64(key + position * golden)
    double top_p         1: off
    const int* seen      [seen_count][2]    token, times in the output (0: only in the prompt); each token once
    const int* bias      [bias_count][2]    token, bits of a float32
    const int* banned    [banned_count]
    float* changed       scratch rows for the logits of its draws in this step; null: they are taken as they are
    int seen_count, bias_count, banned_count
    float temperature    0: greedy
    float least          logits / temperature may be that far below the best (min-p); -infinity: off
    int top_k            0: off
    float repetition, presence, frequency
"""

import struct
from collections.abc import Callable
from math import inf, log

import numpy as np

from gpu_worker.model import sampler
from wire.messages import Sampling

_FORMAT = struct.Struct("@Qd4P3i2fi3f4x")
_LISTS = struct.Struct("@4P3i")
_LISTS_AT = 16  # where `seen` lies
DRAW_BYTES = _FORMAT.size

MakeRoom = Callable[[int], tuple[np.ndarray, int]]  # ints wanted -> page-locked int32 array, address of its twin on the card


def pack(sampling: Sampling) -> bytes:
    """DrawParams of a request, without lists."""
    s = sampling
    return _FORMAT.pack(
        sampler.seed_key(s.seed or 0),
        s.top_p,
        *(0, 0, 0, 0),
        *(0, 0, 0),
        s.temperature,
        log(s.min_p) if s.min_p > 0 else -inf,
        s.top_k,
        s.repetition_penalty,
        s.presence_penalty,
        s.frequency_penalty,
    )


class DrawRecord:
    """One request's record, and the tokens that its penalties count, kept up to date as the request goes on."""

    def __init__(self, sampling: Sampling, prompt_len: int) -> None:
        s = sampling
        self.packed = pack(s)
        self.bias = np.zeros((len(s.logit_bias), 2), np.int32)
        self.bias[:, 0] = list(s.logit_bias)
        self.bias[:, 1] = np.array(list(s.logit_bias.values()), np.float32).view(np.int32)
        self._prompt_len = prompt_len
        self._counts = bool(s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty)
        # tokens before this index are in `_seen`, or do not matter
        self._counted = 0 if s.repetition_penalty != 1 else prompt_len
        self._place: dict[int, int] = {}  # of each token in `_seen`
        self._seen = np.zeros((64, 2), np.int32)

    def changes(self, banned: tuple[int, ...]) -> bool:
        """Whether the request's draws need lists and scratch rows."""
        return self._counts or bool(len(self.bias) or banned)

    def seen(self, tokens: list[int], end: int) -> np.ndarray:
        """int32 [n, 2]: what DrawParams.seen says of tokens[:end]. `end` never falls; a view, until the next call."""
        if not self._counts:
            return self._seen[:0]
        for index in range(self._counted, end):
            place = self._place.setdefault(tokens[index], len(self._place))
            if place == len(self._seen):
                self._seen = np.concatenate([self._seen, np.zeros_like(self._seen)])
            self._seen[place, 0] = tokens[index]
            self._seen[place, 1] += index >= self._prompt_len
        self._counted = max(self._counted, end)
        return self._seen[: len(self._place)]


class DrawTable:
    """The records and lists of a step in page-locked memory: `clear`, `put` each sequence, `place`, upload both."""

    def __init__(self, records: np.ndarray, make_room: MakeRoom) -> None:
        """`records`: uint8 [sequences, DRAW_BYTES]. `make_room` is called when nothing that uses the old lists is under way."""
        self.records = records
        self._bytes = memoryview(records.reshape(-1))
        self._make_room = make_room
        self._host, self._address = np.zeros(0, np.int32), 0
        self._waiting: list[tuple[int, int, tuple[np.ndarray, ...]]] = []

    def clear(self) -> None:
        """Forget the lists of the step before. Records need no clearing: nobody reads those of sequences that draw nothing."""
        self._waiting.clear()

    def put(self, index: int, record: DrawRecord, tokens: list[int], end: int, banned: tuple[int, ...], scratch: int) -> None:
        """The sequence at `index` draws behind tokens[:end] and, it may be, drafts. `scratch`: address of a row of logits for
        each of its draws; used if record.changes(banned)."""
        at = index * DRAW_BYTES
        self._bytes[at : at + DRAW_BYTES] = record.packed
        if record.changes(banned):
            lists = (record.seen(tokens, end).reshape(-1), record.bias.reshape(-1), np.array(banned, np.int32))
            self._waiting.append((index, scratch, lists))

    def place(self) -> tuple[np.ndarray, int]:
        """Writes all lists one behind another: (what of them is to be uploaded, to which address)."""
        wanted = sum(len(part) for _, _, lists in self._waiting for part in lists)
        if wanted > len(self._host):
            self._host, self._address = self._make_room(max(wanted, 2 * len(self._host)))
        used = 0
        for index, scratch, lists in self._waiting:
            addresses = []
            for part in lists:
                self._host[used : used + len(part)] = part
                addresses.append(self._address + used * 4)
                used += len(part)
            counts = len(lists[0]) // 2, len(lists[1]) // 2, len(lists[2])
            _LISTS.pack_into(self._bytes, index * DRAW_BYTES + _LISTS_AT, *addresses, scratch, *counts)
        return self._host[:used], self._address
