"""A container with a systemd of its own for tests: Debian from debootstrap, this checkout and this Python laid into it.

Root, debootstrap and systemd-nspawn are needed (apt install debootstrap systemd-container). The first build takes about a minute
and is kept in build/. The container shares the network: what listens there is reached as here.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
BASE = ROOT / "build" / "container-bookworm"
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
PYTHON = f"/opt/python/bin/python{sysconfig.get_python_version()}"
ENVIRONMENT = "PYTHONPATH=/opt/parkade:/opt/packages\nLD_LIBRARY_PATH=/opt/python/lib\nPYTHONDONTWRITEBYTECODE=1\n"
LIMIT_S = 120


class Unavailable(Exception):
    """Why there can be no container here."""


def build() -> Path:
    """The base system, made once. Unavailable if it cannot be made here."""
    if os.geteuid():
        raise Unavailable("only root can start a container")
    for command in ("debootstrap", "systemd-nspawn", "nsenter"):
        if not shutil.which(command):
            raise Unavailable(f"{command} is missing (apt install debootstrap systemd-container)")
    if not BASE.exists():
        part = BASE.with_name(BASE.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.parent.mkdir(exist_ok=True)
        command = ["debootstrap", "--variant=minbase", "--include=systemd,dbus", "bookworm", str(part), MIRROR]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise Unavailable(f"debootstrap: {(done.stdout + done.stderr).strip().splitlines()[-1:]}")
        for name in ("python", "parkade", "packages"):
            (part / "opt" / name).mkdir()
        (part / "etc/default/parkade").write_text(ENVIRONMENT)
        part.rename(BASE)
    return BASE


class Container:
    """A booted copy of the base system. `with Container(folder) as machine:` ends it with all that runs in it."""

    def __init__(self, folder: Path) -> None:
        base = build()
        self.leader = 0
        self.root = folder / "root"
        subprocess.run(["cp", "-a", base, self.root], check=True)
        mounts = {"python": sys.base_prefix, "parkade": ROOT, "packages": sysconfig.get_path("purelib")}
        self._log = (folder / "console").open("w+")
        command = [
            "systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--boot", "--console=pipe", f"--directory={self.root}",
            "--system-call-filter=@memlock", *(f"--bind-ro={source}:/opt/{name}" for name, source in mounts.items()),
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT)
        try:
            self.leader = self._first_process()
            self.until(lambda: self.run("systemctl", "is-system-running", "--wait").strip() in ("running", "degraded"), "booted")
            if f"{sys.version_info.major}." not in self.run("env", *ENVIRONMENT.split(), PYTHON, "--version"):
                raise Unavailable("this Python does not run in a container of Debian 12")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _first_process(self) -> int:
        """The container's process 1, by its number here."""
        deadline = time.monotonic() + LIMIT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.name() == "systemd":
                        return child.pid
        raise Unavailable(f"no systemd started: {self.console()[-500:]}")

    def run(self, *command: str) -> str:
        """What a command says in the container, errors too."""
        inside = ["nsenter", "-t", str(self.leader), "-m", "-u", "-i", "-n", "-p", "-r", "-w", *command]
        done = subprocess.run(inside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S)
        return done.stdout

    def shown(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", "-p", name, unit).strip()

    def journal(self, unit: str) -> str:
        """What a unit has said since the start."""
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit)

    def console(self) -> str:
        """What systemd-nspawn and the console said."""
        self._log.flush()
        return Path(self._log.name).read_text()

    def until(self, condition, what: str) -> None:
        """Ask until `condition()` holds."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, f"the container ended: {self.console()[-2000:]}"
            assert time.monotonic() < deadline, f"still not: {what}"

    def close(self) -> None:
        """End its process 1, and with it everything in it; then its files. Without systemd-nspawn it would live on."""
        if self.leader:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.leader, signal.SIGKILL)
        else:
            self.process.kill()
        self.process.wait(LIMIT_S)
        self._log.close()
        shutil.rmtree(self.root, ignore_errors=True)
