"""The block of text about a worker's capacity: its figures are those of the policy, the layout and the budget."""

import pytest
from msgspec import structs

from gpu_worker.policy.limits import Limits
from gpu_worker.policy.policies import high_line, low_line, policy_of
from wire import capacity
from wire.config import Config
from wire.footprint import footprint
from wire.messages import Hello, WorkerStatus
from wire.model_files import find_model

MIB = 1 << 20
CELLS = 2048


def hello(model: str = "smollm2", **changed: object) -> Hello:
    spec = find_model(model).spec
    drafts = 2
    found = footprint(spec, 2, drafts)
    made = Hello(
        name="cpu0", pid=1, model=model, device="cpu", dtype="int4", pool_cells=CELLS, block_size=16, slots=8,
        max_context=min(CELLS, spec.max_context), exact=True, pool_bytes=found.pool_bytes(CELLS), state_bytes=found.state_bytes,
        state_slots=10 if spec.delta else 0, draft=drafts, reuse=spec.delta is None,
    )  # fmt: skip
    return structs.replace(made, **changed)


def text(worker: Hello | WorkerStatus, budget: int | None = 256 * MIB, **settings: object) -> str:
    return "\n".join(capacity.capacity(worker, Config(**settings), budget))


def test_nothing_is_refused_where_there_is_room() -> None:
    block = text(hello())
    assert "  refused" not in block
    assert [line.split()[0] for line in block.splitlines()[1:]] == [
        "pool", "sequence", "seats", "parking", "budget", "rollback", "staging",
    ]  # fmt: skip
    assert "2048 cells, 128 blocks of 16" in block
    assert "reaches 2048 cells" in block
    assert "8 run at once; with 256 cells each" in block


def test_the_budget_holds_as_many_parks_as_images_fit() -> None:
    found = footprint(find_model("smollm2").spec, 2, 2)
    for cells in (1024, 2048):
        parks = 256 * MIB // found.image_bytes(cells)
        assert f"{parks} of {cells} cells" in text(hello())


@pytest.mark.parametrize("policy", ["watermark", "lookahead", "ondemand", "off"])
@pytest.mark.parametrize("blocks", [1, 2, 127, 128, 4096])
@pytest.mark.parametrize(("high", "low", "steps"), [(94, 80, 8), (50, 49, 100), (100, 99, 1)])
def test_parking_begins_where_the_policy_says(policy: str, blocks: int, high: int, low: int, steps: int) -> None:
    config = Config(policy=policy, high=high, low=low, lookahead_steps=steps)
    limits = Limits(
        num_blocks=blocks,
        block_size=16,
        slots=1,
        max_context=16 * blocks,
        policy=policy,
        high=high,
        low=low,
        lookahead_steps=steps,
    )
    rule, told = policy_of(limits), capacity.parking(config, blocks)
    assert capacity.lines_of(config, blocks) == (high_line(limits), low_line(limits))
    if not rule.parks:
        assert "never" in told
        return
    if policy == "watermark":
        assert f"more than {rule.park_line * 16} of" in told
        assert f"up to {rule.enter_line * 16} " in told
        return
    assert f"not fit {rule.park_line * 16} cells" in told
    assert f"when {rule.enter_ahead} steps" in told
    assert (f"next {rule.park_ahead} steps" if rule.park_ahead > 1 else "next step does") in told


@pytest.mark.parametrize(
    ("worker", "budget", "settings", "words"),
    [
        ({}, 0, {}, "saved parks: the budget is 0"),
        ({}, None, {}, "saved parks: no host cache answers"),
        ({}, 4096, {}, "saved parks: one block of an image takes"),
        ({}, 20 * MIB, {}, "saved parks of more than"),
        ({}, 256 * MIB, {"park_mode": "recompute"}, "saved parks: --park-mode recompute"),
        ({"exact": False, "exact_note": "--exact off"}, 256 * MIB, {}, "exactness: --exact off"),
        ({"draft": 0, "draft_note": "bard has no head"}, 256 * MIB, {}, "drafts: bard has no head"),
        ({"reuse": False}, 256 * MIB, {"no_reuse": True}, "reuse of earlier prompts: --no-reuse"),
        ({"reuse": False}, 256 * MIB, {}, "recurrent states cannot be found by hash"),
    ],
)
def test_what_is_refused_is_told_with_why(worker: dict, budget: int | None, settings: dict, words: str) -> None:
    (line,) = [line for line in text(hello(**worker), budget, **settings).splitlines() if line.startswith("  refused")]
    assert words in line


def test_a_budget_of_several_workers_is_shared() -> None:
    assert "256.0 MiB, shared by 2 workers, holds" in text(hello(), device="cuda:0,cuda:1")
    assert "shared" not in text(hello())


def test_the_largest_park_that_fits_is_the_largest() -> None:
    found = footprint(find_model("bard").spec, 2, 2)
    for nbytes in (0, 4096, MIB, 10 * MIB + 12345):
        cells = capacity.cells_of(found, nbytes)
        assert not cells or found.image_bytes(cells) <= nbytes
        assert found.image_bytes(cells + 1) > nbytes


def test_states_of_a_hybrid_are_told() -> None:
    worker = hello("bard")
    block = text(worker)
    assert f"10 recurrent states of {worker.state_bytes / MIB:.1f} MiB" in block
    assert "takes back as many from its log" in block


def test_a_status_says_what_a_hello_says() -> None:
    said = hello()
    same = {name: getattr(said, name) for name in said.__struct_fields__ if name in WorkerStatus.__struct_fields__}
    assert text(WorkerStatus(alive=True, **same)) == text(said)


def test_a_worker_that_has_not_told_its_pool() -> None:
    assert text(hello(pool_cells=0)) == "capacity of cpu0: not known"
