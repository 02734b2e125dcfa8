"""What a worker sets up on a card before it serves: the model, the room for its pool, what is proven there."""

import gc
import logging
from dataclasses import dataclass
from math import prod

import torch
from msgspec import structs

from gpu_worker.card_image import CardPieces
from gpu_worker.card_runner import CardRunner
from gpu_worker.device import proven
from gpu_worker.device.cuda import Card
from gpu_worker.device.kv_cache import KvCache, block_bytes
from gpu_worker.device.ops import Ops
from gpu_worker.device.proven import Place
from gpu_worker.device.state_cache import state_bytes
from gpu_worker.device.step_buffers import Limits, StepBuffers
from gpu_worker.device.torch_on_card import TorchOnCard, prepare
from gpu_worker.engine import Engine
from gpu_worker.model import card_weights, exactness
from gpu_worker.model.card_model import CardModel
from gpu_worker.model.card_weights import Source
from gpu_worker.model.weights import Weights
from wire.config import Config, ConfigError
from wire.model_files import ModelFiles
from wire.model_spec import ModelSpec, tensor_shapes

BLOCK_SIZE = 16
OLDEST = 80  # compute capability 8.0: asynchronous copies and bf16 on tensor cores
MOST_BLOCKS = 1 << 21  # of a pool that takes all there is: each block has a place in the scheduler's lists
LESS = "--gpu-memory, --ctx, --slots or --step-tokens"  # what makes its share, or the workspace of a step, smaller

log = logging.getLogger("parkade")


@dataclass
class OpenCard:
    """A card that this process has, and what was free on it at first."""

    card: Card
    on_card: TorchOnCard
    free_bytes: int

    @property
    def device(self) -> str:
        return f"cuda:{self.card.index}"

    @property
    def taken_bytes(self) -> int:
        """What has been allocated since, by whomever."""
        return max(0, self.free_bytes - self.card.memory()[0])

    def close(self) -> None:
        """Give the card back: on the thread that opened it, and when nothing of it is in use."""
        gc.collect()  # events and functions that are part of a cycle must go while there is a context
        self.card.close()


def open_card(index: int) -> OpenCard:
    """ConfigError, in one line, if that cannot be."""
    prepare(index)
    card = Card(index)
    try:
        if card.architecture < OLDEST:
            found, needed = (f"{one / 10:.1f}" for one in (card.architecture, OLDEST))
            raise ConfigError(
                f"--device cuda:{index}: the kernels need a card of compute capability {needed}, a {card.name} has {found}; "
                "or choose --device cpu"
            )
        return OpenCard(card, TorchOnCard(card), card.memory()[0])
    except BaseException:
        card.close()
        raise


def card_of(device: str) -> OpenCard | None:
    """The card of a device; None for the CPU, which is also the choice of `auto` where there is no card that could be used."""
    if device == "cpu":
        return None
    if device != "auto":
        return open_card(int(device.removeprefix("cuda:")))
    try:
        return open_card(0)
    except ConfigError as error:
        why = str(error).removeprefix("--device cuda:0: ").partition(";")[0]
        log.info("computing on the CPU: %s", why)
        return None


def place_of(card: Card) -> Place:
    """What a proof on this card holds for."""
    return Place(card.name, str(torch.__version__), card.driver, proven.kernels_digest())


def engine_on(opened: OpenCard, config: Config, files: ModelFiles, draft_max: int, state_slots: int, step_rows: int) -> Engine:
    """Load the model onto the card and give the pool what is left of its share. `step_rows`: tokens that a step may feed.

    ConfigError, in one line, if the model cannot run there or does not fit; the card is still open then.
    """
    if config.dtype == "f32":
        raise ConfigError("--dtype f32: a card computes in bf16; use --dtype auto, or --device cpu")
    spec = files.spec if draft_max else structs.replace(files.spec, mtp=None)
    try:
        return engine_of(opened, config, spec, Weights(files), draft_max, state_slots, step_rows)
    except torch.OutOfMemoryError:
        free = opened.card.memory()[0]
        raise ConfigError(f"{_share(opened, config)}: its memory ran out with {_mib(free)} left; lower {LESS}") from None


