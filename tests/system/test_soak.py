"""The arithmetic of the soak: a leak is seen wherever memory can grow, noise is none, and a soak that shows nothing says so."""

import asyncio
import json
import os
import signal
from collections import Counter
from dataclasses import asdict
from random import Random
from types import SimpleNamespace

import pytest

from tests.system.nemesis import flat
from tests.system.nemesis import soak as soaks
from tests.system.nemesis.soak import LIVING, MOST_TOKENS, RESTARTED, Sieve, Soak, ask, judged, not_done, report, restarts

MIB = 1 << 20
SECONDS, RESTART_S, WARM_S = 1800.0, 30.0, 180.0
BASE_MIB = {"router": 40, "router.openai": 60, "serve": 45, "client": 250, "gpu_worker": 245, "hostcache": 32}
TEXT = list(range(100, 200))
LIMIT_S = 20.0


def soak(
    leak_mib_an_hour: dict[str, float] | None = None, a_life: dict[str, float] | None = None, step=None
) -> list[flat.Sample]:
    """Samples of half an hour: the worker lives 30 times in the first half, the host cache 30 times in the second. Each process
    takes what it has at start, warms up, and wobbles by 1 %. `leak_mib_an_hour` is by process, `a_life` what each further life
    takes more."""
    leaks, lives, random = leak_mib_an_hour or {}, a_life or {}, Random(1)
    samples = []
    for process, base in BASE_MIB.items():
        born, life = 0.0, 0
        for t in range(0, int(SECONDS), 2):
            restarted = t < SECONDS / 2 if process == "gpu_worker" else process == "hostcache" and t >= SECONDS / 2
            if t and restarted and t % RESTART_S == 0:
                born, life = float(t), life + 1
            age_s = t - born
            mib = base * (1 - 0.05 * 0.97**age_s) + leaks.get(process, 0.0) * age_s / 3600 + lives.get(process, 0.0) * life
            mib *= 1 + random.uniform(-0.01, 0.01)
            if step == process and t > 0.7 * SECONDS:
                mib *= 1.05
            samples.append(flat.Sample(float(t), process, 1000 + life, age_s, int(mib * MIB), 0, 20 + t % 3))
    return samples


def grown(samples: list[flat.Sample]) -> list[tuple[str, str]]:
    return [(verdict.process, verdict.what) for verdict in flat.judge(samples, WARM_S, RESTART_S) if verdict.why]


def test_noise_and_warm_up_are_flat_and_everything_is_judged():
    verdicts = flat.judge(soak(), WARM_S, RESTART_S)
    assert [verdict for verdict in verdicts if verdict.why] == []
    wanted = [(process, what) for process in LIVING for what in ("life", "fds")] + [(process, "lives") for process in RESTARTED]
    assert sorted((verdict.process, verdict.what) for verdict in verdicts) == sorted(wanted)


@pytest.mark.parametrize("process", LIVING)
def test_a_leak_in_a_long_life_is_seen(process):
    hours = (SECONDS / 2 if process in RESTARTED else SECONDS) / 3600
    share = BASE_MIB[process] / hours
    assert grown(soak({process: 0.04 * share})) == [(process, "life")]  # 4 % over its life; 3.2 % or more of it are judged
    assert grown(soak({process: 0.01 * share})) == []


@pytest.mark.parametrize("process", RESTARTED)
def test_lives_that_get_larger_are_seen(process):
    assert grown(soak(a_life={process: 0.04 * BASE_MIB[process] / 29})) == [(process, "lives")]


def test_a_step_late_in_the_soak_is_seen():
    assert grown(soak(step="router")) == [("router", "life")]


def test_descriptors_that_are_left_open_are_seen():
    samples = [flat.Sample(t, "router", 1, t, 40 * MIB, 0, 20 + int(t // 200)) for t in map(float, range(0, 1800, 2))]
    assert grown(samples) == [("router", "fds")]


def test_memory_that_goes_back_is_flat():
    samples = [flat.Sample(t, "router", 1, t, int((60 - t / 100) * MIB), 0, 20) for t in map(float, range(0, 1800, 2))]
    assert grown(samples) == []


def test_the_file_of_a_soak_is_judged_again(tmp_path, capsys):
    def written(name: str, samples: list[flat.Sample]):
        lines = [{"soak": "toy", "seconds": SECONDS, "restart_s": RESTART_S}, {"t": 30.0, "restart": "gpu_worker"}]
        file = tmp_path / name
        file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *map(asdict, samples)]))
        return file

    good = written("good", soak())
    assert judged(good)[1] == []
    assert report(good, []) == 0
    assert report(good, ["a broken promise"]) == 1
    assert report(written("bad", soak({"router": 10.0})), []) == 1
    assert "router life: grew by" in capsys.readouterr().out
    assert report(written("short", [sample for sample in soak() if sample.t < 300]), []) == 1
    assert "too little is known of hostcache: lives" in capsys.readouterr().out


