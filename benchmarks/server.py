"""Starts a server for a benchmark and stops it again."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import httpx

from parkade.supervisor import die_with

START_TIMEOUT_S = 90


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def parkade_command(port: int, run_dir: Path, **settings: object) -> list[str]:
    """`parkade serve` with these settings, e.g. park_ram="16MiB"; the model is SmolLM2 unless they name another."""
    command = [sys.executable, "-m", "parkade", "serve", "--port", str(port), "--run-dir", str(run_dir)]
    for name, value in settings.items():
        command += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return command


@contextlib.contextmanager
def server(command: list[str], port: int, log: Path) -> Iterator[str]:
    """Run a server until the block ends; its base URL once /health says 200."""
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=die_with(os.getpid()))
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise click.ClickException(f"{command[0]} did not start:\n{log.read_text()[-1500:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url + "/health", timeout=2).status_code == 200
    return False
