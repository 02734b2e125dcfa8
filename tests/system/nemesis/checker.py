"""Proves from a history what was promised. Pure: it reads events and knows what each text must be.

- Every accepted stream ends, with exactly one last word; nothing is said after it.
- Its tokens follow one another without a gap, a repetition or a change, and are those of the undisturbed run; a stream that ends
  with `length` has all of them.
- It ends with an error only where that is promised: its router or its HTTP adapter died while it ran. It is refused only where
  one of them was not there, or stood still for longer than the adapter waits for the router.
- Images never take more than the budget; when all is quiet, nobody holds a cell, a seat or a lease.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

AROUND_S = 10.0  # between a death and what clients see of it: on a busy machine a process takes some seconds to end
BACK_S = 30.0  # after a death, until which a new process may not answer yet

STILL_S = 5.0  # a process stands still for no longer, with what it then has to catch up with

Texts = Callable[[dict], list[int]]  # of a submit event: the whole undisturbed text


class Troubles(NamedTuple):
    """When which process died, was told to end, began to stand still: (seconds, process)."""

    died: list[tuple[float, str]]
    told: list[tuple[float, str]]
    still: list[tuple[float, str]]


NO_TROUBLES = Troubles([], [], [])


def check(events: Iterable[dict], texts: Texts) -> list[str]:
    """What was broken, a line each."""
    events = list(events)
    streams: dict[str, list[dict]] = {}
    broken = []
    for event in events:
        if event["event"] == "submit":
            if event["id"] in streams:
                broken.append(f"{event['id']}: asked for twice, the history is wrong")
            streams[event["id"]] = []
        if "id" in event:
            streams[event["id"]].append(event)
    faults = [(event["kind"], event["t"], event["target"]) for event in events if event["event"] == "fault"]
    troubles = Troubles(
        [(event["t"], event["process"]) for event in events if event["event"] == "died"],
        [(t, target) for kind, t, target in faults if kind == "term"],
        [(t, target) for kind, t, target in faults if kind == "stop"]
        + [(event["t"], event["process"]) for event in events if event["event"] == "stopped"],  # by a failpoint
    )
    for stream in streams.values():
        broken += check_stream(stream, texts, troubles)
    for event in events:
        if event["event"] == "budget" and not event["used"] <= event["held"] <= event["budget"]:
            broken.append(f"{event['t']} s: budget {event['budget']} bytes, held {event['held']}, used {event['used']}")
        if event["event"] == "quiet":
            broken += [f"{event['t']} s: nobody is served, and {name} is {value}" for name, value in event["left"].items()]
    if not any(event["event"] == "quiet" for event in events):
        broken.append("it never became quiet")
    return broken


def check_stream(events: list[dict], texts: Texts, troubles: Troubles = NO_TROUBLES) -> list[str]:
    """What was broken of one stream: its events, with its submit first."""
    submit, name = events[0], events[0]["id"]
    broken: list[str] = []
    ids: list[int] = []
    end = left = None
    for event in events[1:]:
        match event["event"]:
            case "tokens":
                if end is not None:
                    broken.append(f"{name}: tokens after its last word")
                if event["offset"] != len(ids):
                    broken.append(f"{name}: tokens at {event['offset']} where {len(ids)} were expected")
                ids += event["tokens"]
            case "leave":
                left = event["how"]
            case "end":
                if end is not None:
                    broken.append(f"{name}: a second last word, {event['outcome']}")
                end = event
    if end is None:
        return [*broken, f"{name}: no last word"]
    expected = texts(submit)[: len(ids)] if ids else []
    if ids != expected:
        at = next((i for i, (a, b) in enumerate(zip(ids, expected)) if a != b), len(expected))
        broken.append(f"{name}: token {at} of {len(ids)} is not that of the undisturbed run")
    if len(ids) > submit["max_tokens"]:
        broken.append(f"{name}: {len(ids)} tokens, {submit['max_tokens']} were wanted")
    why = _wrong_end(submit, end, len(ids), left, troubles)
    return [*broken, f"{name}: {why}"] if why else broken


def _wrong_end(submit: dict, end: dict, count: int, left: str | None, troubles: Troubles) -> str:
    """Why this end is none that was promised; nothing if it is."""

    def died(*processes: str, before_s: float) -> bool:
        return any(p in processes and submit["t"] - before_s <= t <= end["t"] + AROUND_S for t, p in troubles.died)

    def told(*processes: str) -> bool:
        return any(p in processes and t <= end["t"] for t, p in troubles.told)

    def still(*processes: str) -> bool:
        return any(p in processes and submit["t"] - STILL_S <= t <= end["t"] for t, p in troubles.still)

    servers = ("router", "router.openai") if submit["how"] == "http" else ("router",)
    said = f"ended with {end['outcome']} {end.get('code') or ''} {end.get('error') or ''} after {count} tokens"
    match end["outcome"]:
        case "length":
            if count != submit["max_tokens"]:
                return f"{said}, {submit['max_tokens']} were wanted"
            return "" if end["tokens"] == count else f"{said}, and {end['tokens']} are counted"
        case "left":
            return "" if left == "vanish" else said
        case "cancelled":
            return "" if left == "cancel" else said
        case "lost":
            return "" if died(*servers, before_s=AROUND_S) else said
        case "unreached":
            return "" if died(*servers, before_s=BACK_S) else said
        case "rejected":
            not_there = end["code"] in ("502", "503") and (died(*servers, before_s=BACK_S) or still(*servers))
            return "" if told(*servers) or not_there else said
        case "error":
            return "" if end.get("code") == "drain_timeout" and told(*servers) else said
        case _:
            return said
