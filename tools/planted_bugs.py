"""Plants bugs into the policy, one at a time, and shows that the simulator or the stories notice each.

`python tools/planted_bugs.py`. Each bug replaces a piece of source in a temporary copy. A bug that nobody notices, or a piece of
source that is no longer there, is a failure (exit status 1).
"""
# ruff: noqa: E501  pieces of source stand as they are in their files

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).resolve().parent.parent
POLICY = Path("gpu_worker/policy")
COPIED = ("gpu_worker", "wire", "sim", "tests/__init__.py", "tests/policy", "pyproject.toml")
SCHEDULES = 500
LIMIT_S = 600  # a bug that hangs is noticed by this; a busy machine alone must not be


class Bug(Struct, frozen=True):
    title: str
    file: str
    old: str
    new: str


BUGS = [
    Bug("blocks change hands while the save still reads them", "book.py",
        "        self.actions.append(Save(seq.request_id, lease, tuple(seq.blocks), seq.computed, seq.state_slot))",
        "        self.actions.append(Save(seq.request_id, lease, tuple(seq.blocks), seq.computed, seq.state_slot))\n        self._give_back_blocks(seq)"),
    Bug("a resuming sequence runs before its image is there", "book.py",
        "            self._move(seq, State.RESUMING)", "            self._move(seq, State.RUNNING)"),
    Bug("a load starts at the wrong block", "book.py",
        "            self.actions.append(Load(seq.request_id, seq.lease, blocks, first, seq.state_slot))",
        "            self.actions.append(Load(seq.request_id, seq.lease, blocks, 0, seq.state_slot))"),
    Bug("the image misses its last, partly filled block", "book.py",
        "        image_blocks = self.pool.blocks_for(seq.computed)\n        self.pool.release",
        "        image_blocks = max(1, seq.computed // self.pool.block_size)\n        self.pool.release"),
    Bug("a failed load is believed", "book.py",
        "            seq.computed = seq.published * self.limits.block_size", "            pass"),
    Bug("leases survive the host cache's death", "book.py", "            seq.lease = None\n            if seq.state is State.PARKED",
        "            if seq.state is State.PARKED"),
    Bug("a grant that nobody waits for is kept", "book.py",
        "        if seq is None:\n            self.actions.append(ReleaseLease(lease))\n            return", "        if seq is None:\n            return"),
    Bug("a lease is not given back after the load", "book.py", "        self._drop_lease(seq)\n        pause = pause_s(seq, now)",
        "        pause = pause_s(seq, now)"),
    Bug("a finished sequence keeps its lease", "book.py", "        self._drop_lease(seq)\n        self._give_back_blocks(seq)",
        "        self._give_back_blocks(seq)"),
    Bug("drafts are kept through a park", "book.py", "        seq.draft = 0\n", ""),
    Bug("drafts are kept over a step", "scheduler.py",
        "            self._count_drafts(seq, row.draft, min(row.draft, len(result.tokens) - 1, len(new)))\n        seq.draft = 0",
        "            self._count_drafts(seq, row.draft, min(row.draft, len(result.tokens) - 1, len(new)))"),
    Bug("drafts behind the very first token, where no hidden row is", "drafting.py", " and seq.computed > 0", ""),
    Bug("drafts beyond the last token", "drafting.py", "    left = seq.remaining - 1", "    left = seq.remaining"),
    Bug("drafts across the end of min_tokens", "drafting.py",
        "        left = min(left, seq.min_len - len(seq.tokens) - 1)", "        pass"),
    Bug("drafts do not count in the demand", "preemption.py",
        "len(seq.tokens) + seq.draft) - len(seq.blocks)", "len(seq.tokens)) - len(seq.blocks)"),
    Bug("who comes in does not count in the rows with drafts", "scheduler.py",
        "                drafting.share_rows(book.running.values(), self.limits)", "                pass"),
    Bug("an accepted draft is counted once too often", "scheduler.py",
        "totals.accepted[position] += position < accepted", "totals.accepted[position] += position <= accepted"),
    Bug("what agrees behind an end token counts as accepted", "scheduler.py",
        "min(row.draft, len(result.tokens) - 1, len(new))", "min(row.draft, len(result.tokens) - 1)"),
    Bug("an accepted draft is computed again", "scheduler.py", "row.start + row.count + max(0, len(new) - 1)", "row.start + row.count"),
    Bug("refused drafts teach nothing", "drafting.py", "            likely[depth] -= likely[depth] >> WEIGHT_BITS", "            pass"),
    Bug("who has stopped drafting never tries again", "drafting.py",
        "            likely[depth] += (LIKELY_PRIOR - likely[depth]) >> DRIFT_BITS", "            pass"),
    Bug("a state slot is given back while the save still reads it", "book.py",
        "        self.actions.append(Save(seq.request_id, lease, tuple(seq.blocks), seq.computed, seq.state_slot))",
        "        self.actions.append(Save(seq.request_id, lease, tuple(seq.blocks), seq.computed, seq.state_slot))\n        self._give_back_state(seq)"),
    Bug("the image misses the state", "book.py",
        "tuple(seq.blocks), seq.computed, seq.state_slot))", "tuple(seq.blocks), seq.computed))"),
    Bug("a resume brings no state", "book.py", "seq.lease, blocks, first, seq.state_slot))", "seq.lease, blocks, first))"),
    Bug("a resume brings the state to another's slot", "book.py",
        "seq.lease, blocks, first, seq.state_slot))", "seq.lease, blocks, first, 0))"),
    Bug("a row runs on the state of another", "plan.py", "        seq.state_slot,\n", "        min(seq.state_slot, 0),\n"),
    Bug("two sequences share a state slot", "book.py",
        "            seq.state_slot = self._free_states.popleft()", "            seq.state_slot = self._free_states[0]"),
    Bug("a finished sequence keeps its state slot", "book.py",
        "        self._give_back_state(seq)\n        if seq.seat >= 0:", "        if seq.seat >= 0:"),
    Bug("somebody comes in though no state slot is free", "book.py",
        "        return free if self._free_states is None else min(free, len(self._free_states))", "        return free"),
    Bug("a resume claims only what it saved", "preemption.py",
        "    return min(len(seq.tokens) + 1 + limits.draft_max, limits.sequence_cells)",
        "    return max(1, seq.computed) if seq.parks else min(len(seq.tokens) + 1 + limits.draft_max, limits.sequence_cells)"),
    Bug("a hit takes the last token too", "preemption.py", "    cells = len(seq.tokens) - 1\n", "    cells = len(seq.tokens)\n"),
    Bug("a hit skips prompt log probabilities", "preemption.py", "        cells = min(cells, seq.scored)", "        pass"),
    Bug("the name of a block ignores what came before", "pool.py", "hashlib.blake2b(parent + array", "hashlib.blake2b(array"),
    Bug("a block that is given up can still be found", "pool.py", "        del self._block_of[self._digest_of[block]]\n", ""),
    Bug("sharing a block does not count", "pool.py", "            self._refs[block] += 1", "            self._refs[block] = 1"),
    Bug("the head of a chain is given up before its tail", "pool.py", "        for block in reversed(blocks):", "        for block in blocks:"),
    Bug("blocks are published before they are full", "book.py",
        "        full = seq.computed // self.limits.block_size", "        full = -(-seq.computed // self.limits.block_size)"),
    Bug("loading blocks can be found before they are verified", "book.py",
        "            seq.copying = True\n            self._move(seq, State.RESUMING)",
        "            seq.copying = True\n            self.publish(seq)\n            self._move(seq, State.RESUMING)"),
    Bug("the largest is not protected", "scheduler.py",
        "        keep = preemption.protected(chain(book.running.values(), book.resuming.values()), self._class_of)",
        "        keep = None"),
    Bug("more are parked than needed: parks under way are not counted", "preemption.py",
        "    return over - sum(pool.exclusive(seq.blocks) for seq in parking) if over > 0 else 0", "    return over"),
    Bug("an explicit park counts as one by pressure", "book.py",
        '        seq.pressure_parks += kind == "pressure"', "        seq.pressure_parks += 1"),
    Bug("waiting ones are let in beside a parked one", "preemption.py",
        "    return not seq.held and class_of(seq) <= candidate_class", "    return False"),
    Bug("a held one keeps everybody out", "preemption.py",
        "    return not seq.held and class_of(seq) <= candidate_class", "    return class_of(seq) <= candidate_class"),
    Bug("one larger than LOW never comes back", "scheduler.py",
        "            if alone or book.pool.used", "            if book.pool.used"),
    Bug("the next step of the running is not counted before a resume", "scheduler.py",
        "book.pool.used + demand + book.cost(seq) <= preemption.resume_line", "book.pool.used + book.cost(seq) <= preemption.resume_line"),
    Bug("an exhausted one comes back beside others", "scheduler.py",
        "            if book.free_slots <= 0 or (preemption.exhausted(seq) and not alone):", "            if book.free_slots <= 0:"),
    Bug("drafts are not given up before a park", "scheduler.py",
        "            drafting.cut_to(seq, book.pool.blocks_for(len(seq.tokens)), limits.block_size)\n        short", "            pass\n        short"),
    Bug("a result of a forgotten step is applied", "scheduler.py",
        "        if epoch != self._epoch or not self._in_step:", "        if not self._in_step:"),
    Bug("an accepted run is not cut at the end token", "scheduler.py",
        "            if token in seq.end_tokens and len(seq.tokens) + index >= seq.min_len:", "            if False:"),
    Bug("a cancel in the middle of a copy ends at once", "scheduler.py",
        "        if seq.cancelled and not seq.copying and seq.request_id not in self._in_step:",
        "        if seq.cancelled and seq.request_id not in self._in_step:\n            seq.copying = False"),
    Bug("a cancel in the middle of a step ends at once", "scheduler.py",
        "        if seq.cancelled and not seq.copying and seq.request_id not in self._in_step:", "        if seq.cancelled and not seq.copying:"),
    Bug("a prompt position is scored twice after a park", "scheduler.py",
        "        new = result.prompt_logprobs[seq.scored - row.start :]", "        new = list(result.prompt_logprobs)"),
    Bug("a replay starts its offsets anew", "scheduler.py", "        offset = seq.generated\n", "        offset = seq.generated - seq.base.completion_tokens\n"),
    Bug("recomputed tokens are not counted", "scheduler.py", "        seq.recomputed += recomputed\n", ""),
    Bug("a decode is left out for a prefill", "plan.py", "        if len(tokens) - start > 1:\n            behind.append(seq)\n        elif",
        "        if len(tokens) - start > 1 and budget > 1:\n            rows.append(_row(seq, start, min(len(tokens) - start, budget)))\n"
        "            budget -= rows[-1].count\n        elif budget <= 0:\n            pass\n        elif"),
    Bug("siblings never stop waiting when the first is gone", "book.py",
        "        self.actions.append(Finish(seq.request_id, reason, usage, error, code))\n        self.release_followers(seq.request_id)",
        "        self.actions.append(Finish(seq.request_id, reason, usage, error, code))"),
]  # fmt: skip


