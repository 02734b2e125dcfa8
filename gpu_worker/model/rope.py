"""Rotary position embedding: the angles of each position, for the kinds default, linear, llama3 and yarn."""

import math

import torch
from torch import Tensor

from wire.model_spec import RopeSpec

PART = 4096  # positions


def frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position (float32 [head_dim / 2]) and the factor on cosine and sine, as transformers computes them."""
    inverse = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    scale = 1.0
    match rope.kind:
        case "default":
            pass
        case "linear":
            inverse = inverse / rope.factor
        case "llama3":
            inverse = _llama3(rope, inverse)
        case "yarn":
            inverse, scale = _yarn(rope, inverse, head_dim)
        case unknown:
            raise ValueError(f"unknown rope kind {unknown!r}")
    if rope.factors:
        inverse = inverse / torch.tensor(rope.factors, dtype=torch.float32)
    return inverse, scale


class RopeTable:
    """Cosine and sine of each position, float32 [positions, head_dim / 2], made as far as sequences have come.

    It grows by parts of fixed positions, so that a position's numbers are the same whenever its part is made.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, max_context: int) -> None:
        self._inverse, self._scale = frequencies(rope, head_dim)
        self._max_context = max_context
        self.cos = self.sin = torch.empty(0, head_dim // 2)
        self.reach(0)

    def reach(self, position: int) -> None:
        """Make the table up to `position`; IndexError if the model has no such position."""
        if not 0 <= position < self._max_context:
            raise IndexError(f"position {position} of {self._max_context}")
        while len(self.cos) <= position:
            first = len(self.cos)
            at = torch.arange(first, min(first + PART, self._max_context), dtype=torch.float32)
            angles = torch.outer(at, self._inverse)
            self.cos = torch.cat([self.cos, angles.cos() * self._scale])
            self.sin = torch.cat([self.sin, angles.sin() * self._scale])

    @property
    def nbytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes


def _llama3(rope: RopeSpec, inverse: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    wavelength = 2 * math.pi / inverse
    low_wavelength = rope.original_context / rope.low_freq_factor
    high_wavelength = rope.original_context / rope.high_freq_factor
    stretched = torch.where(wavelength > low_wavelength, inverse / rope.factor, inverse)
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeSpec, inverse: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """NTK by parts (arXiv 2309.00071): a linear ramp between interpolated and original frequencies."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    blended = inverse / rope.factor * (1 - keep) + inverse * keep
    scale = rope.attention_factor
    if scale is None:
        scale = 1.0 if rope.factor <= 1 else 0.1 * math.log(rope.factor) + 1.0
    return blended, scale
