"""Workloads: synthetic traces of five shapes, from a seed. The same shape suits any pool: lengths scale with `mean_cells`.

| name     | lengths                                                     | arrivals                                   |
|----------|-------------------------------------------------------------|--------------------------------------------|
| uniform  | .2 to 1.8 of the mean                                       | independent (Poisson)                      |
| measured | lognormal, sigma 1: many short, some long                   | independent                                |
| heavy    | Pareto, alpha 1.2: most are short, few are most of the work | independent                                |
| bursty   | as measured                                                 | bursts of 8 at once on average, then quiet |
| agents   | each session's prompt grows by its answers and tool results | sessions independent; turns after a pause  |

They are synthetic. The shape of `measured` is that of published chat traces: in the Azure traces of 2023 (Patel et al.,
Splitwise, ISCA 2024) answers have a mean well above their median (lognormal, sigma about 1), prompts are spread as widely, and
arrivals come in bursts (Wang et al., BurstGPT, 2024). Their absolute lengths are not used. Means are exact in every seed but
for `agents`.
"""

import random
from collections.abc import Callable, Sequence
from math import ceil, inf

from msgspec.structs import replace

from gpu_worker.policy.limits import Limits
from sim.costs import CostModel, attended
from sim.trace import Request

BURST = 8  # requests in a burst, on average
BURST_GAP = 0.02  # between two of a burst, in mean gaps of the trace
TURNS = 5  # of an agent's session, on average
THINK = 10.0  # between an answer and the next turn, on average, in mean gaps of the trace