def test_restarts_come_in_halves_and_leave_a_long_life_to_each():
    plan = restarts(3, SECONDS, RESTART_S)
    assert plan == restarts(3, SECONDS, RESTART_S) != restarts(4, SECONDS, RESTART_S)
    assert {restart.process for restart in plan if restart.at_s < SECONDS / 2} == {"gpu_worker"}
    assert {restart.process for restart in plan if restart.at_s > SECONDS / 2} == {"hostcache"}
    assert {restart.signal for restart in plan} == {signal.SIGKILL, signal.SIGTERM}
    assert len(plan) == 2 * 29


def test_prompts_are_few_so_that_the_texts_stay_few():
    asks = [ask(1, client, number, "toy") for client in range(10) for number in range(100)]
    assert len({repr(one.prompt) for one in asks}) <= 60
    assert max(one.max_tokens for one in asks) <= MOST_TOKENS


def test_a_soak_whose_samples_cannot_be_taken_ends_at_once_with_the_reason(tmp_path, monkeypatch):
    async def for_ever(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(soaks, "texts_of", lambda *_: None)
    monkeypatch.setattr(soaks, "zeromq_client", for_ever)
    monkeypatch.setattr(soaks, "http_client", for_ever)
    monkeypatch.setattr(Soak, "_look_at_budget", for_ever)
    stack = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()), address="", url="")
    soak = Soak(stack, "toy", 1, SECONDS, RESTART_S, 2.0, tmp_path / "samples")
    monkeypatch.setattr(soak, "_write", lambda _: (_ for _ in ()).throw(OSError("no room for samples")))
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(asyncio.wait_for(soak.run(), LIMIT_S))
    assert raised.group_contains(OSError, match="no room for samples")


# the sieve ------------------------------------------------------------------------------------------------------------
def heard(*events: tuple[str, dict]) -> Sieve:
    sieve = Sieve(lambda submit: TEXT)
    sieve.record("submit", id="a", how="zeromq", prompt=[1], max_tokens=4, sampling={})
    for event, fields in events:
        sieve.record(event, id="a", **fields)
    return sieve


END = ("end", {"outcome": "length", "tokens": 4, "code": "", "error": ""})


def test_a_stream_that_ended_well_is_counted_and_forgotten():
    parked = ("parked", {"kind": "pressure", "mode": "recompute", "reason": "denied_full"})
    sieve = heard(("tokens", {"offset": 0, "tokens": TEXT[:3]}), parked, ("tokens", {"offset": 3, "tokens": TEXT[3:4]}), END)
    assert (sieve.broken, sieve.streams, sieve.events) == ([], {}, [])
    assert sieve.figures == {"ended length": 1, "tokens": 4, "parks recompute denied_full": 1}


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([("tokens", {"offset": 0, "tokens": [*TEXT[:3], 7]}), END], "token 3 of 4"),
        ([("tokens", {"offset": 1, "tokens": TEXT[:4]}), END], "tokens at 1"),
        ([("tokens", {"offset": 0, "tokens": TEXT[:4]}), END, END], "a second last word"),
        ([("tokens", {"offset": 0, "tokens": TEXT[:4]}), END, ("tokens", {"offset": 4, "tokens": []})], "after its last word"),
        ([("end", {"outcome": "lost", "tokens": 0, "code": "router_lost", "error": ""})], "ended with lost"),
    ],
)
def test_what_must_not_happen_is_found(events, said):
    assert said in "\n".join(heard(*events).broken)


def test_broken_promises_are_all_counted_and_some_are_told():
    sieve = Sieve(lambda submit: TEXT)
    for number in range(1000):
        sieve.wrong(f"{number}")
    assert sieve.figures["broken promises"] == 1000
    assert len(sieve.broken) == 20


def test_a_soak_in_which_nothing_happened_shows_nothing():
    happened = Counter({"parks save asked": 1, "parks recompute denied_full": 1, "ended length": 1})
    happened |= {"died gpu_worker": 1, "died hostcache": 1}
    assert not_done(happened) == []
    for name in happened:
        assert len(not_done(happened - Counter({name: 1}))) == 1
