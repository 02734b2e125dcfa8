"""`parkade plan`: what a model needs and what fits, with the arithmetic, before anything is started or loaded."""

from math import ceil

import click
import psutil
from msgspec import Struct, structs

from wire.capacity import capacity, cells_of, sizes
from wire.config import Config, ConfigError, devices, draft_length
from wire.footprint import (
    BLOCK_SIZE,
    PARKING_SLOTS,
    Footprint,
    file_bytes,
    footprint,
    matrix_bytes,
    sized,
    value_bytes,
)
from wire.memory import budget_bytes, total_bytes
from wire.messages import Hello
from wire.model_files import ModelFiles, find_model
from wire.model_spec import HEAD_PREFIX

DRAFT_AUTO = 2  # where drafts pay; the worker decides
MOST_BLOCKS = 1 << 21  # of a pool that takes all of a card
PROCESS_BYTES = 400 << 20  # of a worker beside weights, pool and states: torch, the interpreter, what a step needs
SMALL_BYTES = 160 << 20  # of router and HTTP adapter together


class Plan(Struct, frozen=True):
    """What is counted on. `card_bytes`: free memory of a card, None on the CPU."""

    config: Config
    files: ModelFiles
    draft: int
    card_bytes: int | None
    weight_bytes: int
    found: Footprint
    pool_cells: int
    state_slots: int
    budget: int

    @property
    def pool_bytes(self) -> int:
        """With the block that the worker has for itself."""
        return self.found.pool_bytes(self.pool_cells) + self.found.block_bytes

    @property
    def states_bytes(self) -> int:
        return self.state_slots * self.found.state_bytes

    @property
    def workers(self) -> int:
        return len(devices(self.config.device))


def plan(config: Config, card_bytes: int | None) -> int:
    """Print it; status 0 if it fits here, else 1. ConfigError for what cannot be."""
    made = make_plan(config, card_bytes)
    click.echo("\n".join(told(made)))
    problems = list(shortages(made, psutil.virtual_memory().available))
    for problem in problems:
        click.echo(f"does not fit: {problem}")
    return 1 if problems else 0


