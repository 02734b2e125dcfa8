"""SIGKILL of the host cache, of the worker, of both, in the middle of parking: every stream goes on as if nothing had been."""

import os
import signal

import psutil
import pytest

from tests.system.stack import Answer, Stack, prompt, stream, together

GENERATED = 300
CTX = 1024


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
    return together(
        *(
            stream(
                stack.url,
                prompt=prompt(i),
                max_tokens=GENERATED,
                temperature=0.8,
                seed=i,
                on_tokens=on_tokens if i == 0 else None,
            )
            for i in range(4)
        )
    )


@pytest.mark.parametrize("victims", [["hostcache"], ["gpu_worker"], ["hostcache", "gpu_worker"]], ids="+".join)
def test_a_killed_process_costs_a_pause_at_most(stack, unhurt, victims):
    killed = []

    def kill_when_half_way(answer: Answer) -> None:
        if len(answer.ids) >= GENERATED // 2 and not killed:
            for victim in victims:
                killed.append(stack.pid_of(victim))
                stack.kill(victim)

    answers = four(stack, kill_when_half_way)
    assert len(killed) == len(victims)
    for answer, expected in zip(answers, unhurt, strict=True):
        assert answer.ids == expected.ids
        assert answer.text == expected.text
        assert (answer.finish_reason, answer.done, answer.error) == ("length", True, None)
    assert stack.http.get("/health").status_code == 200


def test_a_stopped_host_cache_is_a_denial(stack, unhurt):
    pid = stack.pid_of("hostcache")
    stopped = []

    def stop_when_half_way(answer: Answer) -> None:
        if len(answer.ids) >= GENERATED // 4 and not stopped:
            stopped.append(pid)
            os.kill(pid, signal.SIGSTOP)

    try:
        answers = four(stack, stop_when_half_way)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert stopped
    assert [answer.ids for answer in answers] == [answer.ids for answer in unhurt]


def test_nothing_is_left_after_a_sigkill_of_everything(tmp_path):
    before = set(os.listdir("/dev/shm"))
    stack = Stack(tmp_path / "run", ctx=CTX, slots=4)
    together(stream(stack.url, prompt=prompt(0), max_tokens=5))
    children = psutil.Process(stack.process.pid).children(recursive=True)
    assert len(children) >= 4
    stack.stop(signal.SIGKILL)
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert set(os.listdir("/dev/shm")) == before
    with Stack(tmp_path / "run", ctx=CTX, slots=4) as again:  # what the killed server left does not block the next
        assert len(together(stream(again.url, prompt=prompt(0), max_tokens=5))[0].ids) == 5
        second = psutil.Popen(
            [*psutil.Process(again.process.pid).cmdline()[:3], "serve", "--run-dir", str(tmp_path / "run"), "--port", "0"],
            stderr=-1, stdout=-1, text=True,
        )  # fmt: skip
        _, said = second.communicate(timeout=60)
        assert second.returncode != 0 and "run-dir" in said.splitlines()[-1], said
    left = os.listdir(tmp_path / "run") if (tmp_path / "run").exists() else []
    assert not [name for name in left if name.endswith(".sock")]
