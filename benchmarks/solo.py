"""Step times of one model without processes around it: decode of 1, 2, 4, 8 rows and a prompt, for each weight format.

    python -m benchmarks.solo [--model smollm2] [--context 500] [--dtypes auto,bf16,f32] [--torch]

The bound is what the step must read (weights, and the cells of every row) at the measured bandwidth of plain reading.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model.batch import Batch
from gpu_worker.model.load import Model, available_processors, load_model
from wire.model_files import find_model

BLOCK = 16


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
    args = parser.parse_args()
    files = find_model(args.model)
    bandwidth = read_bandwidth()
    print(f"{args.threads} threads, context {args.context}, reading one core: {bandwidth / 1e9:.1f} GB/s")
    print("weights  backend step            median ms    p10..p90 ms    tok/s  bytes MB  bound ms")
    for dtype in args.dtypes.split(","):
        model = load_model(files, dtype, threads=args.threads, native=not args.torch)
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
    kv = KvCache(model.spec, rows * each, BLOCK, model.kv_dtype)
    for block in kv.tensor:
        block.normal_(std=0.5)
    order = torch.randperm(rows * each).tolist()
    batch = Batch.of([([1000 + i], context, order[i * each : (i + 1) * each]) for i in range(rows)])
    cells = rows * context * kv.block_bytes / BLOCK
    return lambda: finish(model, batch, kv), model.weight_bytes + cells


def prompt(model: Model, length: int, chunk: int) -> Callable[[], None]:
    kv = KvCache(model.spec, length // BLOCK + 1, BLOCK, model.kv_dtype)
    blocks = list(range(kv.num_blocks))
    tokens = [(7919 * i) % model.spec.vocab for i in range(length)]
    batches = [Batch.of([(tokens[at : at + chunk], at, blocks)]) for at in range(0, length, chunk)]
    return lambda: [finish(model, batch, kv) for batch in batches]


def finish(model: Model, batch: Batch, kv: KvCache) -> None:
    model.logits(model.forward(batch, kv)).numpy().argmax(1)


def measure(run: Callable[[], object], repeat: int) -> list[float]:
    times = []
    for _ in range(repeat + 2):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])


def read_bandwidth() -> float:
    """Bytes a second that one core reads from memory that is larger than the caches."""
    data = np.ones(32 << 20, dtype=np.float64)
    times = measure(lambda: data.max(), 5)
    return data.nbytes / statistics.median(times)


if __name__ == "__main__":
    main()
