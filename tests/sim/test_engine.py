"""The engine: jumps change nothing, and what happens to a trace is what the real scheduler does with it."""

import random
import re
import tracemalloc
from pathlib import Path

import pytest
from msgspec.structs import asdict, replace

from gpu_worker.policy.events import Reserve, Save, Saved
from sim.copying import HostCache
from sim.costs import CostModel
from sim.engine import End, Engine, limits_of, simulate
from sim.figures import Figures
from sim.timeline import Timeline
from sim.trace import Request

ROOT = Path(__file__).parent.parent.parent
POLICIES = ("watermark", "lookahead", "ondemand", "off")
PAGE = 4096
COSTS = CostModel(
    name="test",
    where="nowhere",
    rows_s=((1, 0.010), (9, 0.018), (265, 0.200)),
    cell_bytes=PAGE,
    block_size=4,
    sequence_s=0.001,
    decode_cell_s=1e-5,
    prefill_cell_s=1e-6,
    save_bytes_per_s=2e8,
    load_bytes_per_s=4e8,
)
# relative, absolute: two bins of the histogram; within a jump the pool is taken to fill evenly, not block by block
_BLOCKS = (0.01, 5 * COSTS.block_size)
INEXACT = {"p99_gap_s": (0.021, 0.0), "idle_cells": _BLOCKS, "busy_cells": _BLOCKS}


def play(trace: list[Request], limits, costs: CostModel, park_ram: int, jump: bool) -> tuple[Figures, dict[str, End]]:
    ends: dict[str, End] = {}
    figures = simulate(trace, limits, costs, park_ram, jump=jump, on_end=lambda end: ends.setdefault(end.request_id, end))
    assert len(ends) == len(trace), "every request ends"
    return figures, ends


