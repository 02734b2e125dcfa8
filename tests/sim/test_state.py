"""The fake recurrent state does notice: of another sequence, another position or half a copy, it changes the text."""

import random

import pytest

from gpu_worker.policy.events import Load, Reserve, Row, Save
from sim.device import Device, Reference
from sim.hostcache import BLOCK_BYTES, STATE_BYTES, HostCache
from sim.state import FOLD, NO_STATE, FakeState, entry_of, state_after
from wire.messages import Sampling

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
BLOCKS = [3, 0, 7, 5, 1, 6, 2, 4]
DRAFTS = 6


def row(tokens: list[int], start: int, count: int, slot: int = 1, draft: int = 0) -> Row:
    samples = start + count == len(tokens)
    return Row("a", tokens, start, count, BLOCKS, samples, Sampling(seed=1), len(PROMPT), draft, slot)


def device() -> Device:
    return Device(8, 4, DRAFTS, random.Random(1), state_slots=2)


def text(dev: Device, steps: int, draft: int = 0, harm=lambda step: None) -> list[int]:
    """Decode; `harm(step)` is called before each step."""
    tokens = list(PROMPT)
    start = 0
    for step in range(steps):
        harm(step)
        count = len(tokens) - start
        result = dev.run(row(tokens, start, count, draft=draft if step else 0))
        start = len(tokens) + len(result.tokens) - 1
        tokens += result.tokens
    return tokens[len(PROMPT) :]


def reference(count: int) -> list[int]:
    return Reference(PROMPT, count, frozenset(), 0, recurrent=True).output


def test_the_state_is_part_of_the_text():
    assert reference(8) != Reference(PROMPT, 8, frozenset(), 0).output
    assert text(device(), 12) == reference(12)


@pytest.mark.parametrize("size", range(1, 10))
def test_chunks_give_the_reference(size):
    dev = device()
    for start in range(0, len(PROMPT), size):
        result = dev.run(row(PROMPT, start, min(size, len(PROMPT) - start)))
    assert result.tokens == reference(1)


@pytest.mark.parametrize("draft", range(1, DRAFTS + 1))
def test_drafts_refused_at_every_length_give_the_reference(draft):
    dev = device()
    found = text(dev, 5, draft)
    assert found == reference(len(found))
    assert 5 < len(found) < 5 * (1 + draft), "some agree, some do not"


def test_a_refused_draft_at_every_position_around_a_fold_leaves_the_state_as_it_was():
    for known in range(1, 3 * FOLD):
        for drafts in range(1, DRAFTS + 1):
            plain, drafted = (FakeState(DRAFTS, random.Random(3)) for _ in range(2))
            fed = list(range(known))
            plain.run(0, fed, known)
            drafted.run(0, fed[:-1], known - 1)
            drafted.run(known - 1, [fed[-1], *range(100, 100 + drafts)], known)
            rest = list(range(50, 50 + FOLD + 2))
            for position, token in enumerate(rest, known):
                assert plain.run(position, [token], position + 1) == drafted.run(position, [token], position + 1)


@pytest.mark.parametrize("what", ["of nobody", "of another position", "of another sequence", "folded once more"])
def test_a_wrong_state_changes_the_text(what):
    dev = device()

    def harm(step):
        if step != 3:
            return
        match what:
            case "of nobody":
                dev.states[1] = FakeState(DRAFTS, random.Random(9))
            case "of another position":
                dev.states[1].run(11, [50], 12)
                dev.states[1].run(12, [51], 13)
            case "of another sequence":
                dev.states[1].run(0, list(range(20, 31)), 11)
            case "folded once more":
                dev.states[1].base, dev.states[1].folded = dev.states[1]._fold(dev.states[1].base, dev.states[1].folded)

    assert text(device(), 8)[:3] == reference(3)
    assert text(dev, 8, harm=harm) != reference(8)


def test_the_first_position_needs_nothing_that_was_there():
    state = FakeState(DRAFTS, random.Random(4))
    before = state.run(0, [1, 2], 2)
    assert before == [NO_STATE, state_after(NO_STATE, entry_of(NO_STATE, 1))]


def test_an_image_carries_the_state_in_halves_and_its_bytes_count():
    dev, cache = device(), HostCache(4 * BLOCK_BYTES, 4, recurrent=True)
    text(dev, 2)
    assert cache.reserve(Reserve(1, "a", 3)) is None
    lease = cache.reserve(Reserve(2, "a", 2))
    assert cache.used_bytes == 2 * BLOCK_BYTES + STATE_BYTES
    save = Save("a", lease, (3, 0), 8, 1)
    assert cache.save_half(save, dev, first=True)
    torn = dev.states[1].log[-1] = 12345  # changes while the copy runs
    assert cache.save_half(save, dev, first=False)
    for first in (True, False):
        assert cache.load_half(Load("a", lease, (3, 0), 0, 0), dev, first)
    assert dev.states[0].log[-1] == torn
    assert (dev.states[0].base, dev.states[0].folded, dev.states[0].log) == (
        dev.states[1].base,
        dev.states[1].folded,
        dev.states[1].log,
    )


def test_a_hidden_row_that_is_not_the_newest_cells_is_noticed():
    dev = device()

    def harm(step):
        if step == 3:
            dev.hidden = [cell + 1 for cell in dev.hidden]

    with pytest.raises(AssertionError, match="hidden row"):
        text(dev, 4, draft=2, harm=harm)
