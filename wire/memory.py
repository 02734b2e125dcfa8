"""How much memory there is for the budget: of the machine and of the control group, version 1 or 2."""

from pathlib import Path

from wire.config import ConfigError, size_bytes

GIB = 1 << 30
AUTO_BYTES = 8 * GIB
RESERVE_BYTES = 128 << 20  # of the machine's available memory, never taken for a slab


def budget_bytes(park_ram: str, total: int) -> tuple[int, str]:
    """(budget, a line that says how it came about) of `--park-ram` where `total` bytes exist; ConfigError if it is larger."""
    if park_ram == "auto":
        budget = min(AUTO_BYTES, total // 4)
        why = "8 GiB" if budget == AUTO_BYTES else f"a quarter of the {_gib(total)} of memory, less than 8 GiB"
        return budget, f"budget {_gib(budget)} (auto: {why})"
    budget = size_bytes(park_ram)
    if budget > total:
        raise ConfigError(
            f"--park-ram {park_ram} is {budget} bytes ({_gib(budget)}), but the memory here is {total} bytes ({_gib(total)}); "
            "choose less, or auto"
        )
    return budget, f"budget {_gib(budget)}" if budget else "budget 0: every park is recomputed"


def total_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may use at most: the machine's, or the smallest limit of its control groups."""
    return min([_meminfo(proc, "MemTotal"), *_group_limits(proc, groups)])


def available_bytes(proc: Path = Path("/proc")) -> int:
    """Memory that can be taken now without pushing others out. The group's limit was compared at start."""
    return _meminfo(proc, "MemAvailable")


def _meminfo(proc: Path, name: str) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {name}")


def _group_limits(proc: Path, groups: Path) -> list[int]:
    """The limits of the process's groups and all groups above them; an outer group may be invisible, then the mount's root."""
    limits: list[int] = []
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2, alone or beside version 1
            places, name = [groups, groups / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            places, name = [groups / "memory"], "memory.limit_in_bytes"
        else:
            continue
        for place in places:
            folder = place / path.lstrip("/")
            for group in (folder, *folder.parents):
                limits += _limit(group / name)
                if group == place:
                    break
    return limits


def _limit(file: Path) -> list[int]:
    try:
        text = file.read_text().strip()
    except OSError:  # no such group in this mount, or a root group without a limit
        return []
    return [int(text)] if text.isdigit() else []


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):.1f} MiB"
