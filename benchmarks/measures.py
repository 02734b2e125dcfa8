"""What several benchmarks count, and how they show the spread of it."""

import statistics

import psutil


def cpu_seconds(pid: int | None) -> float:
    """What a process has used so far, all its threads together and the kernel's share of their system calls."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def spread(values: list[float], digits: int = 0) -> str:
    """Median (least to most)."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
