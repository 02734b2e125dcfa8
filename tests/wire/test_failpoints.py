"""Failpoints: off they cost nothing and do nothing; each of the table is in the code where the table says."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from wire import failpoints
from wire.config import ConfigError

ROOT = Path(__file__).parent.parent.parent


def run(code: str, value: str) -> subprocess.CompletedProcess:
    environ = os.environ | {failpoints.VARIABLE: value}
    return subprocess.run([sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_table_and_the_code_name_the_same_places():
    found = set()
    for package in ("wire", "router", "gpu_worker", "hostcache", "sim", "parkade"):
        for path in (ROOT / package).rglob("*.py"):
            source = path.read_text()
            names = set(re.findall(r'failpoints\.hit\("(\w+)"', source))
            names |= set(re.findall(r'else "(\w+)"\)', " ".join(re.findall(r'failpoints\.hit\("\w+" if .*', source))))
            if table := re.search(r"^_FAILPOINTS.* = \{(.*)\}$", source, re.MULTILINE):
                names |= set(re.findall(r'"(\w+)"', table[1]))
            found |= {(name, str(path.relative_to(ROOT))) for name in names}
    assert found == {(name, file) for name, (file, _) in failpoints.POINTS.items()}


def test_unset_it_does_nothing():
    assert not failpoints.armed
    for name in failpoints.POINTS:
        assert failpoints.hit(name) is None


@pytest.mark.parametrize(("action", "status"), [("", -signal.SIGKILL), (":kill", -signal.SIGKILL), (":raise", 1)])
def test_the_wanted_time_fails(action, status):
    code = "from wire.failpoints import hit\nfor i in range(9):\n    hit('copy'); hit('load'); print(i, flush=True)"
    done = run(code, f"copy:4{action},load:99")
    assert done.returncode == status
    assert done.stdout.split() == ["0", "1", "2"]


def test_a_stopped_process_goes_on():
    code = "from wire.failpoints import hit\nhit('decode')\nprint('on')"
    environ = os.environ | {failpoints.VARIABLE: "decode:1:stop"}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60)[0] == "on\n"


@pytest.mark.parametrize("command", ["hostcache", "router", "parkade serve"])
def test_a_process_with_a_mistake_ends_with_one_line(command):
    code = f"import runpy, sys\nsys.argv = {command.split()}\nrunpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    done = run(code, "nowhere:1")
    assert done.returncode == (1 if "serve" in command else 78)
    assert done.stderr.startswith("error: PARKADE_FAIL=nowhere:1: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["copy", "copy:0", "copy:x", "copy:1:burn", "nowhere:1", "copy:1,,", "copy:-1", "copy:" + "9" * 5000]
)
def test_a_mistake_is_one_line(text):
    with pytest.raises(ConfigError, match="is not NAME:N"):
        failpoints.counted(text)


def test_a_file_arms_a_place_once(tmp_path):
    hit = failpoints.from_folder(tmp_path)
    hit("copy")
    (tmp_path / "copy").write_text("raise\n")
    hit("load")
    with pytest.raises(failpoints.Failpoint, match="failpoint copy"):
        hit("copy")
    hit("copy")
    assert list(tmp_path.iterdir()) == []
