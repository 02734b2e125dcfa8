"""`--model toy`: a model whose text proves what it was computed from. For tests of everything but arithmetic.

A cell holds a hash of its token and of all tokens before it. The next token is a function of every cell that a row reads, so
one that is stale, torn, missing or somebody else's changes the text; and the text is known without a server: see `Oracle`.
A cell's bytes are its hash again and again, each time changed by its place. A row reads one word of each cell, another one at
each position.
"""

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model.batch import Batch
from gpu_worker.model.sampler import SampleRow, draw
from wire.messages import Sampling
from wire.model_spec import ModelSpec

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_PLAIN = 0xBFFFFFFFBFFFFFFF  # bits that a hash may have: read as two floats it is finite, so comparing them compares bits
_WINDOWS = 1 << 16  # different rows of logits


def mix(x: int) -> int:
    """The finaliser of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def chained(before: int, tokens: list[int]) -> list[int]:
    """The hashes of tokens that follow the cell `before` (0: the first)."""
    found = []
    for token in tokens:
        before = mix(before * 3 + (token + 1) * _GOLDEN & _MASK) & _PLAIN
        found.append(before)
    return found


def _levels(vocab: int) -> np.ndarray:
    """float32 [_WINDOWS + vocab]: numbers from 0 to 12; a row of logits is a window of them."""
    levels = [mix(i * _GOLDEN & _MASK) >> 40 for i in range(_WINDOWS + vocab)]
    return (np.array(levels, dtype=np.float32) * np.float32(12 / 2**24)).astype(np.float32)


class ToyModel:
    """Looks like the other models to whoever runs and proves them."""

    backend = "toy"
    exact = True
    dtype_name = "f32"
    kv_dtype = torch.float32
    draft_ids = None
    draft_greedy = None

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._levels = _levels(spec.vocab)
        self._odd = np.arange(1, 2 * 1024, 2, dtype=np.uint64)
        words = spec.kv_layers * 2 * spec.num_kv_heads * spec.head_dim // 2
        self._places = np.array([mix(word + 1) & _PLAIN for word in range(words)], dtype=np.uint64)
        self.weight_bytes = self._levels.nbytes

    def close(self) -> None:
        """Nothing to give back."""

    def distinct_layers(self) -> list[int]:
        """Its layers differ in nothing."""
        return [0]

    def forward(self, batch: Batch, kv: KvCache, layers: list[int] | None = None) -> Tensor:
        """float32 [n_out, hidden]: what the rows have read, 16 bits in each number. Writes the cells of all rows."""
        words = self._words(kv)
        tables, positions = batch.block_tables.numpy(), batch.positions.numpy()
        seq_of = batch.seq_of.numpy()
        ids, hashes = batch.token_ids.tolist(), []
        starts = np.flatnonzero(np.diff(seq_of, prepend=-1)).tolist()
        for start, end in zip(starts, [*starts[1:], len(ids)]):
            position = int(positions[start])
            before = 0
            if position:
                before = int(self._read(words, tables[seq_of[start]], position - 1, position, position)[0])
            hashes += chained(before, ids[start:end])
        blocks = tables[seq_of, positions // kv.block_size]
        places = self._places.reshape(words.shape[1], words.shape[3])
        words[blocks, :, positions % kv.block_size, :] = np.array(hashes, dtype=np.uint64)[:, None, None] ^ places
        out = batch.out_rows.tolist()
        found = np.array([self._gather(words, tables[seq_of[row]], int(positions[row])) for row in out], dtype=np.uint64)
        parts = found[:, None] >> np.array([0, 16, 32, 48], dtype=np.uint64) & np.uint64(0xFFFF)
        return torch.from_numpy(parts.astype(np.float32).reshape(len(out), self.spec.hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n_out, vocab] of `forward`'s rows."""
        windows = hidden[:, 0].int().tolist()  # the best of them is another one in each window
        return torch.from_numpy(np.stack([self.row(window) for window in windows]))

    def row(self, gathered: int) -> np.ndarray:
        """float32 [vocab]: the logits of what a row has read."""
        start = gathered % _WINDOWS
        return self._levels[start : start + self.spec.vocab]

    def odd(self, count: int) -> np.ndarray:
        """uint64 [count]: 1, 3, 5, ..., what cells are multiplied with, so that their order counts."""
        if count > len(self._odd):
            self._odd = np.arange(1, 4 * count, 2, dtype=np.uint64)
        return self._odd[:count]

    def _words(self, kv: KvCache) -> np.ndarray:
        """uint64 [blocks, planes, cells, words]: the pool; a plane is the keys or values of one head in one layer."""
        return kv.memory.numpy().view(np.uint64).reshape(kv.num_blocks + 1, -1, kv.block_size, self.spec.head_dim // 2)

    def _read(self, words: np.ndarray, table: np.ndarray, first: int, end: int, position: int) -> np.ndarray:
        """uint64: the hashes in cells first .. end, as the row at `position` reads them."""
        size = words.shape[2]
        place = position % len(self._places)
        plane, word = divmod(place, words.shape[3])
        blocks = table[first // size : -(-end // size)]
        skip = first % size
        return words[blocks, plane, :, word].reshape(-1)[skip : skip + end - first] ^ self._places[place]

    def _gather(self, words: np.ndarray, table: np.ndarray, position: int) -> int:
        """One number of all cells up to `position`."""
        return mix(int((self._read(words, table, 0, position + 1, position) * self.odd(position + 1)).sum(dtype=np.uint64)))


class Oracle:
    """What the model says, from the tokens alone. One for each sequence: it keeps the sum over the cells so far."""

    def __init__(self, model: ToyModel, prompt: list[int]) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.prompt_len = len(prompt)
        self._last = self._sum = 0
        for token in prompt:
            self.add(token)

    def add(self, token: int) -> None:
        """The next token of the sequence."""
        self._last = chained(self._last, [token])[0]
        self._sum = self._sum + self._last * (2 * len(self.tokens) + 1) & _MASK
        self.tokens.append(token)

    def next(self, sampling: Sampling) -> int:
        """The token that follows, drawn as the worker draws."""
        row = SampleRow(sampling, len(self.tokens), self.tokens, self.prompt_len)
        return draw(self.model.row(mix(self._sum)), row).token

    def text(self, count: int, sampling: Sampling) -> list[int]:
        """The next `count` tokens, where no end token ends it."""
        for _ in range(count):
            self.add(self.next(sampling))
        return self.tokens[-count:] if count else []
