"""`python -m tests.system.nemesis --seed N --seconds 15 --runs K --model toy`: runs with the seeds N to N + K - 1."""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.system.nemesis.runner import Server, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.system.nemesis", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--model", default="toy", choices=("toy", "bard"))
    parser.add_argument("--per-server", type=int, default=20, help="runs on one server before the next is started")
    parser.add_argument("--scale", type=float, help="of the lengths of texts (1 with toy; bard is slow: 0.15)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the server, e.g. park_ram=0"
    )
    parser.add_argument("--keep", type=Path, help="folder for histories and logs, those of good runs too")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="nemesis-"))
    scale = options.scale or (1.0 if options.model == "toy" else 0.15)
    settings: dict[str, object] = {"device": ",".join(["cpu"] * options.workers)}
    settings |= dict(pair.split("=", 1) for pair in options.set)
    figures: Counter = Counter()
    bad: list[int] = []
    began = time.monotonic()
    for first in range(options.seed, options.seed + options.runs, options.per_server):
        seeds = range(first, min(first + options.per_server, options.seed + options.runs))
        server = Server(folder / str(first), options.model, settings, scale)
        try:
            for seed in seeds:
                outcome = run(server, seed, options.seconds)
                figures += outcome.figures
                print(f"seed {seed}: {'; '.join(outcome.broken) or 'all promises kept'}", flush=True)
                if outcome.broken:
                    bad.append(seed)
                    where = f"history {folder}/{first}/history-{seed}.jsonl, log {folder}/{first}/run.log"
                    again = f"python -m tests.system.nemesis --seed {seed} --seconds {options.seconds:g} --scale {scale}"
                    again += f" --model {options.model} --workers {options.workers}"
                    again += "".join(f" --set {pair}" for pair in options.set)
                    print(f"  again: {again}\n  {where}", flush=True)
        finally:
            left = server.stop()
            figures["damaged images"] += server.stack.log.count("of its image is damaged")
            figures["failpoints raised"] += server.stack.log.count("Failpoint: failpoint")
        if left:
            bad.append(first)
            print(f"server of seeds {first} to {seeds[-1]}: {'; '.join(left)}", flush=True)
    print(f"{options.runs} runs in {time.monotonic() - began:.0f} s, {len(bad)} bad{': ' + str(bad) if bad else ''}")
    print(", ".join(f"{name} {count}" for name, count in sorted(figures.items())))
    if not bad and options.keep is None:
        shutil.rmtree(folder)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