def planted(bug: Bug, folder: Path) -> None:
    """A copy of the product in `folder`, with the bug in it. ValueError if its source is not there exactly once."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, target)
    path = folder / POLICY / bug.file
    text = path.read_text()
    if text.count(bug.old) != 1:
        raise ValueError(f"{bug.title}: its source stands {text.count(bug.old)} times in {bug.file}")
    path.write_text(text.replace(bug.old, bug.new))


def noticed(command: list[str], folder: Path) -> str:
    """The last telling line of a command that fails, or '' when it passes."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S} s"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("E  ", "FAILED", "AssertionError", "KeyError", "ValueError"))]
    return (telling or lines or ["failed"])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="bugs whose title contains this")
    parser.add_argument("--schedules", type=int, default=SCHEDULES)
    options = parser.parse_args()
    simulator = [sys.executable, "-m", "sim", "--schedules", str(options.schedules), "--seed", "1"]
    stories = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/policy"]
    missed = 0
    print(f"{'bug':<66} {'simulator':<10} {'stories':<8} seconds")
    for bug in (bug for bug in BUGS if options.only in bug.title):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            planted(bug, folder)
            by_simulator, by_stories = noticed(simulator, folder), noticed(stories, folder)
        caught = ["caught" if line else "-" for line in (by_simulator, by_stories)]
        missed += not (by_simulator or by_stories)
        print(f"{bug.title:<66} {caught[0]:<10} {caught[1]:<8} {time.perf_counter() - began:5.1f}", flush=True)
        print(f"    {(by_simulator or by_stories or 'NOBODY NOTICED')[:150]}", flush=True)
    print(f"{missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
