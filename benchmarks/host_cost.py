"""What the host does for one decode step on a card, outside torch and the driver: microseconds by number of sequences.

`python -m benchmarks.host_cost` where there is a card, `python -m tests.cuda.fake benchmarks.host_cost` with a fake one. A model
of 32 small layers (8 with attention, 24 recurrent) and a head that drafts. Calls of the driver and of torch return at once, so
what is left is Parkade's own. A step whose shape has come before is a graph; without graphs its calls are made one by one; the
first step of a shape also prepares them. Beside them the whole step as a graph, on whatever driver there is (a fake one that does
not run kernels, say).
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from msgspec import structs
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gpu_worker.card_runner import CardRunner
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.step_buffers import Limits, StepBuffers
from gpu_worker.device.torch_on_card import TorchOnCard
from gpu_worker.model import card_weights
from gpu_worker.model.card_model import CardModel
from gpu_worker.on_card import OpenCard, open_card
from gpu_worker.policy.events import Plan, Row
from tools.gpu_check.random_model import RandomSource, tiny
from wire.messages import Sampling
from wire.model_spec import ModelSpec

LAYERS, CONTEXT, PROMPT = 32, 4096, 100
COUNTS = (1, 8, 32)
GOAL_US = {"graph": 150.0, "calls": 3000.0}  # of 32 sequences


@dataclass
class Bench:
    """A model on a card, and sequences that take one token a step."""

    opened: OpenCard
    model: CardModel
    runner: CardRunner
    rows: list[Row]

    def step(self, draft: int) -> None:
        rows = []
        for row in self.rows:
            row.tokens.append(5)
            at = len(row.tokens) - 1
            if at // 16 >= len(row.blocks):
                row.blocks.append(row.blocks[-1])
            rows.append(structs.replace(row, start=at, draft=draft))
        self.rows = rows
        self.runner.step(Plan([], rows, 1))


def make(opened: OpenCard, sequences: int, layers: int = LAYERS) -> Bench:
    """As a worker makes it. Sequence i has state slot i and blocks of its own."""
    card, on_card, spec = opened.card, opened.on_card, spec_of(layers)
    for name in ("zeros", "upload"):  # tensors of the fake card look at each use of them, which is none of our cost
        setattr(on_card, name, plain(getattr(type(on_card), name), on_card))
    limits = Limits(256, sequences, 2, sequences, CONTEXT // 16)
    buffers = StepBuffers(card, on_card, limits)
    model = CardModel(spec, card_weights.load(spec, RandomSource(spec), on_card, CONTEXT), card, on_card, buffers)
    kv = KvCache(spec, 4 * sequences, 16, model.kv_dtype, sequences, 2, on_card.zeros)
    model.bind(kv)
    runner = CardRunner(card, on_card, model)
    sampling = [Sampling(temperature=0.8, top_p=0.9, seed=i) for i in range(sequences)]
    rows = [
        Row(
            f"r{i}", [3] * PROMPT, 0, 1, [4 * i + j % 4 for j in range(PROMPT // 16 + 1)], True, sampling[i], PROMPT, state_slot=i
        )
        for i in range(sequences)
    ]
    return Bench(opened, model, runner, rows)


def plain(make: Callable[..., Tensor], on_card: TorchOnCard) -> Callable[..., Tensor]:
    """`make` with torch's own tensors."""
    return lambda *arguments: make(on_card, *arguments).as_subclass(Tensor)


def spec_of(layers: int) -> ModelSpec:
    """Every fourth layer has attention."""
    spec = tiny(CONTEXT)
    assert spec.delta is not None
    recurrent = tuple(i for i in range(layers) if i % 4 != 3)
    return structs.replace(spec, num_layers=layers, delta=structs.replace(spec.delta, layers=recurrent))


def silence(bench: Bench) -> None:
    """From now on calls of torch and of the driver return at once."""

    def nothing(*_arguments: object) -> None:
        pass

    @contextlib.contextmanager
    def captured():
        graphs: list[SimpleNamespace] = []
        yield graphs
        graphs.append(SimpleNamespace(launch=nothing, close=nothing))

    card, on_card, model = bench.opened.card, bench.opened.on_card, bench.model
    bench.runner.close()
    for name in ("to_card", "to_host"):
        setattr(card, name, nothing)
    card.capture = captured
    on_card.linear, on_card.streaming = nothing, contextlib.nullcontext
    silent = SimpleNamespace(_launch_kernel=nothing)
    model._ops._functions = dict.fromkeys(model._ops._functions, silent)
    bench.runner._ended = SimpleNamespace(record=nothing, synchronize=nothing)
    model.bind(model._kv)  # what was prepared before calls the driver


def seconds(step: Callable[[], None], steps: int, clock: Callable[[], float]) -> float:
    """The median of one step."""
    times = []
    for _ in range(steps):
        started = clock()
        step()
        times.append(clock() - started)
    return statistics.median(times)


def measure(bench: Bench, draft: int, steps: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Microseconds of a step: as a "graph", by its "calls", and the "first" of its shape."""

    def step() -> None:
        bench.step(draft)

    seconds(step, 3, clock)  # prepared, captured
    graph = seconds(step, steps, clock)
    graphs = bench.runner._graphs
    bench.runner._graphs = SimpleNamespace(run=lambda shape, enqueue: enqueue(shape), close=lambda: None)
    seconds(step, 3, clock)
    calls = seconds(step, steps, clock)

    def prepare() -> None:
        bench.model._calls.clear()
        step()

    first = seconds(prepare, max(3, steps // 10), clock)
    bench.runner._graphs = graphs
    return {"graph": 1e6 * graph, "calls": 1e6 * calls, "first": 1e6 * first}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_cost", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="that each figure is the median of")
    steps = parser.parse_args().steps
    table = Table(title=f"host microseconds of a decode step, {LAYERS} layers")
    for name in ("sequences", "drafts", "as a graph", "call by call", "first of a shape", "whole, as a graph"):
        table.add_column(name, justify="right")
    opened = open_card(0)
    try:
        for count in COUNTS:
            for draft in (0, 2):
                bench = make(opened, count)
                whole = measure(bench, draft, max(3, steps // 10))
                attributes = dict(vars(opened.card)), dict(vars(opened.on_card))
                silence(bench)
                host = measure(bench, draft, steps)
                bench.runner.close()
                for one, before in zip((opened.card, opened.on_card), attributes, strict=True):
                    vars(one).clear()
                    vars(one).update(before)
                figures = (host["graph"], host["calls"], host["first"], whole["graph"])
                table.add_row(str(count), str(draft), *(f"{figure:.0f}" for figure in figures))
        Console().print(table)
        print(
            f"on {opened.card.name}; goals for {COUNTS[-1]} sequences: {GOAL_US['graph']:g} as a graph, {GOAL_US['calls']:g} else"
        )
    finally:
        bench = None
        opened.close()


if __name__ == "__main__":
    main()
