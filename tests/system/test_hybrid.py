"""What is particular to a server with recurrent states and a head: what it says of itself, its memory, prompts seen before."""

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from parkade.api import ApiError
from parkade.chat import chat
from tests.make_models import write_hf
from tests.system.stack import READY_TIMEOUT_S, Answer, Stack, each, prompt, stream, together
from wire.memory import total_bytes

MIB = 1 << 20
SLOTS = 4
STATE = {"key_heads": 8, "value_heads": 16, "key_dim": 128, "value_dim": 128}  # 1 MiB in each recurrent layer


def large_state(folder: Path, layers: int = 8) -> Path:
    return write_hf(folder / "model", "qwen35", context=2048, layers=layers, mtp=True, seed=9, **STATE)


def anonymous_bytes(stack: Stack) -> int:
    """Private memory of the worker; the arena's pages, which it also touches, are shared."""
    status = Path(f"/proc/{stack.pid_of('gpu_worker')}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024


def test_pool_and_states_stay_within_what_was_announced(tmp_path):
    """All states are used, parked and loaded to other slots, with drafts."""
    with Stack(
        tmp_path / "run", model=large_state(tmp_path), ctx=1024, slots=SLOTS, draft=8, dtype="f32", park_every=20
    ) as stack:
        weights, pool = (int(n) for n in re.search(r"weights (\d+) MiB, pool 1024 cells in (\d+) MiB", stack.log).groups())
        states, size = re.search(r"(\d+) recurrent states in ([\d.]+) MiB", stack.log).groups()
        assert int(states) >= SLOTS and float(size) >= SLOTS * 6
        announced = int((weights + pool + float(size)) * MIB)
        at_start, seen = anonymous_bytes(stack), []

        def look(_: Answer) -> None:
            seen.append(anonymous_bytes(stack))

        def chats(tokens: int) -> list[Answer]:
            bodies = [{"prompt": prompt(i, 12), "max_tokens": tokens, "temperature": 1.0, "seed": i} for i in range(SLOTS)]
            return together(
                stream(stack.url, on_tokens=each(20, look), **bodies[0]), *(stream(stack.url, **body) for body in bodies[1:])
            )

        answers = chats(80)
        assert all(len(a.ids) == 80 and a.parkade["parks"] >= 3 and not a.parkade["recomputed_tokens"] for a in answers)
        first = max(seen)
        assert first - at_start >= float(size) * MIB / 2, "the states were hardly used: the test shows nothing"
        assert first - at_start <= (pool + float(size) + 64) * MIB, f"{(first - at_start) / MIB:.0f} MiB for {pool} and {size}"
        assert first <= announced + 400 * MIB, f"{first / MIB:.0f} MiB of {announced / MIB:.0f}"
        again = chats(80)
        assert [a.ids for a in again] == [a.ids for a in answers]
        assert max(seen) <= first + 16 * MIB, f"{max(seen) / MIB:.0f} MiB after {first / MIB:.0f}"


def test_states_that_do_not_fit_in_memory_are_refused_with_the_numbers(tmp_path):
    slots = 4096
    folder = large_state(tmp_path, layers=4 * (1 + total_bytes() // (3 * slots * MIB)))
    command = [sys.executable, "-m", "parkade", "serve", "--port", "0", "--run-dir", tmp_path / "run"]
    ended = subprocess.run(
        [*command, "--model", folder, "--slots", str(slots)], capture_output=True, text=True, timeout=READY_TIMEOUT_S
    )
    assert ended.returncode not in (0, None)
    assert ended.stdout == ""  # never ready
    said = ended.stderr.splitlines()[-1]
    assert re.search(r"pool needs \d+ MiB and \d{4} recurrent states \d+ MiB, \d+ MiB are available", said), said
    needed, available = (int(n) for n in re.search(r"states (\d+) MiB, (\d+) MiB", said).groups())
    assert needed > available and needed >= slots * 3
    assert available <= psutil.virtual_memory().total // MIB


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with Stack(tmp_path_factory.mktemp("hybrid") / "run", model="bard", ctx=1024, slots=2) as stack:
        yield stack


def test_a_prompt_that_was_seen_is_computed_again_and_says_the_same(stack):
    first, again, longer = (
        together(stream(stack.url, prompt=text, max_tokens=40, temperature=0))[0]
        for text in (prompt(1), prompt(1), prompt(1) + " And then")
    )
    assert again.same_as(first)
    assert longer.usage["prompt_tokens"] > first.usage["prompt_tokens"]
    for answer in (first, again, longer):
        assert answer.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) == 0
    assert stack.metric("parkade_kv_cells", state="reusable") == 0


def test_the_server_says_what_it_drafts_and_how_often_it_was_right(stack):
    seen = []

    def look(_: Answer) -> None:
        seen.extend(slot for slot in stack.slots() if slot["state"] == "running")

    answer = together(stream(stack.url, prompt=prompt(2), max_tokens=200, temperature=0, on_tokens=each(40, look)))[0]
    assert len(answer.ids) == 200
    props = stack.http.get("/props").json()
    worker = props["workers"][0]
    assert props["draft"] == worker["draft"] == 2, worker
    assert not worker["reuse"] and worker["state_slots"] > 2 and worker["state_bytes"] > 0
    assert min(worker["weight_bytes"], worker["pool_bytes"]) > 0
    assert all(0 <= slot["accepted"] <= slot["drafted"] for slot in seen) and seen[-1]["accepted"] > 0
    drafts = stack.drafts()
    assert sorted(drafts) == [1, 2]
    assert drafts[1][0] >= drafts[2][0] > 0 and drafts[1][1] >= drafts[2][1] > 0


def test_chat_says_at_once_that_a_model_without_a_template_does_not_chat(tmp_path):
    with Stack(tmp_path / "run", model="bard", ctx=512) as stack, pytest.raises(ApiError, match="'bard' has no chat template"):
        chat(stack.url, "", "", max_tokens=8, temperature=0.0, seed=None)
