"""`python -m gpu_worker`: loads the model, proves what it promises, then runs the loop."""

import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable

import psutil
import zmq
from msgspec import Struct

from gpu_worker import journal
from gpu_worker.device.kv_cache import KvCache, block_bytes
from gpu_worker.device.state_cache import state_bytes
from gpu_worker.draft_cost import TOO_MUCH, draft_cost
from gpu_worker.engine import Engine
from gpu_worker.model.exactness import prove
from gpu_worker.model.load import Model, available_processors, load_model
from gpu_worker.on_card import OpenCard, card_of, engine_on
from gpu_worker.parking import Parking
from gpu_worker.policy.recording import Header
from gpu_worker.policy.scheduler import Limits, Scheduler
from gpu_worker.runner import Runner
from gpu_worker.worker import Worker
from wire import sockets
from wire.capacity import capacity
from wire.config import Config, ConfigError, device_of, devices, draft_length, policy_settings
from wire.messages import Hello
from wire.model_files import ModelFiles, find_model
from wire.model_spec import ModelSpec
from wire.service import log, notify, run

BLOCK_SIZE = 16
DRAFT_AUTO = 2
PARKING_SLOTS = 2  # states beyond --slots: a sequence keeps its own until its image is saved, and the next need not wait for that


class Draft(Struct, frozen=True):
    """What the head may draft."""

    most: int = 0  # tokens for one row of a step
    note: str = ""  # why none


def main(config: Config) -> int:
    """Everything that can fail for a reason the user must change fails here, before the socket opens."""
    name = os.environ.get("PARKADE_WORKER_NAME") or next(iter(devices(config.device)))
    files = find_model(config.model)
    device = device_of(name, config.device)
    if files.kind == "toy" and device not in ("cpu", "auto"):
        raise ConfigError(f"--device {device}: --model {files.name} runs on the CPU only")
    card = None if files.kind == "toy" else card_of(device)
    if card is None:
        return _serve(config, name, files, None)
    try:
        return _serve(config, name, files, card)
    except BaseException as error:
        _let_go(error)
        raise
    finally:
        card.close()