def make(
    name: str,
    *,
    requests: int,
    seed: int,
    mean_cells: int,
    most_cells: int,
    rate: float = inf,
    priorities: Sequence[int] = (0,),
    think: float = THINK,
) -> list[Request]:
    """A trace of a shape. Prompts and answers have the same mean, together `mean_cells`; none has more than `most_cells`, so the
    mean can be no more than that. `rate`: requests a second (inf: all at once). Agents pause for `think` times the mean gap
    between requests. Each request, of agents each session, draws one of `priorities`. ValueError for an unknown name or numbers
    that do not go together."""
    if name not in NAMES:
        raise ValueError(f"no workload {name!r}; choose one of {', '.join(NAMES)}")
    if requests < 1 or mean_cells < 2 or most_cells < mean_cells or rate <= 0:
        raise ValueError("a workload needs requests and a rate above 0 and 2 <= mean_cells <= most_cells")
    rng = random.Random(f"{name} {seed}")
    if name == "agents":
        trace = _agents(rng, requests, mean_cells, most_cells, think)
    else:
        shape = _SHAPES[name]
        prompts = _lengths([shape(rng) for _ in range(requests)], mean_cells / 2, most_cells // 2)
        outputs = _lengths([shape(rng) for _ in range(requests)], mean_cells / 2, most_cells // 2)
        arrive = _bursts if name == "bursty" else _poisson
        trace = [
            Request(f"r{number}", prompt, output, arrival_s=at)
            for number, (prompt, output, at) in enumerate(zip(prompts, outputs, arrive(rng, requests)))
        ]
    trace = at_rate(trace, rate)
    return _with_priorities(rng, trace, priorities) if tuple(priorities) != (0,) else trace


def at_rate(trace: list[Request], rate: float) -> list[Request]:
    """The same trace of one request a second, sped up or slowed down, pauses of agents included."""
    return [replace(request, arrival_s=request.arrival_s / rate, think_s=request.think_s / rate) for request in trace]


def rate_of_load(load: float, trace: list[Request], costs: CostModel, limits: Limits) -> float:
    """Requests a second that keep the machine busy to the share `load` (1: as much as it can do with a full pool), by the means
    of the trace. A rough figure: parks and recomputes are not in it, and every text that could be found counts as found."""
    prompt, output, shared = (sum(map(of, trace)) / len(trace) for of in (_prompt_tokens, _output_tokens, _shared_tokens(trace)))
    resident = prompt + output / 2
    count = max(1, min(limits.slots, int(limits.pool_cells / resident)))
    cells = int(count * resident)
    decode_s = costs.step_s(count, 0, cells, 0)
    chunk = max(1, min(limits.step_budget - count, ceil(prompt - shared)))
    chunk_s = costs.step_s(count, chunk, cells, attended(int(prompt / 2), chunk)) - decode_s
    return load / (output * decode_s / count + (prompt - shared) / chunk * chunk_s)


# lengths --------------------------------------------------------------------------------------------------------------
_SHAPES: dict[str, Callable[[random.Random], float]] = {
    "uniform": lambda rng: rng.uniform(0.2, 1.8),
    "measured": lambda rng: rng.lognormvariate(0.0, 1.0),
    "heavy": lambda rng: rng.paretovariate(1.2),
    "bursty": lambda rng: rng.lognormvariate(0.0, 1.0),
}
NAMES = (*_SHAPES, "agents")


def _lengths(values: list[float], mean: float, most: int) -> list[int]:
    """The values scaled so that their mean is that, cut at `most`; each at least 1."""
    low, high = 0.0, most / min(values)
    for _ in range(40):
        middle = (low + high) / 2
        if sum(min(most, middle * value) for value in values) < mean * len(values):
            low = middle
        else:
            high = middle
    return [max(1, min(most, round(high * value))) for value in values]


def _prompt_tokens(request: Request) -> int:
    return request.prompt_tokens


def _output_tokens(request: Request) -> int:
    return request.output_tokens


def _shared_tokens(trace: list[Request]) -> Callable[[Request], int]:
    cells = {request.id: request.cells for request in trace}
    return lambda request: cells.get(request.after, 0)


# arrivals, one a second on average ------------------------------------------------------------------------------------
def _poisson(rng: random.Random, count: int) -> list[float]:
    times, at = [], 0.0
    for _ in range(count):
        times.append(at)
        at += rng.expovariate(1.0)
    return times


def _bursts(rng: random.Random, count: int) -> list[float]:
    times: list[float] = []
    at = 0.0
    while len(times) < count:
        size = min(count - len(times), ceil(rng.expovariate(1 / BURST)))
        times += [at + BURST_GAP * number for number in range(size)]
        at = max(at + rng.expovariate(1 / size), times[-1] + BURST_GAP)
    return times


def _agents(rng: random.Random, count: int, mean_cells: int, most_cells: int, think: float) -> list[Request]:
    """Sessions of some turns. Each turn's prompt is the whole text so far and something new; the session ends where the next
    turn would be too long."""
    lengths = range(1, 2 * TURNS)
    grows = mean_cells * 2 * sum(lengths) / sum(turns * (turns + 1) for turns in lengths)  # cells a turn
    trace: list[Request] = []
    at = 0.0
    session = 0
    while len(trace) < count:
        known, before = 0, ""
        for turn in range(rng.choice(lengths)):
            new = max(1, round(grows / 2 * rng.lognormvariate(-0.5, 1.0)))
            output = max(1, round(grows / 2 * rng.lognormvariate(-0.5, 1.0)))
            if not turn:
                new, output = min(new, most_cells // 2), min(output, most_cells // 2)
            if known + new + output > most_cells or len(trace) == count:
                break
            request = Request(
                f"s{session}t{turn}",
                known + new,
                output,
                arrival_s=at,
                after=before,
                think_s=rng.expovariate(1 / think) if turn and think else 0.0,
            )
            trace.append(request)
            known, before = request.cells, request.id
        session += 1
        at += rng.expovariate(1 / TURNS)
    return trace


def _with_priorities(rng: random.Random, trace: list[Request], priorities: Sequence[int]) -> list[Request]:
    of: dict[str, int] = {}
    for request in trace:
        of[request.id] = of[request.after] if request.after else rng.choice(priorities)
    return [replace(request, priority=of[request.id]) for request in trace]
