"""Draws the next tokens from logits: penalties, filters, then Gumbel-max with noise from a hash of (seed, position, token).

A row's result depends on its own logits, tokens and settings only, never on its company in the batch. No sorted order of
the vocabulary and no cumulative sum decides a draw, so a last-bit change of a logit moves a token as rarely as in greedy.
"""

from math import exp, isfinite, log
from typing import Protocol

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from wire.messages import Logprob, Sampling

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FAR = 8.0  # in logits over the temperature
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


class SampleRow(Struct, frozen=True):
    """What a row's draw depends on beside its logits."""

    sampling: Sampling  # with its seed
    position: int  # index of the drawn token in the sequence
    tokens: list[int]  # prompt and output (what lies at `position` and behind is ignored)
    prompt_len: int
    banned: tuple[int, ...] = ()  # ids that may not be drawn
    drafts: list[int] = []  # drafts that stand between the tokens and `position`

    def before(self, first: int = 0) -> list[int]:
        """All tokens from index `first` up to `position`, drafts included."""
        return self.tokens[first : self.position - len(self.drafts)] + self.drafts


class Sampled(Struct, frozen=True):
    """The drawn token; or `error`, one line for the user, and no token."""

    token: int
    logprob: Logprob | None = None
    error: str = ""


class Candidates:
    """The only ids that may be drawn, where logits have a column for each of them and for no other."""

    __slots__ = ("columns", "ids")

    def __init__(self, ids: np.ndarray, vocab: int) -> None:
        """`ids`: token of each column, all different and below `vocab`."""
        self.ids = ids.astype(np.uint64)
        self.columns = np.full(vocab, -1, dtype=np.int64)  # of each token; -1: it has none
        self.columns[ids] = np.arange(len(ids))


_NOT_FINITE, _NONE_LEFT = -1, -2  # instead of a column
_FAILED = {
    _NOT_FINITE: Sampled(-1, error="the model's logits are not finite"),
    _NONE_LEFT: Sampled(-1, error="every token is banned"),
}


def draw(raw: np.ndarray, row: SampleRow) -> Sampled:
    """One draw from float32 logits [vocab]. Temperature 0 is greedy; ties go to the lower id."""
    best = _choose(raw, row, None)
    if best < 0:
        return _FAILED[best]
    if row.sampling.logprobs is None:
        return Sampled(best)
    return Sampled(best, _logprob(raw, best, row.sampling.logprobs))


def failure(column: int) -> str:
    """The line for the user of a draw that found no token: -1 the logits are not finite, -2 every token is banned."""
    return _FAILED[column].error


def draft(raw: np.ndarray, row: SampleRow, candidates: Candidates | None) -> int:
    """The token that `draw` would take from float32 logits [vocab], or [candidates]; -1 if there is none.

    With the noise and the settings of the draw that will judge it, a draft agrees as often as the two distributions allow.
    """
    best = _choose(raw, row, candidates)
    if best < 0:
        return -1
    return best if candidates is None else int(candidates.ids[best])


class Drawing(Protocol):
    """What decides how a row's tokens are drawn."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def banned(self) -> tuple[int, ...]: ...


def takes_best(row: Drawing) -> bool:
    """Whether every draw of this row is the greatest logit, as the model gives it."""
    return row.sampling.temperature == 0 and not _changes(row)


def _changes(row: Drawing) -> bool:
    """Whether penalties, bias or bans change its logits."""
    s = row.sampling
    penalised = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
    return bool(penalised or s.logit_bias or row.banned)


def token_logprobs(logits: Tensor, targets: list[int], top: int) -> list[Logprob]:
    """Log probability of target i under row i of float32 logits [n, vocab], with the `top` most likely ids beside it."""
    return [_logprob(row, target, top) for row, target in zip(logits.numpy(), targets, strict=True)]


def gumbel(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise, float64, for token ids (uint64): a pure function of (seed, position, id)."""
    return _noise(_hash(seed, position, ids))


