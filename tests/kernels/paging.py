"""Sequences whose blocks lie anywhere in a poisoned pool: the arrays that kernels read to find a row's cells."""

from dataclasses import dataclass

import torch

from gpu_worker.device.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class Shape:
    """The part of a model's spec that shapes its cells, see kv_cache.KvShape."""

    kv_layers: int = 2
    num_kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 64
    delta: None = None
    mtp: bool = False


def poisoned_memory(size: int) -> torch.Tensor:
    """All NaN: what a kernel reads of cells that nobody wrote shows in its result."""
    return torch.full((size,), 0xFF, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Paged:
    """Rows of a step. Sequence i has positions starts[i] ... starts[i] + counts[i] - 1, and `padding` rows follow the last."""

    kv: KvCache
    positions: torch.Tensor  # int32 [R]
    seq_of: torch.Tensor  # int32 [R]
    row_begin: torch.Tensor  # int32 [S]
    row_count: torch.Tensor  # int32 [S]
    seats: torch.Tensor  # int32 [S]
    tables: torch.Tensor  # int32 [seats, stride]

    @staticmethod
    def of(shape: Shape, starts: list[int], counts: list[int], seed: int, padding: int = 0) -> "Paged":
        """Blocks and seats in random places; a sequence's last block is in the pool's end at times."""
        random = torch.Generator().manual_seed(seed)
        blocks = [-(-(start + count) // 16) for start, count in zip(starts, counts)]
        stride, seats = max(blocks) + 1, len(starts) + 2
        kv = KvCache(shape, sum(blocks) + 3, 16, torch.bfloat16, allocate=poisoned_memory)
        free = torch.randperm(kv.num_blocks, generator=random).tolist()
        seat_of = torch.randperm(seats, generator=random)[: len(starts)]
        tables = torch.full((seats, stride), 2**30, dtype=torch.int32)  # no kernel may follow these
        for seat, count in zip(seat_of.tolist(), blocks):
            tables[seat, :count] = torch.tensor([free.pop() for _ in range(count)])
        positions = [start + i for start, count in zip(starts, counts) for i in range(count)]
        return Paged(
            kv,
            torch.tensor(positions + [-1] * padding, dtype=torch.int32),
            torch.tensor([i for i, count in enumerate(counts) for _ in range(count)] + [0] * padding, dtype=torch.int32),
            torch.tensor([sum(counts[:i]) for i in range(len(counts))], dtype=torch.int32),
            torch.tensor(counts, dtype=torch.int32),
            seat_of.to(torch.int32),
            tables,
        )

    def block(self, sequence: int, position: int) -> int:
        """The block in which a sequence's cell lies."""
        return int(self.tables[self.seats[sequence], position // 16])
