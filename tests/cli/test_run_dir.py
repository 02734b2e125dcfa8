"""The run directory: fresh ones vanish, given ones are held by one server at a time and cleaned of what a killed one left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parkade.run_dir import run_dir
from wire.config import ConfigError
from wire.sockets import client_address, hostcache_path, worker_address

SOCKETS = [address("").removeprefix("ipc://").removeprefix("/") for address in (client_address, worker_address, hostcache_path)]


def test_a_fresh_one_is_private_and_vanishes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path)) if len(str(tmp_path)) < 80 else monkeypatch.delenv(
        "XDG_RUNTIME_DIR", False
    )
    with run_dir("") as path:
        assert os.stat(path).st_mode & 0o777 == 0o700
        Path(path, "client.sock").touch()
    assert not os.path.exists(path)


def test_a_given_one_is_made_and_left_clean(tmp_path: Path) -> None:
    with run_dir(str(tmp_path / "a" / "b")) as path:
        assert os.stat(path).st_mode & 0o777 == 0o700
        for name in SOCKETS:
            Path(path, name).touch()
    assert not set(os.listdir(path)) & set(SOCKETS)


def test_leftovers_of_a_killed_server_are_cleaned(tmp_path: Path) -> None:
    holder = (
        "import signal\nfrom parkade.run_dir import run_dir\n"
        f"with run_dir({str(tmp_path)!r}):\n    print(1, flush=True)\n    signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        with pytest.raises(ConfigError, match=rf"in use by a living server \(process {process.pid}\)"), run_dir(str(tmp_path)):
            pass
        for name in SOCKETS:
            (tmp_path / name).touch()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert set(SOCKETS) < set(os.listdir(tmp_path))
    with run_dir(str(tmp_path)):
        assert not set(os.listdir(tmp_path)) & set(SOCKETS)


@pytest.mark.parametrize("path", ["/proc/nowhere", "/dev/null", "/tmp/" + "x" * 120, "/tmp/" + "\xe9" * 60, "/tmp/\udcff"])
def test_one_that_cannot_be_is_one_line(path: str) -> None:
    with pytest.raises(ConfigError, match="--run-dir"), run_dir(path):
        pass


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_one_where_others_may_write_is_refused_before_anything_is_in_it(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match="give a folder of its own"), run_dir(str(tmp_path)):
        pass
    assert os.listdir(tmp_path) == []


def test_another_users_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="another user's"), run_dir(str(tmp_path)):
        pass
    assert os.listdir(tmp_path) == []
