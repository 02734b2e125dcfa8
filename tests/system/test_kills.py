"""SIGKILL of the host cache, of the worker, of both, in the middle of parking: every stream goes on as if nothing had been."""

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.system.stack import Answer, Stack, each, prompt, stream, together

GENERATED = 150
WORDS = 20  # of a prompt
CTX = 256  # two grow to about 350 tokens in it, four to 700


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with Stack(tmp_path_factory.mktemp("kills") / "run", ctx=CTX, slots=4) as stack:
        yield stack


@pytest.fixture(scope="module")
def unhurt(stack) -> list[Answer]:
    answers = four(stack)
    assert sum(answer.parkade["parks"] for answer in answers) > 0
    return answers


def four(stack: Stack, on_tokens=None) -> list[Answer]:
    """Four streams at once; `on_tokens(answer)` is called with any of them."""
    bodies = [{"prompt": prompt(i, WORDS), "max_tokens": GENERATED, "temperature": 0.8, "seed": i} for i in range(4)]
    return together(*(stream(stack.url, on_tokens=on_tokens, **body) for body in bodies))


def while_one_is_parked(stack: Stack, hit: Callable[[], None]) -> Callable[[Answer], None]:
    """For `on_tokens`: calls `hit()` once, when somebody is parked and others run."""
    done = []

    def look(_: Answer) -> None:
        if not done and stack.metric("parkade_requests_preempted") > 0:
            done.append(True)
            hit()

    return each(4, look)


@pytest.mark.parametrize("victims", [["hostcache"], ["gpu_worker"], ["hostcache", "gpu_worker"]], ids="+".join)
def test_a_killed_process_costs_a_pause_at_most(stack, unhurt, victims):
    killed = []

    def kill() -> None:
        for victim in victims:
            killed.append(stack.pid_of(victim))
            stack.kill(victim)

    answers = four(stack, while_one_is_parked(stack, kill))
    assert len(killed) == len(victims), "nobody was parked: the test shows nothing"
    for answer, expected in zip(answers, unhurt, strict=True):
        assert answer.ids == expected.ids
        assert answer.text == expected.text
        assert (answer.finish_reason, answer.done, answer.error) == ("length", True, None)
    assert stack.http.get("/health").status_code == 200


def test_a_stopped_host_cache_is_a_denial(stack, unhurt):
    pid = stack.pid_of("hostcache")
    before = stack.parks()
    try:
        answers = four(stack, each(4, lambda _: os.kill(pid, signal.SIGSTOP)))  # before anybody is parked
    finally:
        os.kill(pid, signal.SIGCONT)
    denied = "recompute denied_timeout"
    assert stack.parks().get(denied, 0) > before.get(denied, 0)
    assert [answer.ids for answer in answers] == [answer.ids for answer in unhurt]


def test_nothing_is_left_after_a_sigkill_of_everything(tmp_path):
    before = set(os.listdir("/dev/shm"))
    stack = Stack(tmp_path / "run", ctx=CTX, slots=4)
    together(stream(stack.url, prompt=prompt(0, WORDS), max_tokens=5))
    children = psutil.Process(stack.process.pid).children(recursive=True)
    assert len(children) >= 4
    stack.stop(signal.SIGKILL)
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert set(os.listdir("/dev/shm")) == before
    with Stack(tmp_path / "run", ctx=CTX, slots=4) as again:  # what the killed server left does not block the next
        assert len(together(stream(again.url, prompt=prompt(0, WORDS), max_tokens=5))[0].ids) == 5
        second = psutil.Popen(
            [*psutil.Process(again.process.pid).cmdline()[:3], "serve", "--run-dir", str(tmp_path / "run"), "--port", "0"],
            stderr=-1, stdout=-1, text=True,
        )  # fmt: skip
        _, said = second.communicate(timeout=60)
        assert second.returncode != 0 and "run-dir" in said.splitlines()[-1], said
    left = os.listdir(tmp_path / "run") if (tmp_path / "run").exists() else []
    assert not [name for name in left if name.endswith(".sock")]