def drawn_trace(rng: random.Random, pool: int) -> list[Request]:
    trace: list[Request] = []
    at_s = 0.0
    classes = rng.choice([[0], [0], [0, 1], [0, 5]])
    for number in range(rng.randint(5, 25)):
        at_s += rng.expovariate(rng.choice([0.5, 5.0]))
        prompt, output = rng.randint(1, pool // 3), rng.randint(1, pool // 2)
        after, before = "", None
        if trace and rng.random() < 0.3:
            before = rng.choice(trace)
            if before.cells + prompt < pool:
                after, prompt = before.id, before.cells + rng.randint(1, prompt)
        trace.append(
            Request(f"r{number}", prompt, output, at_s, rng.choice(classes), after=after, think_s=rng.choice([0.0, 0.3, 4.0]))
        )
    return trace


def drawn_costs(rng: random.Random) -> CostModel:
    slow = rng.choice([1, 1, 20])  # waits then are long enough for classes to be promoted
    rows_s = tuple((rows, slow * seconds) for rows, seconds in COSTS.rows_s)
    costs = replace(COSTS, rows_s=rows_s, copy_overlaps=rng.random() < 0.5, state_bytes=rng.choice([0, 0, 3 * PAGE]))
    return costs.with_free_parks() if rng.random() < 0.2 else costs


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_jumping_changes_nothing(policy, seed):
    jump_and_compare(policy, seed)


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_jumping_changes_nothing_in_many_traces(policy):
    for seed in range(100, 140):
        jump_and_compare(policy, seed)


def test_a_prompt_that_is_computed_beside_a_jump_counts_in_what_the_policy_looks_ahead():
    """A long prompt, one token a step, beside a decode that grows until both do not fit for eight steps more."""
    limits = limits_of(COSTS, ctx=600, slots=2, step_tokens=2, policy="lookahead", reuse=False)
    trace = [Request("decode", 4, 400), Request("prompt", 303, 30, arrival_s=0.05)]
    (slow, _), (fast, _) = (play(trace, limits, COSTS, 1 << 30, jump) for jump in (False, True))
    assert slow.parks == fast.parks == {"pressure": 1}
    assert fast.plans < 60 < slow.plans
    assert fast.longest_wait_s == pytest.approx(slow.longest_wait_s)


def jump_and_compare(policy: str, seed: int) -> None:
    """One random trace, stepped and jumped: the same ends, parks, bytes and times."""
    rng = random.Random(f"{policy} {seed}")
    pool = rng.choice([120, 240, 1000])
    costs = drawn_costs(rng)
    limits = limits_of(
        costs,
        ctx=pool,
        slots=rng.choice([2, 4, 8]),
        policy=policy,
        lookahead_steps=rng.choice([1, 3, 8]),
        resume_order=rng.choice(["most-parked", "head"]),
        max_park_s=rng.choice([0.0, 2.0]),
        park_mode=rng.choice(["save", "save", "recompute"]),
        step_tokens=rng.choice([16, 64]),
    )
    trace = drawn_trace(rng, pool)
    park_ram = rng.choice([0, 30, 10_000]) * PAGE * costs.block_size
    slow, slow_ends = play(trace, limits, costs, park_ram, jump=False)
    fast, fast_ends = play(trace, limits, costs, park_ram, jump=True)

    assert slow.plans == slow.steps
    assert fast.plans < slow.plans / 2, "nothing was jumped"
    assert_same(asdict(fast), asdict(slow), inexact=INEXACT, out={"plans"})
    for request_id, end in slow_ends.items():
        assert_same(asdict(fast_ends[request_id]), asdict(end), inexact={}, out={"usage"})
        fast_usage, usage = fast_ends[request_id].usage, end.usage
        assert replace(fast_usage, parked_ms=0) == replace(usage, parked_ms=0)
        assert abs(fast_usage.parked_ms - usage.parked_ms) <= 1


def assert_same(fast: dict, slow: dict, inexact: dict[str, tuple[float, float]], out: set[str]) -> None:
    for name in slow.keys() - out:
        if isinstance(slow[name], float):
            rel, abs_ = inexact.get(name, (1e-9, 1e-9))
            assert fast[name] == pytest.approx(slow[name], rel=rel, abs=abs_), name
        elif name == "classes":
            for number, figures in slow[name].items():
                assert_same(asdict(fast[name][number]), asdict(figures), inexact, out)
        else:
            assert fast[name] == slow[name], name


def test_the_traces_of_the_property_test_meet_pressure():
    """Else it would prove little."""
    seen = []
    for seed in range(12):
        rng = random.Random(seed)
        figures = simulate(
            drawn_trace(rng, 240), limits_of(COSTS, ctx=240, slots=8, policy="watermark"), COSTS, rng.choice([40, 10_000]) * PAGE
        )
        seen.append(figures)
    assert sum(figures.all_parks for figures in seen) > 20
    assert sum(figures.denials for figures in seen) > 0
    assert sum(figures.bytes_loaded for figures in seen) > 0
    assert sum(figures.tokens_recomputed for figures in seen) > 0
    assert sum(figures.tokens_found for figures in seen) > 0


def test_the_time_of_one_request_is_the_sum_of_its_steps():
    """A prompt of 10 in chunks of 8 and 2, then decodes over a growing text."""
    limits = limits_of(COSTS, ctx=1000, slots=2, step_tokens=8)
    ends: list[End] = []
    figures = simulate([Request("a", 10, 50, arrival_s=3.0)], limits, COSTS, 0, on_end=ends.append)
    prefill = COSTS.step_s(0, 8, 0, 36) + COSTS.step_s(0, 2, 0, 19)
    decodes = [COSTS.step_s(1, 0, 10 + number, 0) for number in range(1, 50)]
    assert figures.ttft_p50_s == pytest.approx(prefill)
    assert figures.makespan_s == pytest.approx(prefill + sum(decodes))
    assert ends[0].at_s == pytest.approx(3.0 + prefill + sum(decodes))
    assert (ends[0].reason, ends[0].tokens) == ("length", 50)
    assert figures.p99_gap_s == pytest.approx(decodes[-1], rel=0.01)
    assert figures.longest_gap_s == pytest.approx(decodes[-1])
    assert (figures.steps, figures.plans < 6, figures.idle_cells) == (51, True, 0.0)


def test_who_comes_after_another_finds_its_text():
    """Full blocks of the whole text before it; its own branch is not that of another follower."""
    trace = [
        Request("a", 20, 21),
        Request("b", 60, 5, after="a", think_s=2.0),
        Request("c", 60, 5, after="a", think_s=9.0),
    ]
    ends: dict[str, End] = {}
    simulate(trace, limits_of(COSTS, ctx=1000, slots=2), COSTS, 0, on_end=lambda end: ends.setdefault(end.request_id, end))
    assert ends["a"].usage.cached_tokens == 0
    assert ends["b"].usage.cached_tokens == ends["c"].usage.cached_tokens == 40  # of 41 tokens, the last never computed
    assert ends["c"].at_s > ends["b"].at_s > ends["a"].at_s + 2.0


def test_a_park_is_counted_with_its_bytes_and_its_wait():
    """Two that do not fit together: the newer one is parked, saved, loaded again; its wait lasts until it runs."""
    costs = replace(COSTS, copy_overlaps=False)
    limits = limits_of(costs, ctx=100, slots=2, policy="watermark", reuse=False)
    trace = [Request("old", 20, 50), Request("new", 20, 50)]
    ends: dict[str, End] = {}
    figures = simulate(trace, limits, costs, 1 << 30, on_end=lambda end: ends.setdefault(end.request_id, end))
    assert figures.parks == {"pressure": 1}
    assert (ends["old"].usage.parks, ends["new"].usage.parks, figures.requests_parked) == (0, 1, 1)
    assert figures.bytes_saved == figures.bytes_loaded > 0
    assert figures.bytes_saved % costs.block_bytes == 0
    assert figures.tokens_recomputed == figures.denials == 0
    assert figures.longest_wait_s == figures.p99_wait_s == pytest.approx(ends["new"].usage.parked_ms / 1000, abs=0.001)
    assert figures.longest_gap_s > figures.longest_wait_s, "its stream stood still for the wait and a step"
    assert 0 < figures.idle_cells < 100


def test_without_a_budget_a_park_is_denied_and_recomputed():
    limits = limits_of(COSTS, ctx=100, slots=2, policy="watermark", reuse=False)
    figures = simulate([Request("old", 20, 50), Request("new", 20, 50)], limits, COSTS, 0)
    assert (figures.denials, figures.bytes_saved) == (1, 0)
    assert figures.tokens_recomputed > 20


@pytest.mark.parametrize("jump", [False, True])
def test_the_choice_by_measured_cost_is_simulated(jump):
    """Costs under which copying is dear: one park measures it, the later ones recompute. Each is counted with its reason."""
    costs = replace(COSTS, save_bytes_per_s=1e5, load_bytes_per_s=1e5)
    limits = limits_of(costs, ctx=300, slots=4, park_mode="auto", policy="ondemand", reuse=False)
    trace = [Request(f"r{number}", 40, 150, arrival_s=float(number)) for number in range(12)]
    figures = simulate(trace, limits, costs, 1 << 30, jump=jump)
    assert sum(figures.park_reasons.values()) == figures.all_parks > 4
    assert figures.park_reasons["save unmeasured"] < figures.park_reasons["recompute copy_dearer"]
    assert figures.failed == 0


def test_off_fails_instead_of_parking():
    limits = limits_of(COSTS, ctx=100, slots=2, policy="off")
    figures = simulate([Request("old", 20, 70), Request("new", 20, 70)], limits, COSTS, 1 << 30)
    assert (figures.failed, figures.errors, figures.all_parks) == (1, {"kv_cache_full": 1}, 0)


def test_a_prompt_that_never_fits_is_refused_and_one_that_outgrows_the_pool_is_cut_short():
    limits = limits_of(COSTS, ctx=100, slots=2)
    figures = simulate([Request("huge", 100, 5), Request("long", 50, 80)], limits, COSTS, 1 << 30)
    assert (figures.errors, figures.cut_short) == ({"context_length_exceeded": 1}, 1)
    assert figures.output_tokens == 50


def test_a_prompt_that_never_fits_takes_no_room_however_long_it_is():
    tracemalloc.start()
    figures = simulate([Request("long", 1 << 27, 1)], limits_of(COSTS, ctx=64, slots=1), COSTS, 0)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert figures.errors == {"context_length_exceeded": 1}
    assert most_bytes < 1 << 20


def test_who_comes_while_or_after_one_is_refused_need_not_wait_for_the_end_of_a_jump():
    trace = [
        Request("runs", 4, 200),
        Request("never", 1000, 1, arrival_s=0.1),
        Request("next", 4, 1, arrival_s=0.2),
        Request("after", 1100, 1, after="never"),
    ]
    limits = limits_of(COSTS, ctx=400, slots=2)
    (_, ends), (_, one_by_one) = (play(trace, limits, COSTS, 1 << 30, jump) for jump in (True, False))
    assert {name: end.at_s for name, end in ends.items()} == pytest.approx({name: end.at_s for name, end in one_by_one.items()})


def test_classes_are_counted_apart():
    trace = [Request(f"low{number}", 30, 60, priority=5) for number in range(4)]
    trace.append(Request("top", 30, 60, arrival_s=0.5, priority=0))
    figures = simulate(trace, limits_of(COSTS, ctx=200, slots=4), COSTS, 1 << 30)
    assert figures.classes["0"].longest_wait_s == 0.0
    assert figures.classes["5"].longest_wait_s == figures.longest_wait_s > 0
    assert (figures.classes["0"].requests, figures.classes["5"].requests) == (1, 4)


@pytest.mark.parametrize("overlaps", [False, True])
def test_copies_take_their_time(overlaps):
    """On the CPU the loop stands still for them, on a card it does not."""
    costs = replace(COSTS, copy_overlaps=overlaps)
    trace = [Request("old", 20, 150), Request("new", 20, 150)]
    limits = limits_of(costs, ctx=200, slots=2, policy="watermark", reuse=False)
    slow = simulate(trace, limits, costs, 1 << 30)
    free = simulate(trace, limits, costs.with_free_parks(), 1 << 30)
    copied_s = slow.bytes_saved / costs.save_bytes_per_s + slow.bytes_loaded / costs.load_bytes_per_s
    assert copied_s > 0
    if overlaps:
        assert free.makespan_s <= slow.makespan_s < free.makespan_s + copied_s
    else:
        assert slow.makespan_s == pytest.approx(free.makespan_s + copied_s, rel=0.02)


def test_a_copy_goes_on_in_bounded_pieces_while_rows_run():
    """12 MiB: three steps of 4 MiB; its end is seen by the next look."""
    costs = replace(COSTS, cell_bytes=3 << 20, block_size=4)
    cache = HostCache(costs, 1 << 30)
    granted = cache.answer(Reserve(1, "a", 1))
    cache.start(Save("a", granted.lease, (0,), 4))
    took = [cache.copy(0.01) for _ in range(4)]
    assert [seconds for seconds, _ in took] == [pytest.approx((4 << 20) / 2e8)] * 3 + [0.0]
    assert [events for _, events in took] == [[], [], [], [Saved("a", True, 12 << 20, pytest.approx((12 << 20) / 2e8))]]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("COPY_BYTES_PER_STEP", "gpu_worker/worker.py"),
        ("COPY_BYTES_IDLE", "gpu_worker/worker.py"),
        ("PIECE_BYTES", "gpu_worker/device/copies.py"),
    ],
)
def test_the_bounds_of_copying_are_the_workers(name, path):
    """Read, not imported: that would load torch."""

    def bound(file: str) -> str:
        return re.search(rf"^{name} = (\d+ << \d+)", (ROOT / file).read_text(), re.MULTILINE)[1]

    assert bound("sim/copying.py") == bound(path)


