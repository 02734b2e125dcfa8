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
        "        if seq is None:\n            self.actions.append(ReleaseLease(lease))\n", "        if seq is None:\n"),
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
    Bug("an explicit park counts as one by pressure", "book.py",
        '        seq.pressure_parks += kind == "pressure"', "        seq.pressure_parks += 1"),
    Bug("waiting ones are let in beside a parked one", "preemption.py",
        "    return not seq.held and class_of(seq) <= candidate_class", "    return False"),
    Bug("a held one keeps everybody out", "preemption.py",
        "    return not seq.held and class_of(seq) <= candidate_class", "    return class_of(seq) <= candidate_class"),
    Bug("drafts are not given up before a park", "scheduler.py",
        "            drafting.cut_to(seq, book.pool.blocks_for(len(seq.tokens)), limits.block_size)\n        over", "            pass\n        over"),
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
    Bug("watermark parks at the pool's end", "policies.py",
        "Policy(True, 1, high_line(limits), 1", "Policy(True, 1, pool, 1"),
    Bug("watermark lets in up to HIGH", "policies.py", "1, low_line(limits), newest_first=True", "1, high_line(limits), newest_first=True"),
    Bug("watermark parks the smallest first", "policies.py", ", newest_first=True)", ")"),
    Bug("lookahead looks one step ahead", "policies.py", "Policy(True, limits.lookahead_steps, pool,", "Policy(True, 1, pool,"),
    Bug("lookahead lets in without a gap", "policies.py",
        "enter_ahead(limits.lookahead_steps), pool)", "limits.lookahead_steps, pool)"),
    Bug("ondemand lets in without a gap", "policies.py", "Policy(True, 1, pool, enter_ahead(1), pool)", "Policy(True, 1, pool, 1, pool)"),
    Bug("off parks", "policies.py", "return Policy(False, 1, pool, 1, pool)", "return Policy(True, 1, pool, 1, pool)"),
    Bug("LOW may be HIGH", "policies.py", "high_line(limits) - 1)", "high_line(limits))"),
    Bug("a promotion makes better than the best present", "preemption.py",
        "    return max(top, seq.priority - promotions)", "    return seq.priority - promotions"),
    Bug("parks do not promote", "preemption.py", "seq.pressure_parks // PROMOTED_EACH_PARKS + seq.promoted", "seq.promoted"),
    Bug("waiting does not promote", "preemption.py", "    return int(max(0.0, now - seq.wants_since) // PROMOTED_EACH_S)", "    return 0"),
    Bug("holding oneself back promotes", "preemption.py",
        "    if seq.held or seq.state not in (State.WAITING, State.PARKED):", "    if seq.state not in (State.WAITING, State.PARKED):"),
    Bug("pressure parks without bound", "preemption.py", "    return seq.pressure_parks >= EXHAUSTED_AFTER", "    return False"),
    Bug("somebody joins an exhausted one", "entry.py", "        if self._exhausted_on_device():\n            return\n", ""),
    Bug("an exhausted one comes back beside others", "entry.py",
        "        return not preemption.exhausted(seq) and self._excess(seq) <= 0", "        return self._excess(seq) <= 0"),
    Bug("waiting too long counts from the first arrival on", "preemption.py",
        "    return 0 < max_park_s <= now - seq.wants_since and not seq.held", "    return 0 < max_park_s <= now and not seq.held"),
    Bug("nobody ages", "preemption.py", "    return 0 < max_park_s <= now - seq.wants_since and not seq.held", "    return False"),
    Bug("one that came back by its age is displaced", "entry.py",
        "                    seq.promoted = max(seq.promoted, seq.priority - book.top_class)", "                    pass"),
    Bug("one that has waited too long is passed", "entry.py", "            strict = aged or limits.resume_order", "            strict = limits.resume_order"),
    Bug("a better class goes before one that has waited too long", "entry.py",
        "            if not aged and not self._admit(number, now):", "            if not self._admit(number, now):"),
    Bug("a recompute that stalls goes on", "preemption.py", "    return seq.restarts > STALLED_AFTER", "    return False"),
    Bug("a new token is no progress", "scheduler.py", "        seq.restarts = 0\n", ""),
    Bug("one that stalled is resumed", "entry.py",
        "            if preemption.stalled(seq):\n                book.end_stalled(seq, now)\n            elif", "            if"),
    Bug("an operator's parks make it stall", "book.py", 'seq.restarts += seq.replaying and seq.kind != "explicit"', "seq.restarts += seq.replaying"),
    Bug("steps ahead do not count", "preemption.py", "max(seq.draft, min(steps, seq.end_len - known) - 1)", "seq.draft"),
    Bug("growth beyond the last token counts", "preemption.py", "min(steps, seq.end_len - known) - 1)", "steps - 1)"),
    Bug("drafts do not count in the demand", "preemption.py",
        "max(seq.draft, min(steps, seq.end_len - known) - 1)", "min(steps, seq.end_len - known) - 1"),
    Bug("the protected one is the smallest", "preemption.py", "(class_of(seq), -len(seq.tokens), seq.arrival), default", "(class_of(seq), len(seq.tokens), seq.arrival), default"),
    Bug("the protected one is of any class", "preemption.py", "(class_of(seq), -len(seq.tokens), seq.arrival), default", "(-len(seq.tokens), seq.arrival), default"),
    Bug("victims come from the best class first", "preemption.py", "            -class_of(seq),\n            seq.replaying", "            class_of(seq),\n            seq.replaying"),
    Bug("victims come from any class", "preemption.py", "            -class_of(seq),\n            seq.replaying", "            seq.replaying"),
    Bug("one that replays is a victim like any", "preemption.py", "            seq.replaying,\n", ""),
    Bug("protect_after is not heard", "preemption.py", "            seq.pressure_parks >= protect_after,\n", ""),
    Bug("victims: the oldest first", "preemption.py", "            -seq.arrival,\n", "            seq.arrival,\n"),
    Bug("victims that a later one has made needless are parked", "preemption.py",
        "        if over + lost <= max(0, over) and len(chosen) > seats:", "        if False:"),
    Bug("parks under way are not counted in the demand", "scheduler.py",
        "        return over - self.book.leaving().freed if over > 0 else 0", "        return over"),
    Bug("parks under way are not counted for who comes in", "book.py",
        "        for seq in self.parking.values():\n            leaving.add(seq.blocks)\n        return leaving", "        return leaving"),
    Bug("blocks that two leaving ones share are not counted", "pool.py",
        "            freed += left == self.pool.refs(block) and block not in self._kept\n        self.freed += freed", "            freed += self.pool.refs(block) == 1 and block not in self._kept\n        self.freed += freed"),
    Bug("blocks that stay in use are won by a park", "pool.py",
        "            freed += left == self.pool.refs(block) and block not in self._kept\n        self.freed += freed", "            freed += left == self.pool.refs(block)\n        self.freed += freed"),
    Bug("equals displace equals", "preemption.py", "if seq.priority > candidate.priority]", "if seq.priority >= candidate.priority]"),
    Bug("a promoted one is displaced", "preemption.py", "if class_of(seq) - promoted_by_next_park(seq) > number]", "]"),
    Bug("the park that makes an equal displaces", "preemption.py", "if class_of(seq) - promoted_by_next_park(seq) > number]", "if class_of(seq) > number]"),
    Bug("one that needs the device alone displaces others", "preemption.py", "    if not worse or exhausted(candidate):", "    if not worse:"),
    Bug("a better class displaces nobody", "preemption.py", "    if not worse or exhausted(candidate):", "    if True:"),
    Bug("off displaces", "entry.py", "        if not self.policy.parks or not (worse or book.parking):", "        if not (worse or book.parking):"),
    Bug("displaced though it is not enough", "entry.py", "        elif missing > 0 or len(chosen) < seats:\n            return False\n", ""),
    Bug("a better class gets no seat", "entry.py", "self._excess(seq) - leaving.freed, 1 - book.slots_to_come", "self._excess(seq) - leaving.freed, 0"),
    Bug("seats that become free are not counted", "entry.py", "1 - book.slots_to_come", "1 - book.free_slots"),
    Bug("one that fits alone only displaces nobody", "entry.py",
        "        if missing > 0 and len(order) == len(book.running) and not book.resuming:", "        if False:"),
    Bug("one larger than the gap never comes in", "entry.py", "        if not book.on_device:\n            return True\n", ""),
    Bug("growth of those on the device is not counted before a resume", "entry.py",
        "        return book.pool.used + self._ahead[steps] + book.cost(seq, steps) - line", "        return book.pool.used + book.cost(seq, steps) - line"),
    Bug("the second that comes in does not count the first", "entry.py",
        "            self._ahead[steps] += preemption.missing(seq, self.book.pool, steps)", "            pass"),
    Bug("a worse class passes a better one", "entry.py",
        "            if passed and number > passed[-1] or len(passed) == preemption.PASSED_AT_ONCE:", "            if len(passed) == preemption.PASSED_AT_ONCE:"),
    Bug("a plan looks at all that are parked", "entry.py",
        "            if passed and number > passed[-1] or len(passed) == preemption.PASSED_AT_ONCE:", "            if passed and number > passed[-1]:"),
    Bug("waiting ones of a better class wait for parked ones", "entry.py",
        "            if not aged and not self._admit(number, now):\n                return\n", ""),
    Bug("waiting ones pass a parked one that does not fit", "entry.py", "        if not passed:\n            self._admit(None, now)", "        self._admit(None, now)"),
    Bug("waiting ones pass one that is being parked", "entry.py",
        "            if any(preemption.closes_admission(other, number, self._class_of) for other in book.parking.values()):\n                return False\n", ""),
    Bug("in head order somebody passes", "entry.py", 'strict = aged or limits.resume_order == "head"', "strict = aged"),
    Bug("head goes by parks too", "preemption.py", "-seq.pressure_parks if most_parked else 0", "-seq.pressure_parks"),
    Bug("most-parked does not count parks", "preemption.py", "-seq.pressure_parks if most_parked else 0", "0"),
    Bug("a resume leaves no gap", "preemption.py", "    return policy.enter_ahead, policy.enter_line", "    return policy.park_ahead, policy.park_line"),
    Bug("after a forced park it waits for the gap", "preemption.py",
        '    if seq.state is State.PARKED and seq.kind == "forced":', "    if False:"),
    Bug("what it will take after it came in is not counted", "preemption.py",
        "    return max(claim_cells(seq, limits), len(seq.tokens) + min(steps, seq.remaining) - 1)", "    return claim_cells(seq, limits)"),
    Bug("nobody without blocks fails where parking is off", "scheduler.py", "            elif not self.policy.parks:", "            elif False:"),
    Bug("relief parks where parking is off", "scheduler.py", "        if over > 0 and policy.parks:", "        if over > 0:"),
    Bug("lookahead counts only those that grow now", "scheduler.py",
        "        may_grow = short if self.policy.park_ahead == 1 else book.running.values()", "        may_grow = short"),
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
    parser.add_argument("--quick", action="store_true", help="no simulator where the stories have noticed")
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
            by_stories = noticed(stories, folder)
            by_simulator = "" if options.quick and by_stories else noticed(simulator, folder)
        caught = ["caught" if line else "-" for line in (by_simulator, by_stories)]
        missed += not (by_simulator or by_stories)
        print(f"{bug.title:<66} {caught[0]:<10} {caught[1]:<8} {time.perf_counter() - began:5.1f}", flush=True)
        print(f"    {(by_simulator or by_stories or 'NOBODY NOTICED')[:150]}", flush=True)
    print(f"{missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
