"""What the four processes share at start: settings, exit status of a user's mistake, a log that never blocks, word to systemd."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from wire.service import LOG_LINES, USER_ERROR, notify

PROCESS = "import sys; from wire.service import run, log; sys.exit(run('router', lambda config: {body}))"
LIMIT_S = 30


def run(body: str, *arguments: str, **options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PROCESS.format(body=body), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **options)


def test_settings_come_from_flags_and_environment() -> None:
    done = run(
        "print(config.ctx, config.slots)", "--ctx", "64", env={**os.environ, "PARKADE_SLOTS": "3", "PARKADE_RUN_DIR": "/tmp"}
    )
    assert (done.returncode, done.stdout) == (0, "64 3\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--run-dir", "/tmp", "--ctx", "x"], "error: --ctx 'x': "),
        ([], "error: python -m router needs --run-dir"),
        (["--config", "/no/such"], "error: --config /no/such: "),
    ],
)
def test_a_users_mistake_is_one_line_and_status_78(arguments: list[str], line: str) -> None:
    done = run("None", *arguments)
    assert done.returncode == USER_ERROR
    assert done.stderr.startswith(line)
    assert len(done.stderr.splitlines()) == 1


def test_a_bug_is_a_traceback_and_not_78() -> None:
    done = run("1 // 0", "--run-dir", "/tmp")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ZeroDivisionError")


def test_the_log_is_written_before_the_end() -> None:
    done = run("[log.info('line %d', i) for i in range(100)] and None", "--run-dir", "/tmp")
    lines = done.stderr.splitlines()
    assert len(lines) == 100
    assert lines[99].endswith(" I router     line 99")


def test_a_reader_that_stops_does_not_stop_the_process() -> None:
    body = f"[log.info('%s', 'x' * 1000) for i in range({10 * LOG_LINES})] and print('through', flush=True)"
    command = [sys.executable, "-c", PROCESS.format(body=body), "--run-dir", "/tmp"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "through\n"  # while nobody reads stderr
        assert process.wait(LIMIT_S) == 0
        assert len(process.stderr.read()) < 10 * LOG_LINES * 1000


def test_word_to_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(LIMIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify("READY=1\nSTATUS=serving")
        assert systemd.recv(100) == b"READY=1\nSTATUS=serving"


def test_without_systemd_word_to_it_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify("READY=1")
