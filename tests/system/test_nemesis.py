"""Short runs of the nemesis, and its checker: each thing that must not happen is found in a history where it does."""

import copy
from pathlib import Path

import pytest

from tests.system.nemesis import plan
from tests.system.nemesis.checker import check
from tests.system.nemesis.runner import Server, run

TEXT = list(range(100, 200))


def promises(folder: Path, model: str, seeds: range, seconds: float, scale: float) -> None:
    server = Server(folder, model, {}, scale)
    try:
        outcomes = [run(server, seed, seconds) for seed in seeds]
    finally:
        left = server.stop()
    again = f"python -m tests.system.nemesis --model {model} --scale {scale} --seconds {seconds} --seed"
    assert [f"{again} {outcome.seed}: {outcome.broken}" for outcome in outcomes if outcome.broken] == []
    assert left == []
    assert sum(outcome.figures["fault"] for outcome in outcomes) >= len(seeds)


def test_short_runs_keep_every_promise(tmp_path):
    promises(tmp_path, "toy", range(10), 1.5, 0.2)


@pytest.mark.long
@pytest.mark.parametrize("model", ["toy", "bard"])
def test_runs_keep_every_promise(tmp_path, model):
    promises(tmp_path, model, range(100, 105), 15.0, 1.0 if model == "toy" else 0.15)


def test_a_seed_is_a_plan():
    assert plan.faults(7, 15.0) == plan.faults(7, 15.0) != plan.faults(8, 15.0)
    assert plan.ask(7, 1, 2, 1.0, False) == plan.ask(7, 1, 2, 1.0, False) != plan.ask(7, 1, 3, 1.0, False)
    kinds = {fault.kind for seed in range(50) for fault in plan.faults(seed, 15.0)}
    assert kinds == set(plan.KINDS)


# the checker ----------------------------------------------------------------------------------------------------------
def history(how: str = "zeromq") -> list[dict]:
    """Of one stream of ten tokens that was parked once, and a quiet end."""
    return [
        {"t": 0.0, "event": "submit", "id": "a", "how": how, "prompt": [1], "max_tokens": 10, "sampling": {}},
        {"t": 0.1, "event": "tokens", "id": "a", "offset": 0, "tokens": TEXT[:4]},
        {"t": 0.2, "event": "parked", "id": "a", "kind": "pressure", "mode": "save", "reason": ""},
        {"t": 0.2, "event": "budget", "budget": 100, "held": 64, "used": 10},
        {"t": 0.3, "event": "tokens", "id": "a", "offset": 4, "tokens": TEXT[4:10]},
        {"t": 0.4, "event": "end", "id": "a", "outcome": "length", "tokens": 10, "code": "", "error": ""},
        {"t": 9.0, "event": "quiet", "left": {}},
    ]


def broken(change, how: str = "zeromq") -> list[str]:
    events = copy.deepcopy(history(how))
    change(events)
    return check(events, lambda submit: TEXT)


def set_(index: int, **fields: object):
    return lambda events: events[index].update(fields)


LOST = {"outcome": "lost", "code": "router_lost"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda events: events.pop(1), "tokens at 4 where 0 were expected"),
        (lambda events: events.pop(4), "after 4 tokens, 10 were wanted"),
        (lambda events: events.insert(2, dict(events[1])), "tokens at 0 where 4 were expected"),
        (set_(4, tokens=[*TEXT[4:9], 7]), "token 9 of 10 is not that of the undisturbed run"),
        (set_(4, tokens=TEXT[4:11]), "11 tokens, 10 were wanted"),
        (lambda events: events.pop(5), "no last word"),
        (lambda events: events.insert(6, dict(events[5])), "a second last word"),
        (lambda events: events.insert(6, {**events[4], "offset": 10, "tokens": []}), "tokens after its last word"),
        (set_(5, outcome="never"), "ended with never"),
        (set_(5, outcome="error", code="worker_lost"), "ended with error worker_lost"),
        (set_(5, outcome="stop"), "ended with stop"),
        (set_(5, outcome="cancelled"), "ended with cancelled"),
        (set_(5, outcome="rejected", code="queue_full"), "ended with rejected queue_full"),
        (set_(5, outcome="rejected", code="503"), "ended with rejected 503"),
        (lambda events: stood_still("gpu_worker", 0.1)(events), "ended with rejected 503"),
        (lambda events: stood_still("router", 0.5)(events), "ended with rejected 503"),
        (set_(5, tokens=9), "and 9 are counted"),
        (set_(5, **LOST), "ended with lost"),
        (
            lambda events: (events[5].update(LOST), events.append({"t": 0.3, "event": "died", "process": "gpu_worker"})),
            "with lost",
        ),
        (lambda events: (events[5].update(LOST), events.append({"t": 19.9, "event": "died", "process": "router"})), "with lost"),
        (set_(3, used=65), "held 64, used 65"),
        (set_(3, held=101), "held 101"),
        (set_(6, left={"used bytes": 4096}), "used bytes is 4096"),
        (lambda events: events.pop(6), "never became quiet"),
    ],
)
def test_what_must_not_happen_is_found(change, said):
    assert said in "\n".join(broken(change))


def stood_still(process: str, at_s: float):
    """From then on, and the stream was refused, with the status of a router that does not answer."""

    def change(events: list[dict]) -> None:
        del events[1:5]
        events[1].update(outcome="rejected", code="503", tokens=0)
        events.append({"t": at_s, "event": "stopped", "process": process})

    return change


def died(process: str):
    def change(events: list[dict]) -> None:
        events[5].update(LOST)
        events.append({"t": 0.35, "event": "died", "process": process})

    return change


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (lambda events: None, "zeromq"),
        (died("router"), "zeromq"),
        (died("router"), "http"),
        (died("router.openai"), "http"),
        (stood_still("router", 0.1), "http"),
        (lambda events: (events.insert(2, {"t": 0.1, "event": "leave", "id": "a", "how": "cancel"}),
                         events.pop(5), events[5].update(outcome="cancelled", tokens=4)), "zeromq"),
    ],
)  # fmt: skip
def test_what_may_happen_is_no_finding(change, how):
    assert broken(change, how) == []
