"""What a plan costs: microseconds a step with few and many running sequences, and with few and many waiting ones.

`python -m benchmarks.planning`, with drafts `--draft 2`. The scheduler is driven as by the worker; the step itself is free.
Handling the step's results is timed apart. Every second row with drafts accepts one.
"""

import argparse
import statistics
import time

from gpu_worker.policy.events import Row, RowResult, StepDone, Submitted
from gpu_worker.policy.scheduler import Limits, Scheduler
from wire.messages import Generate, Sampling, Submit

PROMPT_LEN = 64
GOAL_US = {4: 50.0, 1000: 3000.0}


def scheduler_with(running: int, waiting: int, steps: int, draft: int) -> Scheduler:
    """All prompts computed, everything below the watermark for `steps` more steps, `waiting` more in the queue."""
    blocks = running * ((PROMPT_LEN + 2 * steps + draft) // 16 + 3) * 10 // 7
    fed = max(256, 16 * running)
    drafts = {"draft_max": draft, "draft_rows": running * (1 + draft), "draft_cost": (10,)}
    scheduler = Scheduler(
        Limits(num_blocks=blocks, block_size=16, slots=running, max_context=blocks * 16, step_tokens=fed, **drafts)
    )
    for number in range(running + waiting):
        prompt = [number * 7 + index for index in range(PROMPT_LEN)]
        scheduler.handle(Submitted(Submit(Generate(f"r{number}", prompt, sampling=Sampling(seed=1)), number)), 0.0)
    while len(scheduler.book.running) < running or any(seq.computed < PROMPT_LEN for seq in scheduler.book.running.values()):
        one_step(scheduler)
    return scheduler


def one_step(scheduler: Scheduler) -> tuple[float, float]:
    """Seconds for the plan, and for its results."""
    began = time.perf_counter()
    plan = scheduler.plan(0.0)
    planned = time.perf_counter()
    done = StepDone([RowResult(row.request_id, _tokens(row, at)) for at, row in enumerate(plan.rows)], plan.epoch)
    before = time.perf_counter()
    scheduler.handle(done, 0.0)
    return planned - began, time.perf_counter() - before


def _tokens(row: Row, at: int) -> list[int]:
    if not row.samples:
        return []
    return [7, 7] if row.draft and at % 2 else [7]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--draft", type=int, default=0)
    options = parser.parse_args()
    steps = options.steps
    print(f"{'running':>8} {'waiting':>8} | {'plan us: median':>16} {'p90':>8} | {'results us: median':>18} {'p90':>8} | goal")
    for running, waiting in ((4, 0), (4, 10), (4, 10_000), (1000, 0), (1000, 10), (1000, 10_000)):
        scheduler = scheduler_with(running, waiting, steps, options.draft)
        count = steps if running < 100 else steps // 4
        plans, results = zip(*(one_step(scheduler) for _ in range(count)))
        assert len(scheduler.book.running) == running and len(scheduler.book.waiting) == waiting
        plan_us = [1e6 * value for value in plans]
        result_us = [1e6 * value for value in results]
        median = statistics.median(plan_us)
        verdict = "holds" if median <= GOAL_US[running] else "MISSED"
        print(
            f"{running:>8} {waiting:>8,} | {median:>16.1f} {_p90(plan_us):>8.1f} | "
            f"{statistics.median(result_us):>18.1f} {_p90(result_us):>8.1f} | {GOAL_US[running]:,.0f} us: {verdict}"
        )


def _p90(values: list[float]) -> float:
    return statistics.quantiles(values, n=10)[-1]


if __name__ == "__main__":
    main()
