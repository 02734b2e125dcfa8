"""Workloads: shapes, means, bounds, and that a seed is a trace."""

from math import inf

import pytest

from sim import trace as traces
from sim.costs import load_costs
from sim.engine import limits_of, simulate
from sim.trace import Request
from sim.workloads import NAMES, at_rate, make, rate_of_load


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def share_of_the_longest_tenth(trace: list[Request]) -> float:
    cells = sorted(request.cells for request in trace)
    return sum(cells[-len(cells) // 10 :]) / sum(cells)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mean_cells", [60, 100_000])
def test_a_workload_is_a_trace_that_keeps_its_bounds(name, mean_cells, tmp_path):
    trace = make(name, requests=2000, seed=3, mean_cells=mean_cells, most_cells=5 * mean_cells, rate=2.0)
    assert len(trace) == 2000
    assert max(request.cells for request in trace) <= 5 * mean_cells
    off = 0.25 if name == "agents" else 0.02
    assert mean([request.cells for request in trace]) == pytest.approx(mean_cells, rel=off)
    last_s = max(request.arrival_s for request in trace)
    assert last_s == pytest.approx(1000, rel=0.25)
    traces.write(str(tmp_path / "t.jsonl"), trace)
    assert traces.read(str(tmp_path / "t.jsonl")) == trace


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_is_a_trace(name):
    def of(seed: int) -> list[Request]:
        return make(name, requests=50, seed=seed, mean_cells=100, most_cells=400)

    assert of(1) == of(1)
    assert of(1) != of(2)


def test_the_shapes_differ():
    made = {name: make(name, requests=5000, seed=1, mean_cells=1000, most_cells=20_000, rate=1.0) for name in NAMES}
    shares = {name: share_of_the_longest_tenth(trace) for name, trace in made.items()}
    assert shares["uniform"] < 0.2 < shares["measured"] < shares["heavy"]
    assert shares["measured"] == pytest.approx(shares["bursty"], abs=0.03)

    def gaps_below(trace: list[Request], seconds: float) -> float:
        times = sorted(request.arrival_s for request in trace)
        return mean([later - earlier < seconds for earlier, later in zip(times, times[1:])])

    assert gaps_below(made["bursty"], 0.1) > 0.7
    assert gaps_below(made["measured"], 0.1) < 0.15


def test_agents_come_back_with_all_they_have():
    trace = make("agents", requests=500, seed=1, mean_cells=1000, most_cells=5000, rate=1.0)
    by_id = {request.id: request for request in trace}
    turns = [request for request in trace if request.after]
    assert 0.5 < len(turns) / len(trace) < 0.9
    assert all(request.prompt_tokens > by_id[request.after].cells for request in turns)
    assert all(request.think_s > 0 for request in turns)


def test_a_session_has_one_class():
    trace = make("agents", requests=200, seed=1, mean_cells=1000, most_cells=5000, priorities=(0, 7))
    by_id = {request.id: request for request in trace}
    assert {request.priority for request in trace} == {0, 7}
    assert all(request.priority == by_id[request.after].priority for request in trace if request.after)


def test_without_a_rate_all_come_at_once():
    assert {request.arrival_s for request in make("uniform", requests=9, seed=1, mean_cells=10, most_cells=20)} == {0.0}


@pytest.mark.parametrize("name", ["uniform", "heavy", "agents"])
def test_a_load_below_one_is_served_and_one_above_piles_up(name):
    costs = load_costs("card")
    limits = limits_of(costs, ctx=40_000, slots=16, policy="lookahead")
    trace = make(name, requests=400, seed=1, mean_cells=2000, most_cells=20_000, rate=1.0)

    def longest_start_s(load: float) -> float:
        return simulate(at_rate(trace, rate_of_load(load, trace, costs, limits)), limits, costs, 1 << 34).ttft_p99_s

    work_s = 1 / rate_of_load(1.0, trace, costs, limits)  # of one request
    assert longest_start_s(0.4) < 25 * work_s < 35 * work_s < longest_start_s(2.5)


@pytest.mark.parametrize(
    "wrong", [{"name": "chat"}, {"requests": 0}, {"mean_cells": 1}, {"most_cells": 99}, {"rate": 0.0}, {"rate": -inf}]
)
def test_wrong_numbers_are_refused(wrong):
    right = {"name": "uniform", "requests": 5, "seed": 1, "mean_cells": 100, "most_cells": 200, "rate": 1.0}
    with pytest.raises(ValueError, match="workload"):
        make(**(right | wrong))
