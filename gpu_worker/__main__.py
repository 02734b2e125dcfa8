"""`python -m gpu_worker`: loads the model, proves what it promises, then runs the loop."""

import os
import secrets
import signal
import sys
import time

import psutil
import torch
import zmq

from gpu_worker.device.kv_cache import KvCache, block_bytes
from gpu_worker.model.exactness import prove
from gpu_worker.model.load import Model, load_model
from gpu_worker.parking import Parking
from gpu_worker.policy.scheduler import Limits, Scheduler
from gpu_worker.runner import Runner
from gpu_worker.worker import Worker
from wire import sockets
from wire.config import Config, ConfigError, devices, size_bytes
from wire.messages import Hello
from wire.model_files import ModelFiles, find_model
from wire.service import log, notify, run

BLOCK_SIZE = 16


def main(config: Config) -> int:
    """Everything that can fail for a reason the user must change fails here, before the socket opens."""
    name = os.environ.get("PARKADE_WORKER_NAME", "cpu0")
    files = find_model(config.model)
    num_blocks = config.ctx // BLOCK_SIZE
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // len(devices(config.device))))
    model = load_model(files, config.dtype, exact=config.exact == "on")
    check_memory(config, model, num_blocks)
    kv = KvCache(model.spec, num_blocks, BLOCK_SIZE, model.kv_dtype)
    exact, exact_note = prove(model) if config.exact == "on" else (False, "--exact off")
    log.info(
        "%s as %s: weights %d MiB, pool %d cells in %d MiB, exact %s%s",
        files.name, model.dtype_name, model.weight_bytes >> 20, num_blocks * BLOCK_SIZE, kv.bytes >> 20,
        "yes" if exact else "no", f" ({exact_note})" if exact_note else "",
    )  # fmt: skip
    max_context = min(num_blocks * BLOCK_SIZE, model.spec.max_context)
    hello = Hello(
        name=name, pid=os.getpid(), model=files.name, device="cpu", dtype=model.dtype_name, pool_cells=num_blocks * BLOCK_SIZE,
        block_size=BLOCK_SIZE, slots=config.slots, max_context=max_context, exact=exact, exact_note=exact_note,
        weight_bytes=model.weight_bytes, pool_bytes=kv.bytes, vocab=model.spec.vocab,
    )  # fmt: skip
    identity = f"{name}-{os.getpid()}-{secrets.token_hex(4)}"
    scheduler = Scheduler(limits(config, files, num_blocks, max_context, exact))
    parking = Parking(kv, sockets.hostcache_path(config.run_dir), identity, time.monotonic)
    socket = sockets.dealer_socket(zmq.Context.instance(), sockets.worker_address(config.run_dir), identity.encode())
    worker = Worker(hello, socket, scheduler, Runner(model, kv), parking)

    def stop(_signal: int, _frame: object) -> None:
        worker.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for `parkade serve`, which tells us
    notify("READY=1")
    worker.run()
    return 0


def limits(config: Config, files: ModelFiles, num_blocks: int, max_context: int, exact: bool) -> Limits:
    """The settings as the scheduler reads them."""
    return Limits(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        slots=config.slots,
        step_tokens=config.step_tokens,
        max_context=max_context,
        high=config.high,
        low=config.low,
        policy=config.policy,
        resume_order=config.resume_order,
        park_every=config.park_every,
        reuse=not config.no_reuse,
        eos_token_ids=files.eos_token_ids,
        exact=exact,
        save=config.park_ram == "auto" or size_bytes(config.park_ram) > 0,
    )


def check_memory(config: Config, model: Model, num_blocks: int) -> None:
    """ConfigError when the pool would not fit in what the machine has left."""
    need = num_blocks * block_bytes(model.spec, BLOCK_SIZE, model.kv_dtype)
    available = psutil.virtual_memory().available
    if need > available:
        text = f"--ctx {config.ctx}: the pool needs {need >> 20} MiB, {available >> 20} MiB are available; lower --ctx"
        raise ConfigError(text)


if __name__ == "__main__":
    sys.exit(run("gpu_worker", main))
