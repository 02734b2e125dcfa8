"""What a draft costs beside a plain step, from the shape of the model: a function of no clock, so that a run repeats."""

from math import prod

from wire.model_spec import ModelSpec, tensor_shapes

# Percent of the products of a step of d decodes that one more row for each costs, d from 1 on: as the native rows did with
# SmolLM2 in 4 bits on two cores. One row or two wait for memory, many compute.
VERIFY = (5, 21, 40, 55)
# What a step costs beside its products (messages, plan, draws), and what a draft does, in weights that could be read meanwhile:
# some 0.2 ms a step and 0.2 ms a sequence, 0.05 ms a pass of the head. It is most of a step of a tiny model.
STEP, SEQUENCE, DRAFT = 5_000_000, 5_000_000, 1_000_000
# The same of a card: estimates for an H200, not measured on a card. A few rows more wait for the same memory; a step has some .15
# ms that read nothing, a pass of the head .03 ms, at 2 * 10^12 weights a second.
CARD_VERIFY = 2
CARD_STEP, CARD_DRAFT = 300_000_000, 60_000_000
TOO_MUCH = 80  # percent for a draft of a sequence alone: more than most heads give back


def draft_cost(spec: ModelSpec, on_card: bool = False) -> tuple[int, ...]:
    """Limits.draft_cost for a model with a head: a pass of the head, by the weights that it reads, and one more row to verify."""
    assert spec.mtp is not None
    matrices = {name: prod(shape) for name, shape in tensor_shapes(spec).items() if len(shape) == 2}
    products = sum(size for name, size in matrices.items() if name.startswith("layers.")) + spec.vocab * spec.hidden
    head = sum(size for name, size in matrices.items() if name.startswith("mtp."))
    head += (spec.mtp.draft_vocab or spec.vocab) * spec.hidden
    if on_card:  # the products of one decode and of some are the same bytes
        return (-(-(CARD_VERIFY * products + 100 * (head + CARD_DRAFT)) // (products + CARD_STEP)),)
    return tuple(
        -(-(verify * products + 100 * (head + DRAFT)) // (products + STEP + decodes * SEQUENCE))
        for decodes, verify in enumerate(VERIFY, 1)
    )