def _hash(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """uint64 below 2**52: the noise grows with it."""
    hashed = ids * np.uint64(_GOLDEN)
    hashed += np.uint64(stream_key(seed, position))
    shifted = np.empty_like(hashed)
    for shift, factor in _MIX:
        np.right_shift(hashed, np.uint64(shift), out=shifted)
        hashed ^= shifted
        hashed *= np.uint64(factor)
    np.right_shift(hashed, np.uint64(31), out=shifted)
    hashed ^= shifted
    hashed >>= np.uint64(12)
    return hashed


def _noise(hashed: np.ndarray) -> np.ndarray:
    noise = hashed.astype(np.float64)  # 52 bits, so that adding a half is exact and 0 < u < 1
    noise += 0.5
    noise *= 2.0**-52
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def stream_key(seed: int, position: int) -> int:
    """Where the counter hash of one draw starts: 64 bits."""
    return _mix64(seed_key(seed) + position * _GOLDEN & _MASK)


def seed_key(seed: int) -> int:
    """What of `stream_key` the seed alone decides: 64 bits."""
    return _mix64(seed & _MASK)


def _mix64(x: int) -> int:
    """The finaliser of SplitMix64."""
    for shift, factor in _MIX:
        x = (x ^ (x >> shift)) * factor & _MASK
    return x ^ (x >> 31)


# one row --------------------------------------------------------------------------------------------------------------
def _choose(raw: np.ndarray, row: SampleRow, candidates: Candidates | None) -> int:
    """The drawn column, or one of _FAILED."""
    best = int(raw.argmax())
    if not isfinite(raw[best]):  # argmax finds a NaN or +inf first; -inf only if there is nothing else
        return _NOT_FINITE
    changed = _changed(raw, row, candidates)
    if changed is not None:
        best = int(changed.argmax())
        if not isfinite(changed[best]):
            return _NONE_LEFT
    if row.sampling.temperature > 0:
        ids = _all_ids(len(raw)) if candidates is None else candidates.ids
        best = _gumbel_max(raw if changed is None else changed, best, row, ids)
    return best


def _changed(raw: np.ndarray, row: SampleRow, candidates: Candidates | None) -> np.ndarray | None:
    """The logits after penalties, bias and bans, in this order; None if nothing changes them."""
    if not _changes(row):
        return None
    s = row.sampling
    logits = raw.copy()
    if s.repetition_penalty != 1:
        seen = _unique(row.before(), len(raw), candidates)[0]
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / np.float32(s.repetition_penalty), values * np.float32(s.repetition_penalty))
    if s.presence_penalty or s.frequency_penalty:
        seen, counts = _unique(row.before(row.prompt_len), len(raw), candidates)
        logits[seen] -= np.float32(s.presence_penalty) + np.float32(s.frequency_penalty) * counts.astype(np.float32)
    for token, bias in s.logit_bias.items():
        if (column := _column(token, len(logits), candidates)) >= 0:
            logits[column] += np.float32(bias)
    for token in row.banned:
        if (column := _column(token, len(logits), candidates)) >= 0:
            logits[column] = -np.inf
    return logits


def _column(token: int, width: int, candidates: Candidates | None) -> int:
    """Where a token's logit stands; -1: nowhere."""
    if candidates is None:
        return token if token < width else -1
    return int(candidates.columns[token]) if token < len(candidates.columns) else -1


def _unique(tokens: list[int], width: int, candidates: Candidates | None) -> tuple[np.ndarray, np.ndarray]:
    """The columns of all tokens that have one, and how often each occurs."""
    columns, counts = np.unique(np.array(tokens, dtype=np.int64), return_counts=True)
    known = columns < (width if candidates is None else len(candidates.columns))
    columns, counts = columns[known], counts[known]
    if candidates is not None:
        columns = candidates.columns[columns]
        columns, counts = columns[columns >= 0], counts[columns >= 0]
    return columns, counts


