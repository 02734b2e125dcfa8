"""What a guess costs beside a plain step, from the shape of the model: a function of no clock, so that a run repeats."""

from math import prod

from wire.model_spec import ModelSpec, tensor_shapes

# Percent of a step of d decodes that one more row for each costs, d from 1 on: as the native rows did on two cores
# (`python -m benchmarks.solo --draft`), the last figures estimated.
VERIFY = (15, 30, 40, 50)
TOO_MUCH = 80  # percent for a guess of a sequence alone: more than most heads give back


def draft_cost(spec: ModelSpec) -> tuple[int, ...]:
    """Limits.draft_cost for a model with a head: a pass of the head, by the weights that it reads, and one more row to verify."""
    assert spec.mtp is not None
    matrices = {name: prod(shape) for name, shape in tensor_shapes(spec).items() if len(shape) == 2}
    step = sum(size for name, size in matrices.items() if name.startswith("layers.")) + spec.vocab * spec.hidden
    head = sum(size for name, size in matrices.items() if name.startswith("mtp."))
    head += (spec.mtp.draft_vocab or spec.vocab) * spec.hidden
    return tuple(verify + -(-100 * head // step) for verify in VERIFY)
