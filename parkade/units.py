"""The units for systemd as text, made from those in systemd/ for one machine: settings, cards, memory, version of systemd."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wire import memory
from wire.config import Config, ConfigError, devices

_INSTALLED = Path(__file__).parent / "unit_files"
SOURCES = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[1] / "systemd"  # or that of a checkout
SUFFIXES = (".service", ".socket", ".slice", ".target")
WORKER = "parkade-gpu-worker@.service"
PYTHON = "/opt/parkade/.venv/bin/python"
RUN_DIR = "/run/parkade"
OLDEST = 252  # of Debian 12
BESIDE_BYTES = 512 << 20  # of the host cache, beside its arena
SLICE_SHARE = 0.9  # MemoryMax= of parkade.slice
STOP_S = 15  # after the drain

# What this version of systemd brought, and older ones would warn about.
SINCE: dict[int, dict[str, tuple[str, ...]]] = {
    254: {
        # Also through a stop and a start. A host cache that stops after its workers gives the memory back before.
        "parkade-hostcache.service": ("FileDescriptorStorePreserve=yes",),
        WORKER: ("RestartSteps=5", "RestartMaxDelaySec=10"),
    },
}
# For workers without a card, in the place of the lines that open one.
_CLOSED = ("PrivateDevices=yes", "PrivateUsers=yes")
_OF_CARDS = ("PrivateDevices=", "PrivateUsers=", "DevicePolicy=", "DeviceAllow=", "LimitMEMLOCK=", "ExecStartPre=")


@dataclass(frozen=True)
class Machine:
    """What units depend on beside the settings."""

    python: str = PYTHON
    systemd: int = OLDEST
    memory_bytes: int = 0  # 0: not known, then there are no limits in bytes


def sources() -> dict[str, str]:
    """The units of systemd/ by name."""
    return {path.name: path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in SUFFIXES}


def units(config: Config, machine: Machine) -> dict[str, str]:
    """The units by name. ConfigError if these settings cannot be served under systemd."""
    if config.run_dir != RUN_DIR:
        raise ConfigError(f"run_dir is {config.run_dir!r}; under systemd the sockets lie in {RUN_DIR}")
    found = {name: text.replace(PYTHON, machine.python) for name, text in sources().items()}
    workers = devices(config.device)
    names = " ".join(WORKER.replace("@", f"@{worker}") for worker in workers)
    found["parkade.target"] = found["parkade.target"].replace(WORKER.replace("@", "@cpu0"), names)
    found["parkade-hostcache.service"] = found["parkade-hostcache.service"].replace(WORKER.replace("@", "@cpu0"), names)
    found["parkade-openai.socket"] = put(found["parkade-openai.socket"], "ListenStream", _address(config.host, config.port))
    for name in ("parkade-router.service", "parkade-openai.service", WORKER):
        found[name] = put(found[name], "TimeoutStopSec", str(math.ceil(config.drain_s) + STOP_S))
    found[WORKER] = _worker(found[WORKER], list(workers.values()))
    if config.listen:
        found["parkade-router.service"] = _with_network(found["parkade-router.service"])
    if machine.memory_bytes:
        budget = budget_bytes(config, machine.memory_bytes)
        text = put(found["parkade-hostcache.service"], "MemoryMax", str(budget + BESIDE_BYTES))
        found["parkade-hostcache.service"] = put(text, "MemoryLow", str(budget))
    for version, lines in SINCE.items():
        if machine.systemd >= version:
            for name, settings in lines.items():
                for key, _, value in (setting.partition("=") for setting in settings):
                    found[name] = put(found[name], key, value)
    return found


def budget_bytes(config: Config, memory_bytes: int) -> int:
    """The budget of the host cache on this machine. ConfigError if it leaves too little for the others."""
    budget, _ = memory.budget_bytes(config.park_ram, memory_bytes)
    if budget + BESIDE_BYTES > memory_bytes * SLICE_SHARE:
        raise ConfigError(
            f"park_ram {config.park_ram}: with {BESIDE_BYTES >> 20} MiB beside it that is more than {SLICE_SHARE:.0%} of the "
            f"{memory_bytes >> 20} MiB of memory, which is all that parkade.slice may have"
        )
    return budget


def put(text: str, key: str, value: str) -> str:
    """The unit with its only `key=` line set to `value`; a new line comes at the end of the second section."""
    line = f"{key}={value}"
    if re.search(rf"^{key}=", text, re.MULTILINE):
        return re.sub(rf"^{key}=.*$", line, text, count=1, flags=re.MULTILINE)
    head, install, tail = text.partition("\n[Install]")
    return f"{head}{line}\n{install}{tail}"


def with_settings(text: str, values: Mapping[str, str]) -> str:
    """The settings file with these values, as TOML strings; comments and all other lines stay as they are."""
    for key, value in values.items():
        line = f'{key} = "{value}"'
        there = rf'^{key}\s*=\s*("[^"\n]*"|[^#\n]*?)(?=\s*(#|$))'
        text, count = re.subn(there, line.replace("\\", r"\\"), text, count=1, flags=re.MULTILINE)
        if not count:
            text = f"{text.rstrip()}\n{line}\n"
    return text


def _worker(text: str, its_devices: list[str]) -> str:
    """The worker's unit for these devices: for cards with their numbers, for the CPU alone without a way to one."""
    cards = [device.removeprefix("cuda:") for device in its_devices if device.startswith("cuda:")]
    if its_devices == ["auto"]:
        return text
    if cards:
        return text.replace("nvidia-modprobe -u -c 0", "nvidia-modprobe -u" + "".join(f" -c {card}" for card in cards))
    kept: list[str] = []
    for line in text.splitlines():
        if not line.startswith(_OF_CARDS):
            kept.append(line)
            continue
        while kept[-1].startswith("#"):
            kept.pop()
        if line.startswith("PrivateDevices="):
            kept += _CLOSED
    return "\n".join(kept) + "\n"


def _with_network(text: str) -> str:
    """The router's unit for --listen: as it is, it has no network at all."""
    text = put(put(text, "PrivateNetwork", "no"), "RestrictAddressFamilies", "AF_UNIX AF_INET AF_INET6")
    return text.replace("IPAddressDeny=any\n", "")


def _address(host: str, port: int) -> str:
    """What ListenStream= takes: an address with its port, or the port alone for all of them."""
    if not port:
        raise ConfigError("port 0: under systemd the HTTP adapter needs a port of its own")
    if host in ("", "::"):
        return str(port)
    return f"[{host}]:{port}" if ":" in host else f"{'127.0.0.1' if host == 'localhost' else host}:{port}"