def test_prompts_exist_only_while_they_are_at_the_worker():
    """All come at once; else a long trace would need as much memory as all its texts."""
    most = 0

    def look(end: End) -> None:
        nonlocal most
        most = max(most, len(engine.scheduler.sequences))

    trace = [Request(f"r{number}", 30, 20) for number in range(300)]
    engine = Engine(trace, limits_of(COSTS, ctx=200, slots=4), COSTS, 1 << 30, on_end=look)
    assert engine.run().requests == 300
    assert 0 < most <= 8


def test_the_timeline_stays_bounded(monkeypatch):
    monkeypatch.setattr(Timeline, "MOST", 50)
    timeline = Timeline()
    limits = limits_of(COSTS, ctx=200, slots=4)
    figures = simulate([Request(f"r{n}", 30, 60, arrival_s=n) for n in range(60)], limits, COSTS, 0, timeline=timeline)
    times = [moment.at_s for moment in timeline.moments]
    assert 20 < len(times) <= 50
    assert times == sorted(times)
    assert times[-1] > 0.8 * figures.makespan_s
    assert all(0 <= moment.used_cells <= 200 for moment in timeline.moments)


def test_a_scheduler_that_leaves_somebody_behind_is_an_error_not_a_hang(monkeypatch):
    engine = Engine([Request("a", 20, 5)], limits_of(COSTS, ctx=100, slots=1), COSTS, 0)
    monkeypatch.setattr(engine.scheduler.entry, "let_in", lambda class_of, now: None)
    with pytest.raises(RuntimeError, match="left behind at 0.000 s: 1 requests"):
        engine.run()


def test_what_is_not_simulated_is_refused():
    with pytest.raises(ValueError, match="drafts are not simulated"):
        Engine([], limits_of(COSTS, ctx=100, slots=1, draft_max=2), COSTS, 0)
    with pytest.raises(ValueError, match="blocks of 4 cells, not 16"):
        Engine([], replace(limits_of(COSTS, ctx=100, slots=1), block_size=16), COSTS, 0)
