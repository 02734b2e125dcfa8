"""`python -m sim --schedules 2000 --seed 1`: random schedules through the real scheduler; a failing one says how to repeat it."""

import argparse
import sys
import time
import traceback
from collections import Counter

from sim.case import draw_case
from sim.world import World


def sweep(first_seed: int, schedules: int) -> Counter[str]:
    """Play the schedules of `schedules` seeds and add up what happened. An error carries the command that repeats it."""
    total: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + schedules):
        try:
            total += World(draw_case(seed)).run()
        except Exception as error:  # any failure of the policy under test: the seed belongs to it
            error.add_note(f"repeat it with: python -m sim --schedules 1 --seed {seed}")
            raise
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sim", description=__doc__)
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule; the next ones count up")
    options = parser.parse_args()
    began = time.perf_counter()
    try:
        total = sweep(options.seed, options.schedules)
    except Exception:  # noqa: BLE001  printed whole, with its seed; the exit status says that it failed
        traceback.print_exc()
        return 1
    took_s = time.perf_counter() - began
    print(f"{options.schedules} schedules from seed {options.seed} hold, {took_s:.1f} s")
    width = max(map(len, total))
    for name in sorted(total):
        print(f"  {name:<{width}}  {total[name]:>9,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
