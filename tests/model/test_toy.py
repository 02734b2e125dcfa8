"""The toy model: its text is what the oracle says, however it was computed; a byte that is wrong in a cell changes it."""

import numpy as np
import pytest

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model.exactness import prove
from gpu_worker.model.load import load_model
from gpu_worker.model.toy import Oracle
from gpu_worker.policy.events import Plan, Row
from gpu_worker.runner import Runner
from wire.messages import Sampling
from wire.model_files import find_model

PROMPT = [10 + (37 * i) % 1900 for i in range(50)]
BLOCKS = [5, 2, 9, 0, 7, 11]
GREEDY = Sampling(temperature=0.0, seed=1)


@pytest.fixture(scope="module")
def model():
    return load_model(find_model("toy"))


@pytest.fixture
def runner(model):
    return Runner(model, KvCache(model.spec, 12, 16, model.kv_dtype))


def row(tokens: list[int], start: int, count: int, sampling: Sampling = GREEDY, blocks: list[int] = BLOCKS) -> Row:
    return Row("r", tokens, start, count, blocks, start + count == len(tokens), sampling, len(PROMPT))


def generate(runner: Runner, tokens: list[int], count: int, sampling: Sampling = GREEDY, computed: int = 0, chunk: int = 99):
    """Feed `tokens[computed:]` in chunks, then one by one; the new tokens."""
    tokens = list(tokens)
    until = len(tokens) + count
    while len(tokens) < until:
        fed = min(chunk, len(tokens) - computed)
        done = runner.step(Plan([], [row(tokens, computed, fed, sampling)], 0))
        computed += fed
        tokens += done.rows[0].tokens
    return tokens[-count:]


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(temperature=0.9, seed=7, top_p=0.9), Sampling(repetition_penalty=1.3, seed=3)]
)
@pytest.mark.parametrize("chunk", [1, 7, 99])
def test_the_oracle_knows_the_text(model, runner, sampling, chunk):
    assert generate(runner, PROMPT, 40, sampling, chunk=chunk) == Oracle(model, PROMPT).text(40, sampling)


def test_it_is_exact_by_the_proof_of_other_models(model):
    assert prove(model) == (True, "")


@pytest.mark.parametrize("cell", [0, 17, 48])
def test_any_bit_of_any_cell_is_seen(model, runner, cell):
    """At the latest when its word is read: a word of each cell at each position."""
    expected = Oracle(model, PROMPT).text(40, GREEDY)
    words = len(model._places)
    for word in range(words):
        generate(runner, PROMPT, 1)
        plane, place = divmod(word, model.spec.head_dim // 2)
        pool = model._words(runner.kv)
        pool[BLOCKS[cell // 16], plane, cell % 16, place] ^= np.uint64(1 << 20)
        tokens = PROMPT + expected[:1]
        position = len(tokens) - 1
        if word == position % words:
            assert generate(runner, tokens, 1, computed=position) != expected[1:2]
        else:
            assert generate(runner, tokens, 1, computed=position) == expected[1:2]


@pytest.mark.parametrize("blocks", [[2, 5, 9, 0], [5, 2, 9, 9], [5, 2, 3, 0]], ids=["swapped", "twice", "stale"])
def test_wrong_blocks_are_seen(model, runner, blocks):
    expected = Oracle(model, PROMPT).text(2, GREEDY)
    tokens = PROMPT + expected[:1]
    generate(runner, PROMPT, 1)
    done = runner.step(Plan([], [row(tokens, 50, 1, blocks=blocks)], 0))
    assert done.rows[0].tokens != expected[1:]


def test_rows_of_one_step_do_not_meet(model, runner):
    other = PROMPT[::-1]
    plan = Plan([], [row(PROMPT, 0, 50), row(other, 0, 50, blocks=[1, 3, 4, 6])], 0)
    said = [result.tokens for result in runner.step(plan).rows]
    assert said == [Oracle(model, prompt).text(1, GREEDY) for prompt in (PROMPT, other)]
