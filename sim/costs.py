"""Cost model: how long a step and a copy take, fitted from a real run, so that virtual time means something.

A step that feeds `rows` tokens, of which `decodes` are decodes, takes

    table(rows) + sequence_s * decodes + decode_cell_s * decode_cells + prefill_cell_s * prefill_cells

The table holds what matrix products, the plan and the loop take: linear between its entries, with the last slope beyond. Cells
are those that attention reads: a decode at position p reads p + 1, a chunk of n tokens from position p on reads p + 1, p + 2, ...
p + n. Drafts are not part of the model. `parkade bench --fit` makes one; `cpu` and `card` are shipped in `costs/`.
"""

from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from gpu_worker.policy.events import Row
from gpu_worker.policy.recording import RowSummary

PAGE_BYTES = 4096
LEAST_STEP_S = 1e-6  # or virtual time would stand still
SHIPPED = Path(__file__).parent / "costs"


class CostsError(ValueError):
    """A file of costs that the user must change; the text is one line that names it."""


class CostModel(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds and bytes. `rows_s`: (fed tokens, seconds), ascending. A copy rate of 0 means that copies take no time.

    `copy_overlaps`: copies run beside the steps (a card); else they take the loop's own time (the CPU). `where` says on which
    model and machine it was fitted, `note` what else a reader must know, `error` how far from the run it is.
    """

    name: str
    where: str
    rows_s: tuple[tuple[int, float], ...]
    cell_bytes: int
    sequence_s: float = 0.0
    decode_cell_s: float = 0.0
    prefill_cell_s: float = 0.0
    save_bytes_per_s: float = 0.0
    load_bytes_per_s: float = 0.0
    state_bytes: int = 0
    block_size: int = 16
    copy_overlaps: bool = False
    note: str = ""
    error: str = ""

    def __post_init__(self) -> None:
        rows = [count for count, _ in self.rows_s]
        if not rows or rows != sorted(set(rows)) or rows[0] < 1:
            raise ValueError("rows_s must be (rows, seconds) with at least one entry, its rows ascending from 1 on")
        numbers = [self.sequence_s, self.decode_cell_s, self.prefill_cell_s, self.save_bytes_per_s, self.load_bytes_per_s]
        if min(*numbers, *(seconds for _, seconds in self.rows_s)) < 0:
            raise ValueError("seconds and bytes a second must not be negative")
        if min(self.step_s(1, 0, 1, 0), self.step_s(0, 1, 0, 1)) < LEAST_STEP_S:
            raise ValueError(f"a step of one token must take at least {LEAST_STEP_S:g} s")
        if self.cell_bytes < 1 or self.block_size < 1 or self.state_bytes < 0:
            raise ValueError("cell_bytes and block_size must be at least 1, state_bytes not negative")

    # time -----------------------------------------------------------------------------------------------------------------
    def step_s(self, decodes: int, prefill_tokens: int, decode_cells: int, prefill_cells: int) -> float:
        """Seconds of one step. The cells are sums over all its decodes, and over all its other tokens."""
        return (
            self.table_s(decodes + prefill_tokens)
            + self.sequence_s * decodes
            + self.decode_cell_s * decode_cells
            + self.prefill_cell_s * prefill_cells
        )

    def steps_s(self, steps: int, decodes: int, decode_cells: int) -> float:
        """Seconds of `steps` steps in a row of the same decodes and nothing else; `decode_cells` in the first of them."""
        grown = decodes * (steps * (steps - 1) // 2)
        return steps * self.step_s(decodes, 0, decode_cells, 0) + self.decode_cell_s * grown

    def table_s(self, rows: int) -> float:
        """Seconds of a step that feeds `rows` tokens, by their number alone."""
        table = self.rows_s
        if rows <= table[0][0] or len(table) == 1:
            return table[0][1]
        at = min(bisect_left(table, rows, key=_count), len(table) - 1)
        (low, low_s), (high, high_s) = table[at - 1], table[at]
        return low_s + (high_s - low_s) * (rows - low) / (high - low)

    def save_s(self, nbytes: int) -> float:
        """Seconds of copying to the host cache."""
        return nbytes / self.save_bytes_per_s if self.save_bytes_per_s else 0.0

    def load_s(self, nbytes: int) -> float:
        """Seconds of copying from the host cache."""
        return nbytes / self.load_bytes_per_s if self.load_bytes_per_s else 0.0

    # bytes ----------------------------------------------------------------------------------------------------------------
    @property
    def block_bytes(self) -> int:
        return self.cell_bytes * self.block_size

    @property
    def unit_bytes(self) -> int:
        """What a lease is counted in: a block, rounded up to whole pages."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    def lease_bytes(self, num_blocks: int) -> int:
        """What an image of `num_blocks` blocks, and the state, takes of the budget."""
        return (num_blocks + -(-self.state_bytes // self.unit_bytes)) * self.unit_bytes

    def image_bytes(self, num_blocks: int) -> int:
        """What is copied of an image of `num_blocks` blocks, and the state."""
        return num_blocks * self.block_bytes + self.state_bytes

    def with_free_parks(self) -> "CostModel":
        """The same with copies that take no time: what the pool allows when parks cost nothing."""
        note = f"{self.note}; copies take no time" if self.note else "copies take no time"
        return msgspec.structs.replace(
            self, name=f"{self.name}, free parks", save_bytes_per_s=0.0, load_bytes_per_s=0.0, copy_overlaps=True, note=note
        )


class Work(Struct, frozen=True):
    """What a step feeds and reads, as `CostModel.step_s` takes it."""

    decodes: int = 0
    prefill_tokens: int = 0
    decode_cells: int = 0
    prefill_cells: int = 0


def work_of(rows: Iterable[Row | RowSummary]) -> Work:
    """The work of a step. A row of one token that samples is a decode."""
    decodes = prefill_tokens = decode_cells = prefill_cells = 0
    for row in rows:
        if row.count == 1 and row.samples:
            decodes += 1
            decode_cells += row.start + 1
        else:
            prefill_tokens += row.count
            prefill_cells += attended(row.start, row.count)
    return Work(decodes, prefill_tokens, decode_cells, prefill_cells)


def attended(start: int, count: int) -> int:
    """Cells that a chunk of `count` tokens from position `start` on reads, each token those up to its own."""
    return count * start + count * (count + 1) // 2


def load_costs(name: str) -> CostModel:
    """The shipped model of that name (`cpu`, `card`), or the one in a file. CostsError is one line."""
    path = SHIPPED / f"{name}.json" if name in shipped() else Path(name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostModel)
    except FileNotFoundError:
        raise CostsError(f"{name}: no such file, and no shipped costs; shipped are {', '.join(shipped())}") from None
    except OSError as error:
        raise CostsError(f"{name}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CostsError(f"{name}: {error}") from None


def shipped() -> list[str]:
    """Names of the shipped models."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def encode(costs: CostModel) -> bytes:
    """The model as the text of its file."""
    return msgspec.json.format(msgspec.json.encode(costs), indent=2) + b"\n"


def _count(entry: tuple[int, float]) -> int:
    return entry[0]
