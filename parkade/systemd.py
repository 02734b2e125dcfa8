"""`parkade systemd`: installs the units, packs them, and waits for a drain on behalf of a worker's unit."""

import asyncio
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from parkade.units import OLDEST, SOURCES, Machine, budget_bytes, units
from parkade.units import with_settings as edited
from router.client import Client
from wire import memory, sockets
from wire.config import Config, ConfigError, load

UNITS = "etc/systemd/system"
SETTINGS = "etc/parkade/config.toml"
USERS = "etc/sysusers.d/parkade.conf"
FIRST_ANSWER_S = 1.0  # both are told at the same moment; by then the router has heard it
ASK_S = 2.0
AGAIN_S = 0.1
SILENT = 2  # questions without an answer after which a router that drained is gone; one may have been too much for it
CONTROL = """Package: parkade-units
Version: {version}
Section: net
Priority: optional
Architecture: all
Depends: systemd (>= {oldest})
Maintainer: Parkade <parkade@localhost>
Description: units for systemd that serve a language model with Parkade
 Parkade itself is installed with pip, in /opt/parkade/.venv.
"""
SCRIPTS = {
    "postinst": "systemd-sysusers parkade.conf\nif [ -d /run/systemd/system ]; then systemctl daemon-reload; fi\n",
    "prerm": 'if [ "$1" = remove ] && [ -d /run/systemd/system ]; then systemctl disable --now parkade.target; fi\n',
    "postrm": "if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi\n",
}


def install(root: str, gpus: str | None, park_ram: str | None, python: str | None, check: bool) -> int:
    """Write units, settings and the user's entry below `root`, or with `check` only compare. The exit status; ConfigError for
    settings that cannot be. Nothing is written that systemd has something to say about."""
    place = Path(root)
    files = rendered(place, gpus, park_ram, Machine(python or sys.executable, version(), memory.total_bytes()))
    said = verify({Path(name).name: text for name, text in files.items() if name.startswith(UNITS)})
    if said is None:
        print("not verified: systemd-analyze is missing", file=sys.stderr)
    elif said:
        print(said, file=sys.stderr)
        return 1
    if check:
        return _compare(place, files)
    for name, text in files.items():
        path = place / name
        _folder(path.parent)
        part = path.with_name(f".{path.name}.part")
        part.write_text(text)
        part.chmod(0o644)
        part.replace(path)
        print(path)
    print("next: systemd-sysusers && systemctl daemon-reload && systemctl enable --now parkade.target")
    return 0


def _folder(path: Path) -> None:
    """Make it and what it lies in, where they are not there: for everybody to look into, whatever the umask says. The services'
    user has to read the settings."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o755)


def rendered(root: Path, gpus: str | None, park_ram: str | None, machine: Machine) -> dict[str, str]:
    """All files by their path below `root`. Settings that are there already are kept, but for what the arguments say."""
    path = root / SETTINGS
    try:
        text = path.read_text() if path.exists() else (SOURCES / "config.toml").read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    values = {}
    if gpus is not None:
        if not re.fullmatch(r"\d{1,3}(,\d{1,3})*", gpus):
            raise ConfigError(f"--gpus {gpus!r} must be numbers of cards, such as 0,1")
        values["device"] = ",".join(f"cuda:{card}" for card in gpus.split(","))
    if park_ram is not None:
        values["park_ram"] = park_ram
    text = edited(text, values)
    config = settings_of(text)
    if config.park_ram == "auto":  # the host cache would take a share of its own MemoryMax=
        text = edited(text, {"park_ram": f"{budget_bytes(config, machine.memory_bytes) >> 20}MiB"})
        config = settings_of(text)
    files = {f"{UNITS}/{name}": unit for name, unit in units(config, machine).items()}
    return files | {SETTINGS: text, USERS: (SOURCES / "parkade.sysusers").read_text()}


def settings_of(text: str) -> Config:
    """The settings in this text, whatever the environment says."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        try:
            return load({}, file.name, {})
        except ConfigError as error:
            raise ConfigError(str(error).replace(file.name, "config.toml")) from None


