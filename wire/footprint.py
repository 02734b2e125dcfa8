"""What a model takes in memory, by its shape alone: weights, a block of cells, a recurrent state, the image of a park. No torch.

The worker's own functions must give the same (`block_bytes`, `state_bytes`, `Layout`): tests/wire/test_footprint.py.
"""

from math import prod

from msgspec import Struct, structs

from wire.model_files import ModelFiles
from wire.model_spec import DeltaSpec, ModelSpec, tensor_shapes

BLOCK_SIZE = 16  # cells
PAGE_BYTES = 4096
PARKING_SLOTS = 2  # recurrent states beside those of --slots
FOLD = 16  # tokens between two recurrent states


class Footprint(Struct, frozen=True):
    """Bytes of the parts. `state_bytes` is of one sequence, 0 where the model has no recurrent layers."""

    block_bytes: int
    state_bytes: int
    max_context: int  # of the model

    @property
    def cell_bytes(self) -> float:
        return self.block_bytes / BLOCK_SIZE

    @property
    def unit_bytes(self) -> int:
        """Of an image: a block rounded up to a page."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    def image_bytes(self, cells: int) -> int:
        """What a park of so many cells takes of the budget: whole blocks, then the state in whole units."""
        units = -(-cells // BLOCK_SIZE) + -(-self.state_bytes // self.unit_bytes)
        return units * self.unit_bytes

    def pool_bytes(self, cells: int) -> int:
        """Of the pool; the worker has one block more for itself."""
        return cells // BLOCK_SIZE * self.block_bytes


def footprint(spec: ModelSpec, value_bytes: int, draft_most: int) -> Footprint:
    """`value_bytes`: of one key or value, 2 or 4. `draft_most`: tokens that the head may draft; with 0 the head takes nothing."""
    if not draft_most:
        spec = structs.replace(spec, mtp=None)
    state = _state_bytes(spec.delta, draft_most) if spec.delta else 0
    return Footprint(_block_bytes(spec, value_bytes), state, spec.max_context)


def sized(nbytes: int) -> str:
    """A size for people."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 10 * 2**30 else f"{nbytes / 2**20:.1f} MiB"


def value_bytes(dtype: str) -> int:
    """Bytes of one key or value with this `--dtype`."""
    return 4 if dtype == "f32" else 2


def file_bytes(files: ModelFiles) -> int:
    """Of all tensors of a model, as they lie in its files."""
    return sum(tensor.nbytes for tensor in files.tensors.values())


def matrix_bytes(spec: ModelSpec, weight_bytes: int) -> int:
    """Of all matrices in a dense type of so many bytes: on a card 2."""
    return weight_bytes * sum(prod(shape) for shape in tensor_shapes(spec).values() if len(shape) == 2)


def _block_bytes(spec: ModelSpec, size: int) -> int:
    row = BLOCK_SIZE * spec.head_dim * size  # one head's keys or values
    hidden = 4 * spec.hidden if spec.mtp else 0  # of the newest cell, in whole rows
    return (spec.kv_layers * 2 * spec.num_kv_heads + -(-hidden // row)) * row


def _state_bytes(delta: DeltaSpec, draft_most: int) -> int:
    """float32: the state, the log since then (keys, what is added, decays), the convolution's inputs, a count; each part begins
    on a cache line."""
    log = FOLD + draft_most
    parts = (
        delta.value_heads * delta.key_dim * delta.value_dim,
        log * delta.key_width,
        log * delta.value_width,
        log * delta.value_heads,
        (delta.kernel + draft_most) * delta.conv_width,
    )
    return 4 * (sum(-(-len(delta.layers) * part // 16) * 16 for part in parts) + 16)
