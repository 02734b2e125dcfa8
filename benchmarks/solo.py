"""Step times of one model without processes around it: decode of 1, 2, 4, 8 rows and a prompt, for each weight format.

    python -m benchmarks.solo [--model smollm2] [--context 500] [--dtypes auto,bf16,f32] [--torch] [--draft]

The bound is what the step must read (weights, cells and states of every row) at the measured bandwidth of plain reading. With
--draft instead: a step of 1 to 4 rows of one sequence (a token and the drafts that are verified), in turns, and one pass of the
head with its logits.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model.batch import Batch
from gpu_worker.model.load import Model, available_processors, load_model
from wire.model_files import find_model

BLOCK = 16
MAX_DRAFTS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=25)
    parser.add_argument("--threads", type=int, default=available_processors())
    parser.add_argument("--dtypes", default="auto,bf16,f32")
    parser.add_argument("--torch", action="store_true", help="without the native library")
    parser.add_argument("--draft", action="store_true", help="what drafts cost")
    args = parser.parse_args()
    files = find_model(args.model)
    bandwidth = read_bandwidth()
    print(f"{args.threads} threads, context {args.context}, reading one core: {bandwidth / 1e9:.1f} GB/s")
    print("weights  backend step            median ms    p10..p90 ms    tok/s  bytes MB  bound ms")
    for dtype in args.dtypes.split(","):
        model = load_model(files, dtype, threads=args.threads, native=not args.torch)
        if args.draft:
            drafts(model, args.context, args.repeat, bandwidth * args.threads)
            continue
        for rows in (1, 2, 4, 8):
            step, nbytes = decode(model, rows, args.context)
            line(model, f"{rows} decode", measure(step, args.repeat), rows, nbytes, bandwidth * args.threads)
        times = measure(prompt(model, args.prompt, args.chunk), max(3, args.repeat // 5))
        line(model, f"prompt {args.prompt}", times, args.prompt, 0, 0)


def line(model: Model, what: str, times: list[float], tokens: int, nbytes: float, bandwidth: float) -> None:
    low, middle, high = (1e3 * times[int(q * (len(times) - 1))] for q in (0.1, 0.5, 0.9))
    bound = f"{nbytes / 1e6:9.0f} {1e3 * nbytes / bandwidth:9.2f}" if nbytes else f"{'':9} {'':9}"
    spread = f"{low:6.2f}..{high:6.2f}"
    print(
        f"{model.dtype_name:8} {model.backend:7} {what:14} {middle:10.2f} {spread:>14} {1e3 * tokens / middle:8.0f} {bound}",
        flush=True,
    )


def decode(model: Model, rows: int, context: int) -> tuple[Callable[[], None], float]:
    """A step of `rows` sequences with `context` cells each, and the bytes that it reads."""
    each = context // BLOCK + 1
    kv = filled(model, rows * each, context, rows)
    order = torch.randperm(rows * each).tolist()
    batch = Batch.of([([1000 + i], context, order[i * each : (i + 1) * each]) for i in range(rows)])
    cells = rows * context * kv.block_bytes / BLOCK
    return lambda: finish(model, batch, kv), model.weight_bytes + cells + rows * kv.state_bytes


def drafts(model: Model, context: int, repeat: int, bandwidth: float) -> None:
    """Lines for 1 to 4 rows of one sequence, and for a pass of the head where there is one."""
    blocks = (context + MAX_DRAFTS) // BLOCK + 1
    kv = filled(model, blocks, context, 1)
    table = torch.randperm(blocks).tolist()
    cell = kv.block_bytes / BLOCK
    names, steps, sizes = [], [], []
    for rows in range(1, MAX_DRAFTS + 2):
        batch = Batch.of([(list(range(1000, 1000 + rows)), context, table)], last_only=False)
        batch = replace(batch, known=torch.tensor([context + 1], dtype=torch.int32))
        names.append((f"{rows} of one", rows))
        steps.append(lambda batch=batch: finish(model, batch, kv))
        sizes.append(model.weight_bytes + context * cell + kv.state_bytes)
    if model.spec.mtp and kv.hidden is not None:
        token, at, tables = (
            torch.tensor([1000]),
            torch.tensor([context], dtype=torch.int32),
            torch.tensor([table], dtype=torch.int32),
        )
        hidden = kv.hidden[:1].clone()
        names += [("draft", 1), ("its logits", 1)]
        steps.append(lambda: model.draft(token, at, hidden, tables, kv))
        steps.append(lambda: model.draft_logits(hidden).numpy().argmax(1))
        sizes += [0, 0]
    for (name, tokens), times, nbytes in zip(names, in_turns(steps, repeat), sizes):
        line(model, name, times, tokens, nbytes, bandwidth)


def filled(model: Model, blocks: int, context: int, slots: int) -> KvCache:
    """Cells and states as if `context` tokens of each of some sequences had been computed."""
    kv = KvCache(model.spec, blocks, BLOCK, model.kv_dtype, state_slots=slots, draft_max=MAX_DRAFTS)
    for block in kv.tensor:
        block.normal_(std=0.5)
    if kv.hidden is not None:
        kv.hidden.normal_()
    if kv.states:
        for part in (kv.states.state, kv.states.log_k, kv.states.log_d, kv.states.conv):
            part.normal_(std=0.1)
        kv.states.log_g.fill_(-0.1)
        kv.states.folded.fill_(context // 16 * 16)
    return kv


def prompt(model: Model, length: int, chunk: int) -> Callable[[], None]:
    kv = KvCache(model.spec, length // BLOCK + 1, BLOCK, model.kv_dtype, state_slots=1)
    blocks = list(range(kv.num_blocks))
    tokens = [(7919 * i) % model.spec.vocab for i in range(length)]
    batches = [Batch.of([(tokens[at : at + chunk], at, blocks)]) for at in range(0, length, chunk)]
    return lambda: [finish(model, batch, kv) for batch in batches]


def finish(model: Model, batch: Batch, kv: KvCache) -> None:
    model.logits(model.forward(batch, kv)).numpy().argmax(1)


def measure(run: Callable[[], object], repeat: int) -> list[float]:
    return in_turns([run], repeat)[0]


def in_turns(runs: list[Callable[[], object]], repeat: int) -> list[list[float]]:
    """Sorted times of each; one after another, so that all meet the same machine."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeat + 2):
        for run, own in zip(runs, times):
            start = time.perf_counter()
            run()
            own.append(time.perf_counter() - start)
    return [sorted(own[2:]) for own in times]


def read_bandwidth() -> float:
    """Bytes a second that one core reads from memory that is larger than the caches."""
    data = np.ones(32 << 20, dtype=np.float64)
    times = measure(lambda: data.max(), 5)
    return data.nbytes / statistics.median(times)


if __name__ == "__main__":
    main()
