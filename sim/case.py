"""Case: everything random about one schedule, drawn from its seed before it starts, so that a seed is a schedule."""

import random

from msgspec import Struct

from gpu_worker.policy.limits import Limits
from sim.device import VOCAB
from sim.hostcache import BLOCK_BYTES, STATE_BYTES
from wire.messages import Generate, Sampling


class Case(Struct, frozen=True):
    """Rates are per tick; delays in ticks; `tick_s` is virtual seconds."""

    seed: int
    limits: Limits
    budget_bytes: int
    arrivals: list[tuple[int, Generate]]  # (tick, request), sorted
    tick_s: float
    answer_delay: int
    copy_delay: int
    cache_crashes: float
    worker_crashes: float
    cancels: float
    holds: float
    corrupt_loads: float
    lost_steps: float
    late_events: float  # share of ticks in which events arrive while a step runs


def draw_case(seed: int) -> Case:
    """The schedule of this seed."""
    rng = random.Random(seed)
    limits = _limits(rng)
    recurrent = limits.state_slots is not None
    crashes = rng.random() < 0.5
    return Case(
        seed=seed,
        limits=limits,
        budget_bytes=rng.choice([0, 4, 10, 25, 1000]) * BLOCK_BYTES,
        arrivals=_arrivals(rng, limits),
        tick_s=rng.choice([0.02, 0.02, 2.0]),
        answer_delay=rng.randint(0, 3),
        copy_delay=rng.randint(0, 6),
        cache_crashes=rng.choice([0.0, 0.01, 0.03]) if crashes else 0.0,
        worker_crashes=rng.choice([0.0, 0.005, 0.01]) if crashes else 0.0,
        cancels=rng.choice([0.0, 0.0, 0.003, 0.02]),
        holds=rng.choice([0.0, 0.0, 0.02, 0.1]),
        corrupt_loads=rng.choice([0.0, 0.0, 0.1]),
        # A step that was run cannot be fed again where the device has gone on: a recurrent state has taken its tokens in, and a
        # head would start from the hidden row of a later cell. The worker never loses one: a step that fails ends the process.
        lost_steps=0.0 if recurrent or limits.draft_max else rng.choice([0.0, 0.0, 0.02]),
        late_events=rng.choice([0.0, 0.5]),
    )


def _limits(rng: random.Random) -> Limits:
    block_size = rng.choice([1, 2, 4, 4, 4, 8])
    num_blocks = rng.randint(40, 120) // block_size
    pool = num_blocks * block_size
    slots = rng.choice([1, 2, 3, 4, 6, 8])
    recurrent = rng.random() < 0.35
    return Limits(
        num_blocks=num_blocks,
        block_size=block_size,
        slots=slots,
        step_tokens=rng.choice([4, 8, 64]),
        max_context=rng.choice([pool, pool, 10 * pool, pool // 2]),
        high=rng.choice([70, 94, 94, 100]),
        low=rng.choice([40, 60, 80]),
        policy=rng.choice(["watermark"] * 8 + ["lookahead"] * 5 + ["ondemand"] * 5 + ["off"]),
        lookahead_steps=rng.choice([1, 3, 8]),
        protect_after=rng.choice([0, 3, 3]),
        max_park_s=rng.choice([0.0, 0.0, 1.0, 30.0]),
        resume_order=rng.choice(["most-parked", "head"]),
        park_every=rng.choice([0] * 8 + [3, 7]),
        reuse=not recurrent and rng.random() < 0.75,
        draft_max=rng.choice([0, 0, 1, 3, 8]),
        draft_rows=rng.choice([1, 6, 64]),
        draft_cost=rng.choice([(0,), (20,), (20, 40, 60), (80,)]),
        state_slots=rng.choice([1, slots, slots + 1, slots + 2]) if recurrent else None,
        eos_token_ids=(rng.randrange(VOCAB),),
        block_bytes=BLOCK_BYTES,
        state_bytes=STATE_BYTES if recurrent else 0,
        park_mode=rng.choice(["save"] * 6 + ["auto"] * 3 + ["recompute"]),
    )


def _arrivals(rng: random.Random, limits: Limits) -> list[tuple[int, Generate]]:
    """Requests with shared beginnings, siblings, classes, too long prompts and requests for more than fits."""
    count = rng.choice([rng.randint(3, 14), rng.randint(3, 14), rng.randint(10, 30)])
    span = rng.choice([1, 30, 150])
    least, most = rng.choice([(1, 20), (1, limits.pool_cells), (limits.pool_cells // 3, limits.pool_cells)])
    no_end = rng.choice([0.5, 1.0])
    classes = rng.choice([[0], [0], [0, 1], [0, 3], [-1, 0, 5], [-100, 0, 0, 10, 100]])
    longest = limits.pool_cells * rng.choice([5, 5, 10, 20, 60]) // 100
    shared = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest + 1))]
    requests: list[Generate] = []
    for number in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest + 1))]
        prompt = [*shared[: rng.randint(0, len(shared))], *own] if rng.random() < 0.4 else own
        leader = ""
        if requests and rng.random() < 0.2:
            first = rng.choice(requests)
            leader, prompt = first.request_id, first.prompt_token_ids
        max_tokens = rng.randint(least, most) if rng.random() < 0.9 else 10**6
        requests.append(
            Generate(
                request_id=f"r{number}",
                prompt_token_ids=prompt,
                max_tokens=max_tokens,
                min_tokens=rng.choice([0, 0, rng.randint(0, 20)]),
                sampling=Sampling(seed=number),
                stop_token_ids=[rng.randrange(VOCAB)] if rng.random() > no_end else [],
                ignore_eos=rng.random() < no_end,
                prompt_logprobs=0 if rng.random() < 0.3 else None,
                priority=rng.choice(classes),
                sibling_of=leader,
            )
        )
    ticks = sorted(rng.randint(1, span) for _ in requests)
    return list(zip(ticks, requests))