def make_plan(config: Config, card_bytes: int | None) -> Plan:
    """ConfigError if it is not said how much memory a card has, or if there is none in the plan."""
    cards = sum(device.startswith("cuda") for device in devices(config.device).values())
    if cards and card_bytes is None:
        raise ConfigError(f"--device {config.device}: say how much memory is free on a card with --card-memory, e.g. 141GB")
    if card_bytes is not None and config.device != "auto" and cards < len(devices(config.device)):
        raise ConfigError(f"--device {config.device}: with --card-memory all devices are cards")
    files = find_model(config.model)
    wanted = draft_length(config.draft)
    draft = (DRAFT_AUTO if wanted is None else wanted) if files.spec.mtp else 0
    on_card = card_bytes is not None
    weights = _weights(files, config, draft, on_card)
    found = footprint(files.spec, 2 if on_card else value_bytes(config.dtype), draft)
    state_slots = config.slots + PARKING_SLOTS if files.spec.delta else 0
    cells = config.ctx // BLOCK_SIZE * BLOCK_SIZE
    if not cells:
        if card_bytes is None:
            raise ConfigError("--ctx 0 is all that fits on a card: say how much memory that has with --card-memory, e.g. 141GB")
        room = int(card_bytes * config.gpu_memory) - weights - state_slots * found.state_bytes
        cells = max(0, min(room // found.block_bytes - 1, MOST_BLOCKS)) * BLOCK_SIZE
    budget = budget_bytes(config.park_ram, total_bytes())[0]
    return Plan(config, files, draft, card_bytes, weights, found, cells, state_slots, budget)


def told(plan: Plan) -> list[str]:
    """The lines: first the arithmetic, then the block that a worker logs at its start."""
    spec, found, config = plan.files.spec, plan.found, plan.config
    spec = spec if plan.draft else structs.replace(spec, mtp=None)
    size = 2 if plan.card_bytes is not None else value_bytes(config.dtype)
    one = 2 * spec.kv_layers * spec.num_kv_heads * spec.head_dim * size
    layers = f"{spec.kv_layers} layers" + (" (the head's is one)" if spec.mtp else "")
    lines = [
        ("model", f"{plan.files.name}: {spec.num_layers} layers, context {spec.max_context}, {sized(file_bytes(plan.files))}"),
        ("weights", f"about {sized(plan.weight_bytes)}, {_kind(plan)}" + (", with the head that drafts" if plan.draft else "")),
        ("cell", f"2 (keys, values) x {layers} x {spec.num_kv_heads} heads x {spec.head_dim} x {size} bytes = {one} bytes"),
        ("block", f"{BLOCK_SIZE} cells x {one}" + (" + a hidden row" if spec.mtp else "") + f" = {found.block_bytes} bytes"),
        ("pool", f"({plan.pool_cells // BLOCK_SIZE} blocks + 1) x {found.block_bytes} = {sized(plan.pool_bytes)}"),
    ]  # fmt: skip
    if plan.state_slots:
        lines.append((
            "states", f"({config.slots} slots + {PARKING_SLOTS}) x {found.state_bytes} bytes = {sized(plan.states_bytes)}, "
                      "whatever the lengths",
        ))  # fmt: skip
    longest = min(plan.pool_cells, spec.max_context)
    lines += [("a park", _park(found, cells)) for cells in sizes(longest) if cells]
    lines += [
        ("budget", f"--park-ram {config.park_ram} = {sized(plan.budget)}; largest park: {cells_of(found, plan.budget)} cells"),
        ("memory", _memory(plan)),
    ]  # fmt: skip
    hello = _hello(plan, longest)
    return [f"{label:<9}{text}" for label, text in lines] + [""] + capacity(hello, config, plan.budget)


def shortages(plan: Plan, available: int) -> list[str]:
    """What there is not enough of."""
    found = []
    if plan.card_bytes is not None:
        share = int(plan.card_bytes * plan.config.gpu_memory)
        need = plan.weight_bytes + plan.pool_bytes + plan.states_bytes
        if need > share or not plan.pool_cells:
            found.append(
                f"weights, pool and states need {sized(need)} of a card, its share is {sized(share)}; lower --ctx or --slots"
            )
    elif (need := _host_bytes(plan)) > available:
        found.append(f"{sized(need)} are needed and {sized(available)} are available; lower --ctx, --slots or --park-ram")
    return found


def _weights(files: ModelFiles, config: Config, draft: int, on_card: bool) -> int:
    """On a card bf16. On the CPU 4-bit files stay about as they are, unless another type is asked for."""
    spec = files.spec if draft else structs.replace(files.spec, mtp=None)
    if not on_card and config.dtype == "auto" and _is_quantised(files):
        return sum(files.tensors[name].nbytes for uniform, name in files.names.items() if draft or not _of_head(uniform))
    return matrix_bytes(spec, 4 if not on_card and config.dtype == "f32" else 2)


def _of_head(uniform: str) -> bool:
    return uniform.startswith(HEAD_PREFIX)


def _is_quantised(files: ModelFiles) -> bool:
    return any(tensor.dtype.startswith("Q") for tensor in files.tensors.values())


def _kind(plan: Plan) -> str:
    if plan.card_bytes is not None:
        return "bf16, on the card"
    if plan.config.dtype == "auto":
        return "in the files' types" if _is_quantised(plan.files) else "bf16"
    return plan.config.dtype


def _park(found: Footprint, cells: int) -> str:
    blocks = ceil(cells / BLOCK_SIZE)
    units = found.image_bytes(0) // found.unit_bytes
    state = f" + {units} of state" if units else ""
    return (
        f"{cells} cells: ({blocks} blocks{state}) x {found.unit_bytes} bytes (a block in whole pages) = "
        f"{sized(found.image_bytes(cells))}"
    )


def _memory(plan: Plan) -> str:
    parts = f"weights {sized(plan.weight_bytes)}, pool {sized(plan.pool_bytes)}"
    if plan.states_bytes:
        parts += f", states {sized(plan.states_bytes)}"
    if plan.card_bytes is not None:
        return (
            f"of the card {parts}, beside them some hundred MiB of workspace; of the host the budget {sized(plan.budget)} "
            f"and about {sized(_host_bytes(plan) - plan.budget)}"
        )
    each = f"{plan.workers} workers with " if plan.workers > 1 else ""
    return (
        f"{each}{parts}, about {sized(PROCESS_BYTES)} more for a worker and {sized(SMALL_BYTES)} for router and HTTP, "
        f"at most {sized(plan.budget)} for the host cache: {sized(_host_bytes(plan))}"
    )


def _host_bytes(plan: Plan) -> int:
    of_worker = PROCESS_BYTES
    if plan.card_bytes is None:
        of_worker += plan.weight_bytes + plan.pool_bytes + plan.states_bytes
    return plan.workers * of_worker + SMALL_BYTES + plan.budget


def _hello(plan: Plan, longest: int) -> Hello:
    """What a worker would announce. Whether a card's steps are exact is only known there."""
    config = plan.config
    exact = config.exact == "on" and plan.card_bytes is None
    note = "" if exact else "--exact off" if config.exact == "off" else "on a card it has to be proven there"
    return Hello(
        name="one worker", pid=0, model=plan.files.name, device="", dtype="", pool_cells=plan.pool_cells, block_size=BLOCK_SIZE,
        slots=config.slots, max_context=longest, exact=exact, exact_note=note, pool_bytes=plan.found.pool_bytes(plan.pool_cells),
        state_bytes=plan.found.state_bytes, state_slots=plan.state_slots, draft=plan.draft,
        draft_note="" if plan.draft else "--draft 0" if plan.files.spec.mtp else f"{plan.files.name} has no head that drafts",
        reuse=not config.no_reuse and plan.files.spec.delta is None,
    )  # fmt: skip