def engine_of(
    opened: OpenCard, config: Config, spec: ModelSpec, weights: Source, draft_max: int, state_slots: int, step_rows: int
) -> Engine:
    """`engine_on` for weights from anywhere; torch.OutOfMemoryError where they do not fit after all."""
    card, on_card = opened.card, opened.on_card
    share = int(opened.free_bytes * config.gpu_memory)
    if (needed := weight_bytes(spec)) > share:
        raise ConfigError(f"{_share(opened, config)}: the weights alone need {_mib(needed)}, its share is {_mib(share)}")
    context = min(config.ctx or spec.max_context, spec.max_context)
    limits = step_limits(config, context, draft_max, step_rows)
    loaded = card_weights.load(spec, weights, on_card, positions=limits.table_stride * BLOCK_SIZE)
    buffers = StepBuffers(card, on_card, limits)
    exact, note = proven.look(place_of(card)) if config.exact == "on" else (False, "--exact off")
    model = CardModel(spec, loaded, card, on_card, buffers, exact)
    if exact:
        exact, note = exactness.prove(model, on_card)
        model.exact = exact  # from `bind` on
    other = opened.taken_bytes
    num_blocks = pool_blocks(opened, config, spec, draft_max, state_slots, share - other)
    kv = KvCache(spec, num_blocks, BLOCK_SIZE, model.kv_dtype, state_slots, draft_max, on_card.zeros)
    model.bind(kv)
    log.info(
        "%s %s: %s free at first, of which %s may be taken: weights %s, other %s, pool %s, states %s", opened.device, card.name,
        _mib(opened.free_bytes), _mib(share), _mib(model.weight_bytes), _mib(max(0, other - model.weight_bytes)), _mib(kv.bytes),
        _mib(kv.states.bytes if kv.states else 0),
    )  # fmt: skip
    ops = Ops(card, ["checksum"])
    runner = CardRunner(card, on_card, model)
    return Engine(
        device=f"{opened.device} {card.name}",
        spec=spec,
        dtype=model.dtype_name,
        weight_bytes=model.weight_bytes,
        kv=kv,
        exact=exact,
        exact_note=note,
        runner=runner,
        copies=lambda identity: CardPieces(card, kv, identity, ops, on_card.zeros),
        close=runner.close,
    )


def step_limits(config: Config, context: int, draft_max: int, step_rows: int) -> Limits:
    """The greatest step. If exactness may be proven, also that of the proof."""
    rows, sequences, blocks = step_rows, config.slots, -(-context // BLOCK_SIZE)
    if config.exact == "on":
        rows, sequences = max(rows, exactness.ROWS), max(sequences, exactness.OTHERS + 1)
        blocks = max(blocks, -(-(exactness.FAR + exactness.ROWS) // BLOCK_SIZE))
    return Limits(rows, sequences, draft_max, sequences, blocks)


def pool_blocks(opened: OpenCard, config: Config, spec: ModelSpec, draft_max: int, state_slots: int, room: int) -> int:
    """Blocks of the pool: those of `--ctx`, or as many as `room` bytes hold beside the states. ConfigError if that is too few."""
    each, states = block_bytes(spec, BLOCK_SIZE, torch.bfloat16), state_slots * state_bytes(spec, draft_max)
    fit = max(0, room - states) // each - 1  # one more is the scratch block
    wanted = config.ctx // BLOCK_SIZE or 1
    if wanted > fit:
        text = f"{_share(opened, config)}: {_mib(max(0, room))} are left for a pool of {_mib((wanted + 1) * each)}"
        if states:
            text += f" and {state_slots} recurrent states of {_mib(states)}"
        raise ConfigError(f"{text}; lower {'--ctx or --slots' if config.ctx else '--slots'}, or raise --gpu-memory")
    return wanted if config.ctx else min(fit, MOST_BLOCKS)


def weight_bytes(spec: ModelSpec) -> int:
    """Bytes of a model's matrices on a card."""
    return sum(2 * prod(shape) for shape in tensor_shapes(spec).values() if len(shape) == 2)


def _share(opened: OpenCard, config: Config) -> str:
    return f"--device {opened.device} with --gpu-memory {config.gpu_memory:g}"


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes // 2**20)} MiB"
