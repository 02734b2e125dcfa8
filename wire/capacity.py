"""What a worker can do with the memory it has, as one block of text: pool, parks, where parking begins, what was refused.

The lines of the policies are those of `gpu_worker/policy/policies.py`; tests/wire/test_capacity.py compares them.
"""

from collections.abc import Iterator

from wire.config import Config, devices
from wire.footprint import BLOCK_SIZE, PARKING_SLOTS, Footprint, sized
from wire.messages import Hello, WorkerStatus

ENTER_AHEAD = 64  # steps for which there must be room when somebody comes in
LABEL_CHARS = 11


def capacity(worker: Hello | WorkerStatus, config: Config, budget_bytes: int | None) -> list[str]:
    """The lines. `budget_bytes` None: there is no host cache yet. Without a worker's pool there is nothing to say."""
    if not worker.pool_cells or not worker.pool_bytes:
        return [f"capacity of {worker.name}: not known"]
    found = footprint_of(worker)
    longest = min(worker.pool_cells, worker.max_context)
    lines = [
        ("pool", _pool(worker, found)),
        ("sequence", f"reaches {longest} cells, prompt and answer together (pool {worker.pool_cells}); "
                     f"a longer prompt is refused, a longer answer ends with length"),
        ("seats", _seats(worker)),
        ("parking", parking(config, worker.pool_cells // BLOCK_SIZE)),
        ("budget", _budget(worker, config, found, longest, budget_bytes)),
        ("rollback", _rollback(worker, found)),
        ("staging", "none: a save copies from the pool into its lease, a load back; no bytes beside the budget"),
        *(("refused", text) for text in refused(worker, config, found, longest, budget_bytes)),
    ]  # fmt: skip
    return [f"capacity of {worker.name}:", *(f"  {label:<{LABEL_CHARS}}{text}" for label, text in lines)]


def footprint_of(worker: Hello | WorkerStatus) -> Footprint:
    """What its blocks and states take, from what it announced."""
    return Footprint(worker.pool_bytes * worker.block_size // worker.pool_cells, worker.state_bytes, worker.max_context)


def parking(config: Config, blocks: int) -> str:
    """Where parking begins and where somebody comes back, in cells."""
    pool = blocks * BLOCK_SIZE
    match config.policy:
        case "watermark":
            high, low = lines_of(config, blocks)
            return (
                f"watermark: begins when the next step would use more than {high * BLOCK_SIZE} of {pool} cells ({config.high}%), "
                f"who is parked comes back up to {low * BLOCK_SIZE} ({config.low}%)"
            )
        case "off":
            return f"off: never; who finds no cell in the {pool} ends with an error"
        case policy:
            ahead = 1 if policy == "ondemand" else config.lookahead_steps
            room = max(ENTER_AHEAD, 2 * ahead)
            steps = "the next step does" if ahead == 1 else f"the next {ahead} steps do"
            return (
                f"{policy}: begins when {steps} not fit {pool} cells, who is parked comes back when {room} steps of all would fit"
            )


def lines_of(config: Config, blocks: int) -> tuple[int, int]:
    """HIGH and LOW of the watermark policy, in blocks."""
    high = max(1, blocks * config.high // 100)
    return high, min(blocks * config.low // 100, high - 1)


def refused(
    worker: Hello | WorkerStatus, config: Config, found: Footprint, longest: int, budget_bytes: int | None
) -> Iterator[str]:
    """What this worker does not do, and why."""
    if not worker.exact:
        yield f"exactness: {worker.exact_note or 'not proven here'}; a stream may differ from its solo run after a park"
    if not worker.draft:
        yield f"drafts: {worker.draft_note or 'none'}"
    if not worker.reuse:
        why = "--no-reuse" if config.no_reuse else "recurrent states cannot be found by hash"
        yield f"reuse of earlier prompts: {why}; every prompt is computed from its start"
    if config.policy != "off" and config.park_mode == "recompute":
        yield "saved parks: --park-mode recompute; every park is computed again"
    elif budget_bytes is None:
        yield "saved parks: no host cache answers; every park is computed again until one does"
    elif found.image_bytes(1) > budget_bytes:
        why = "the budget is 0" if not budget_bytes else f"one block of an image takes {sized(found.image_bytes(1))}"
        yield f"saved parks: {why}; every park is computed again"
    elif found.image_bytes(longest) > budget_bytes:
        most = cells_of(found, budget_bytes)
        yield f"saved parks of more than {most} cells: they do not fit the budget and are computed again"


def cells_of(found: Footprint, nbytes: int) -> int:
    """Cells of the largest image that so many bytes hold."""
    state = found.image_bytes(0)
    return max(0, (nbytes - state) // found.unit_bytes) * BLOCK_SIZE


def sizes(longest: int) -> list[int]:
    """Lengths to tell of: a short chat, a long one, the longest there can be."""
    return sorted({size for size in (1024, 8192) if size < longest} | {longest})


def _pool(worker: Hello | WorkerStatus, found: Footprint) -> str:
    text = (
        f"{worker.pool_cells} cells, {worker.pool_cells // BLOCK_SIZE} blocks of {BLOCK_SIZE}, in {sized(worker.pool_bytes)}: "
        f"{found.cell_bytes / 1024:.1f} KiB a cell"
    )
    if worker.state_bytes:
        text += f"; beside it {worker.state_slots} recurrent states of {sized(worker.state_bytes)}"
    return text


def _seats(worker: Hello | WorkerStatus) -> str:
    each = worker.pool_cells // worker.slots
    if each >= worker.max_context:
        return f"{worker.slots} run at once; even the longest they can be do not fill the pool"
    return f"{worker.slots} run at once; with {each} cells each they fill the pool"


def _budget(worker: Hello | WorkerStatus, config: Config, found: Footprint, longest: int, budget_bytes: int | None) -> str:
    if budget_bytes is None:
        return "not known: no host cache answers"
    if config.park_mode == "recompute" or not budget_bytes:
        return f"{sized(budget_bytes)}: no park is saved"
    parks = ", ".join(
        f"{budget_bytes // (each := found.image_bytes(cells))} of {cells} cells ({sized(each)} each)" for cells in sizes(longest)
    )
    shared = f", shared by {workers} workers," if (workers := len(devices(config.device))) > 1 else ""
    return f"{sized(budget_bytes)}{shared} holds so many parks: {parks}"


def _rollback(worker: Hello | WorkerStatus, found: Footprint) -> str:
    if not worker.draft:
        return "nothing is drafted, so nothing is taken back"
    text = f"up to {worker.draft} drafts a sequence, {worker.draft * worker.slots} cells of the pool while a step runs"
    if worker.state_bytes:
        text += f"; a state takes back as many from its log, and {PARKING_SLOTS} more states let parks be saved beside full seats"
    return text