def _let_go(error: BaseException | None) -> None:
    """What frames hold of a card must go before the card does: those of an error, and of the errors it came from."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _serve(config: Config, name: str, files: ModelFiles, card: OpenCard | None) -> int:
    """On this card, or on the CPU. When it returns nothing of the card is in use."""
    draft = drafts_of(config, files, card is not None)
    state_slots = config.slots + PARKING_SLOTS if files.spec.delta else 0
    if card is None:
        engine = engine_on_cpu(config, files, draft, state_slots)
    else:
        engine = engine_on(card, config, files, draft.most, state_slots, step_budget(config, draft.most))
    spec, kv = engine.spec, engine.kv
    pool_cells = kv.num_blocks * BLOCK_SIZE
    hello = Hello(
        name=name, pid=os.getpid(), model=files.name, device=engine.device, dtype=engine.dtype, pool_cells=pool_cells,
        block_size=BLOCK_SIZE, slots=config.slots, max_context=min(pool_cells, spec.max_context), exact=engine.exact,
        exact_note=engine.exact_note, weight_bytes=engine.weight_bytes, pool_bytes=kv.bytes, state_bytes=kv.state_bytes,
        state_slots=state_slots, draft=draft.most, draft_note=draft.note, reuse=may_reuse(config, spec), vocab=spec.vocab,
    )  # fmt: skip
    announce(hello)
    identity = f"{name}-{os.getpid()}-{secrets.token_hex(4)}"
    scheduler = make_scheduler(config, limits(config, files, spec, hello), hello)
    parking = Parking(kv, sockets.hostcache_path(config.run_dir), identity, time.monotonic, engine.copies(identity))
    parking.on_attached = tell_capacity(hello, config)
    socket = sockets.dealer_socket(zmq.Context.instance(), sockets.worker_address(config.run_dir), identity.encode())
    worker = Worker(hello, socket, scheduler, engine.runner, parking)

    def stop(_signal: int, _frame: object) -> None:
        worker.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for `parkade serve`, which tells us
    notify("READY=1")
    try:
        worker.run()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it has ended; and the handler holds the worker
        if isinstance(scheduler, journal.JournaledScheduler):
            scheduler.journal.close()
        engine.close()
    return 0


def engine_on_cpu(config: Config, files: ModelFiles, draft: Draft, state_slots: int) -> Engine:
    """Load the model into memory. ConfigError if it does not fit."""
    if not config.ctx:
        raise ConfigError("--ctx 0: on the CPU the pool needs a number of cells; only a card is filled by itself")
    num_blocks = config.ctx // BLOCK_SIZE
    model = model_on_cpu(config, files, draft)
    check_memory(config, model, num_blocks, state_slots, draft.most)
    kv = KvCache(model.spec, num_blocks, BLOCK_SIZE, model.kv_dtype, state_slots, draft.most)
    exact, note = prove(model) if config.exact == "on" else (False, "--exact off")
    return Engine("cpu", model.spec, model.dtype_name, model.weight_bytes, kv, exact, note, Runner(model, kv))


def make_scheduler(config: Config, limits: Limits, hello: Hello) -> Scheduler:
    """The scheduler, with a journal where --journal names a file. ConfigError if that cannot be made."""
    if not config.journal:
        return Scheduler(limits)
    path = journal.path_of(config.journal, hello.name, len(devices(config.device)))
    try:
        kept = journal.Journal(path, Header(limits, hello.name, hello.model, hello.dtype))
    except OSError as error:
        raise ConfigError(f"--journal {path}: {error.strerror}") from None
    log.info("journal: %s; it holds prompts and texts", kept.path)
    return journal.JournaledScheduler(limits, kept)


def model_on_cpu(config: Config, files: ModelFiles, draft: Draft) -> Model:
    """The model, with its head only if that is to draft."""
    threads = max(1, available_processors() // len(devices(config.device)))  # the workers share the processors
    return load_model(files, config.dtype, exact=config.exact == "on", threads=threads, mtp=draft.most > 0)


def drafts_of(config: Config, files: ModelFiles, on_card: bool) -> Draft:
    """What `--draft` means for this model: a number is taken as it is, `auto` is 2 where a draft is cheap enough. ConfigError if
    the model has no head and is told to draft."""
    wanted = draft_length(config.draft)
    if wanted == 0:
        return Draft(note="--draft 0")
    if files.spec.mtp is None:
        if wanted:
            raise ConfigError(f"--draft {wanted}: {files.name} has no head that drafts; use --draft auto or 0")
        return Draft(note=f"{files.name} has no head that drafts")
    if wanted:
        return Draft(wanted)
    cost = draft_cost(files.spec, on_card)[0]
    return Draft(DRAFT_AUTO) if cost <= TOO_MUCH else Draft(note=f"a draft costs about {cost}% of a step")


def may_reuse(config: Config, spec: ModelSpec) -> bool:
    """Whether blocks may be found again by hash: cells alone do not bring a recurrent state back."""
    return not config.no_reuse and spec.delta is None


def announce(hello: Hello) -> None:
    """One line in the log: what is in memory and what was promised."""
    parts = [
        f"weights {hello.weight_bytes >> 20} MiB",
        f"pool {hello.pool_cells} cells in {hello.pool_bytes >> 20} MiB",
        f"exact {'yes' if hello.exact else 'no'}" + (f" ({hello.exact_note})" if hello.exact_note else ""),
        f"drafts up to {hello.draft}" if hello.draft else f"no drafts ({hello.draft_note})",
    ]
    if hello.state_slots:
        size = hello.state_slots * hello.state_bytes
        parts.insert(2, f"{hello.state_slots} recurrent states in {size / 2**20:.1f} MiB, so no reuse of earlier prompts")
    where = "" if hello.device == "cpu" else f" on {hello.device}"
    log.info("%s as %s%s: %s", hello.model, hello.dtype, where, ", ".join(parts))


def tell_capacity(hello: Hello, config: Config) -> Callable[[int], None]:
    """Writes the block about capacity to the log, once for each size of the budget."""
    told: set[int] = set()

    def tell(budget_bytes: int) -> None:
        if budget_bytes not in told:
            told.add(budget_bytes)
            log.info("%s", "\n".join(capacity(hello, config, budget_bytes)))

    return tell


def limits(config: Config, files: ModelFiles, spec: ModelSpec, hello: Hello) -> Limits:
    """The settings, and what was announced, as the scheduler reads them."""
    return Limits(
        num_blocks=hello.pool_cells // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_context=hello.max_context,
        block_bytes=hello.pool_bytes * BLOCK_SIZE // hello.pool_cells,
        state_bytes=hello.state_bytes,
        park_every=config.park_every,
        reuse=hello.reuse,
        draft_max=hello.draft,
        draft_cost=draft_cost(spec, on_card=hello.device != "cpu") if hello.draft else (0,),
        state_slots=hello.state_slots or None,
        eos_token_ids=files.eos_token_ids,
        exact=hello.exact,
        **policy_settings(config),
    )


def step_budget(config: Config, draft_max: int) -> int:
    """Limits.step_budget, before the limits are known: the most tokens that a step feeds."""
    return max(config.step_tokens, config.slots * (1 + draft_max))


def check_memory(config: Config, model: Model, num_blocks: int, state_slots: int, draft_max: int) -> None:
    """ConfigError when the pool and the states would not fit in what the machine has left beside the weights."""
    pool = num_blocks * block_bytes(model.spec, BLOCK_SIZE, model.kv_dtype)
    states = state_slots * state_bytes(model.spec, draft_max)
    available = psutil.virtual_memory().available
    if pool + states <= available:
        return
    text = f"--ctx {config.ctx}: beside {_mib(model.weight_bytes)} of weights the pool needs {_mib(pool)}"
    if states:
        text += f" and {state_slots} recurrent states {_mib(states)}"
    lower = "--ctx or --slots" if states else "--ctx"
    raise ConfigError(f"{text}, {_mib(available)} are available; lower {lower}")


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes // 2**20)} MiB"


if __name__ == "__main__":
    sys.exit(run("gpu_worker", main))
