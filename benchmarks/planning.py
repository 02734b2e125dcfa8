"""What a plan costs: microseconds a step with few and many running sequences, with few and many waiting or parked ones.

`python -m benchmarks.planning`, with drafts `--draft 2`. The scheduler is driven as by the worker; the step itself is free.
Handling the step's results is timed apart. Every second row with drafts accepts one. Two tables:

- steady: nobody comes, nobody ends. The number waiting must not count.
- crowded: 1,000 parked by pressure or waiting, and in each step something changes that may let one of them in, though none fits:
  the dearest plan there is.
"""

import argparse
import statistics
import time

from gpu_worker.policy import preemption
from gpu_worker.policy.events import ParkRequested, ResumeRequested, Row, RowResult, StepDone, Submitted
from gpu_worker.policy.scheduler import Limits, Scheduler
from gpu_worker.policy.sequence import State
from wire.messages import Generate, Sampling, Submit

POLICIES = ("watermark", "lookahead", "ondemand", "off")
PROMPT_LEN = 64
GOAL_US = {4: 50.0, 1000: 3000.0}


def scheduler_with(policy: str, running: int, outside: int, steps: int, draft: int, seats: int = 0) -> Scheduler:
    """All prompts computed, everything below the line for `steps` more steps, `outside` more in the queue."""
    blocks = running * ((PROMPT_LEN + 2 * steps + draft) // 16 + 3) * 10 // 7
    fed = max(256, 16 * running)
    drafts = {"draft_max": draft, "draft_rows": running * (1 + draft), "draft_cost": (10,)}
    size = {"num_blocks": blocks, "block_size": 16, "max_context": blocks * 16}
    scheduler = Scheduler(Limits(**size, **drafts, slots=seats or running, step_tokens=fed, policy=policy))
    for number in range(running + outside):
        submit(scheduler, number)
    while len(scheduler.book.running) < running or any(seq.computed < PROMPT_LEN for seq in scheduler.book.running.values()):
        one_step(scheduler)
    return scheduler


def submit(scheduler: Scheduler, number: int, **fields: int) -> None:
    prompt = [number * 7 + index for index in range(PROMPT_LEN)]
    generate = Generate(f"r{number}", prompt, sampling=Sampling(seed=1), **fields)
    scheduler.handle(Submitted(Submit(generate, number)), 0.0)


def one_step(scheduler: Scheduler) -> tuple[float, float]:
    """Seconds of processor time for the plan, and for its results: what else runs on the machine does not count."""
    began = time.thread_time()
    plan = scheduler.plan(0.0)
    planned = time.thread_time()
    done = StepDone([RowResult(row.request_id, _tokens(row, at)) for at, row in enumerate(plan.rows)], plan.epoch)
    before = time.thread_time()
    scheduler.handle(done, 0.0)
    return planned - began, time.thread_time() - before


def _tokens(row: Row, at: int) -> list[int]:
    if not row.samples:
        return []
    return [7, 7] if row.draft and at % 2 else [7]


def crowded(policy: str, running: int, parked: int, classes: int) -> Scheduler:
    """`running`, and `parked` that were parked and may come back, in `classes` classes. Seats are free, and two blocks, in which
    none of them fits."""
    scheduler = scheduler_with(policy, running, 0, 200, 0, seats=running + parked)
    book = scheduler.book
    for number in range(10_000, 10_000 + parked):
        submit(scheduler, number, priority=number % classes)
        seq = scheduler.sequences[f"r{number}"]
        book.waiting.remove(seq)
        seq.state = State.PARKED
        seq.seat = number
        book.parked[seq.request_id] = seq
    steps, line = scheduler.policy.enter_ahead, scheduler.policy.enter_line
    growth = sum(preemption.missing(seq, book.pool, steps) for seq in book.running.values())
    book.pool.take(line - book.pool.used - growth - 2)  # somebody else's
    return scheduler


def table_steady(options: argparse.Namespace) -> bool:
    print("steady")
    steps, good = options.steps, True
    head(f"{'policy':<10} {'running':>8} {'waiting':>8}")
    for policy in POLICIES:
        for running, waiting in ((4, 0), (4, 10), (4, 10_000), (1000, 0), (1000, 10), (1000, 10_000)):
            scheduler = scheduler_with(policy, running, waiting, steps, options.draft)
            count = steps if running < 100 else steps // 4
            samples = [one_step(scheduler) for _ in range(count)]
            assert len(scheduler.book.running) == running and len(scheduler.book.waiting) == waiting
            good &= line(f"{policy:<10} {running:>8} {waiting:>8,}", samples, GOAL_US[running])
    return good


def table_crowded(options: argparse.Namespace) -> bool:
    print("crowded: something changes in each step, and none of the parked fits")
    good = True
    head(f"{'policy':<10} {'running':>8} {'parked':>8} {'classes':>8}")
    for policy in POLICIES[:-1]:
        for running, parked, classes in ((4, 1000, 1), (1000, 10, 1), (1000, 1000, 1), (1000, 1000, 3)):
            scheduler = crowded(policy, running, parked, classes)
            samples = []
            for _ in range(options.steps // 8):
                scheduler.handle(ParkRequested("r10001"), 0.0)
                scheduler.handle(ResumeRequested("r10001"), 0.0)
                samples.append(one_step(scheduler))
            assert len(scheduler.book.running) == running and len(scheduler.book.parked) == parked
            good &= line(f"{policy:<10} {running:>8} {parked:>8,} {classes:>8}", samples, GOAL_US[1000])
    return good


def head(left: str) -> None:
    print(f"{left} | {'plan us: median':>16} {'p90':>8} | {'results us: median':>18} {'p90':>8} | goal")


def line(left: str, samples: list[tuple[float, float]], goal_us: float) -> bool:
    plan_us, result_us = ([1e6 * value for value in column] for column in zip(*samples))
    median = statistics.median(plan_us)
    print(
        f"{left} | {median:>16.1f} {_p90(plan_us):>8.1f} | {statistics.median(result_us):>18.1f} {_p90(result_us):>8.1f} | "
        f"{goal_us:,.0f} us: {'holds' if median <= goal_us else 'MISSED'}"
    )
    return median <= goal_us


def _p90(values: list[float]) -> float:
    return statistics.quantiles(values, n=10)[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--draft", type=int, default=0)
    options = parser.parse_args()
    good = table_steady(options)
    return 0 if table_crowded(options) and good else 1


if __name__ == "__main__":
    raise SystemExit(main())
