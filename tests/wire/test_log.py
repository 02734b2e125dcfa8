"""The log never holds a process up: with a reader that stopped, a full disk or no reader at all lines are dropped and counted."""

import os
import subprocess
import sys

import pytest

from wire.service import LOG_LINES

TALK = """
import sys
from wire.service import log, open_log
open_log("talker")
for number in range(int(sys.argv[1])):
    log.warning("line %d %s", number, "x" * 200)
print("done", flush=True)
sys.stdin.read()
log.warning("the last")
"""
MANY = 20 * LOG_LINES


def talker(stderr: int) -> subprocess.Popen:
    """A process that logs MANY lines, says so, waits for the end of its stdin, logs one more and ends."""
    command = [sys.executable, "-c", TALK, str(MANY)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True)


def test_a_reader_that_stopped_holds_nobody_up():
    read_end, write_end = os.pipe()
    with talker(write_end) as process:
        os.close(write_end)
        assert process.stdout.readline() == "done\n"  # nobody has read a line
        said = dropped = 0
        with os.fdopen(read_end) as reader:
            while said + dropped < MANY:
                line = reader.readline()
                assert line, "it ended"
                if "lines dropped" in line:
                    dropped += int(line.split()[0][1:])
                else:
                    said += 1
            assert dropped
            process.stdin.close()
            assert reader.readline().endswith(" the last\n")
    assert process.returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
def test_a_full_disk_is_survived():
    full = os.open("/dev/full", os.O_WRONLY)
    with talker(full) as process:
        os.close(full)
        assert process.stdout.readline() == "done\n"
        process.stdin.close()


def test_a_reader_that_is_gone_is_survived():
    read_end, write_end = os.pipe()
    with talker(write_end) as process:
        os.close(write_end)
        os.close(read_end)
        assert process.stdout.readline() == "done\n"
        process.stdin.close()