def version() -> int:
    """Of systemd here; the oldest one that is known to do where there is none."""
    systemctl = shutil.which("systemctl")
    if not systemctl:
        return OLDEST
    said = subprocess.run([systemctl, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.match(r"systemd (\d+)", said)
    return int(match[1]) if match else OLDEST


def verify(texts: Mapping[str, str]) -> str | None:
    """What `systemd-analyze verify` has to say of units, by name; None if it is not here. It warns of typos with status 0."""
    analyze = shutil.which("systemd-analyze")
    if not analyze:
        return None
    with tempfile.TemporaryDirectory(prefix="parkade-") as folder:
        for name, text in texts.items():  # templates need an instance; what they start may lie in another root
            text = re.sub(r"^(Exec\w+=[+-]*)/\S+/python\S*", rf"\g<1>{sys.executable}", text, flags=re.MULTILINE)
            (Path(folder) / name).write_text(text)
        names = sorted(f"{folder}/{name.replace('@.', '@cpu0.')}" for name in texts)
        done = subprocess.run([analyze, "verify", "--man=no", *names], capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip()
    return said if said or not done.returncode else f"systemd-analyze verify ended with status {done.returncode}"


def _compare(root: Path, files: Mapping[str, str]) -> int:
    """Print how what is installed differs; 1 if it does."""
    differs = False
    for name, text in files.items():
        path = root / name
        there = path.read_text(errors="replace") if path.exists() else ""
        lines = list(difflib.unified_diff(there.splitlines(), text.splitlines(), str(path), "as it should be", lineterm=""))
        print("\n".join(lines) if lines else f"{path}: as it should be")
        differs |= bool(lines)
    return int(differs)


def deb(folder: str) -> int:
    """Pack the units, for any machine and for the CPU, as FOLDER/parkade-units_VERSION_all.deb. ConfigError without dpkg-deb."""
    dpkg = shutil.which("dpkg-deb")
    if not dpkg:
        raise ConfigError("dpkg-deb is missing; it comes with Debian")
    number = metadata.version("parkade")
    settings = (SOURCES / "config.toml").read_text()
    files = {f"usr/lib/systemd/system/{name}": text for name, text in units(settings_of(settings), Machine()).items()}
    files |= {"usr/lib/sysusers.d/parkade.conf": (SOURCES / "parkade.sysusers").read_text(), SETTINGS: settings}
    files |= {"DEBIAN/control": CONTROL.format(version=number, oldest=OLDEST), "DEBIAN/conffiles": f"/{SETTINGS}\n"}
    files |= {f"DEBIAN/{name}": f"#!/bin/sh\nset -e\n{body}" for name, body in SCRIPTS.items()}
    with tempfile.TemporaryDirectory(prefix="parkade-") as tree:
        os.chmod(tree, 0o755)
        for name, text in files.items():
            path = Path(tree) / name
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            path.write_text(text)
            path.chmod(0o755 if path.name in SCRIPTS else 0o644)
        package = Path(folder) / f"parkade-units_{number}_all.deb"
        package.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([dpkg, "--build", "--root-owner-group", tree, package], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(done.stderr.strip() or f"dpkg-deb ended with status {done.returncode}")
    print(package)
    return 0


def wait_drained(config: Config) -> int:
    """For ExecStop= of a worker: if the router drains, wait until it is gone; else return soon. systemd bounds it."""
    return asyncio.run(_wait_drained(sockets.client_address(config.run_dir)))


async def _wait_drained(address: str) -> int:
    async with Client(address) as client:
        loop = asyncio.get_running_loop()
        decided_at = loop.time() + FIRST_ANSWER_S
        drains, silent = False, 0
        while True:
            try:
                drains, silent = (await client.status(ASK_S)).draining, 0
            except (TimeoutError, ConnectionError):
                silent += 1
            if silent == SILENT or (not drains and (silent or loop.time() >= decided_at)):
                return 0
            await asyncio.sleep(AGAIN_S)
