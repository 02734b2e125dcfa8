"""A server of one's own for as long as a command runs: `parkade demo` and `parkade bench --serve`."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from parkade.api import ApiError
from parkade.supervisor import die_with
from wire.config import FIELDS, env_name

STOP_S = 20.0


@contextlib.contextmanager
def started(flags: Sequence[str]) -> Iterator[str]:
    """Run `parkade serve FLAGS` on a free port and yield its URL; it is stopped at the end. ApiError if it does not start.

    Settings come from the flags alone: what the environment says to other servers does not count.
    """
    others = {env_name(field.name) for field in FIELDS} | {"PARKADE_CONFIG"}
    environ = {name: value for name, value in os.environ.items() if name not in others}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "parkade", "serve", "--port", "0", *flags],
            stdout=subprocess.PIPE, stderr=log, text=True, env=environ, preexec_fn=die_with(os.getpid()),
        )  # fmt: skip
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line.startswith("ready "):
                process.wait()
                log.seek(0)
                words = log.read().strip().splitlines() or ["it said nothing"]
                raise ApiError(f"the server did not start: {words[-1].removeprefix('error: ')}")
            yield line.split()[1]
        finally:
            _stop(process)


def _stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