def _gumbel_max(logits: np.ndarray, best: int, row: SampleRow, ids: np.ndarray) -> int:
    """argmax over the columns that the filters leave of logit / T + Gumbel noise of the column's id."""
    s = row.sampling
    scaled = (logits - logits[best]) / np.float32(s.temperature)  # at most 0, so a tiny T overflows to -inf only
    kept = _filtered(scaled, s)
    hashed = _hash(s.seed or 0, row.position, ids if kept is None else ids[kept])
    if kept is None:
        kept = _contenders(scaled, best, hashed)
        hashed = hashed[kept]
    return int(kept[(_noise(hashed) + scaled[kept]).argmax()])


def _contenders(scaled: np.ndarray, best: int, hashed: np.ndarray) -> np.ndarray:
    """Ascending columns that can win, so that few logarithms are needed: one _FAR below the best must beat its noise by that."""
    needed = float(_noise(hashed[best : best + 1])[0]) + _FAR - 1e-6  # more than the logarithms' rounding
    least = int(exp(-exp(-needed)) * 2.0**52) - 1
    return np.flatnonzero((scaled > -_FAR) | (hashed >= np.uint64(max(0, least))))


def _filtered(scaled: np.ndarray, s: Sampling) -> np.ndarray | None:
    """Ascending ids that min-p, then top-k, then top-p leave; None if no filter is on. Ties are kept by lower id."""
    kept = None
    if s.min_p > 0:
        kept = np.flatnonzero(scaled >= np.float32(log(s.min_p)))
    if 0 < s.top_k < len(scaled):
        kept = _top_k(scaled, kept, s.top_k)
    if s.top_p < 1:
        kept = _top_p(scaled, kept, s.top_p)
    return kept


def _top_k(scaled: np.ndarray, kept: np.ndarray | None, k: int) -> np.ndarray:
    values = scaled if kept is None else scaled[kept]
    ids = np.arange(len(scaled)) if kept is None else kept
    return ids if k >= len(values) else ids[np.sort(_largest(values, k))]


def _top_p(scaled: np.ndarray, kept: np.ndarray | None, top_p: float) -> np.ndarray:
    """The shortest prefix, most likely first, whose mass reaches top_p of what is left; the first id always stays."""
    values = scaled if kept is None else scaled[kept]
    weights = np.exp(values)
    total = float(weights.sum(dtype=np.float64))
    # All ids below this weight together have less mass than may be dropped, so none of them belongs to the prefix.
    candidates = np.flatnonzero(weights >= (1 - top_p) * total / len(weights) * 0.999)
    order = candidates[np.argsort(-values[candidates], kind="stable")]
    mass = np.cumsum(weights[order], dtype=np.float64)
    count = 1 + int(np.searchsorted(mass, top_p * total))
    chosen = np.sort(order[:count])
    return chosen if kept is None else kept[chosen]


def _largest(values: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest values, largest first; ties by lower index."""
    least = torch.from_numpy(values).topk(k).values[-1].item()
    found = np.flatnonzero(values >= least)
    return found[np.argsort(-values[found], kind="stable")[:k]]


def _logprob(raw: np.ndarray, token: int, top: int) -> Logprob:
    """Under softmax(raw): natural logarithms, float64 inside."""
    highest = raw.max()
    norm = float(highest) + log(float(np.exp(raw - highest).sum(dtype=np.float64)))
    best = _largest(raw, min(top, len(raw))).tolist() if top else []
    return Logprob(token, float(raw[token]) - norm, [(i, float(raw[i]) - norm) for i in best])


_ids: dict[int, np.ndarray] = {}


def _all_ids(vocab: int) -> np.ndarray:
    if vocab not in _ids:
        _ids[vocab] = np.arange(vocab, dtype=np.uint64)
    return _ids[vocab]
