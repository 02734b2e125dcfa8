"""The runner with real models: as many drafts as are asked for at every step, whatever they are worth, change no token."""

import pytest

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model.load import load_model
from gpu_worker.policy.events import Plan, Row
from gpu_worker.runner import Runner
from tests.make_models import write_hf
from wire.messages import Sampling
from wire.model_files import find_model

MOST, COUNT, BLOCKS = 8, 70, 12
PROMPTS = [[5, 9, 200, 31, 7], list(range(40, 73)), [3]]
MIXED = [
    Sampling(temperature=0),
    Sampling(temperature=1.0, top_p=0.95, presence_penalty=0.5, seed=11),
    Sampling(temperature=0.6, seed=12),
]
GREEDY = [Sampling(temperature=0)] * 3  # whose drafts are chained in one call where the model can


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    write_hf(base / "hybrid", arch="qwen35", mtp=True, layers=4)
    write_hf(base / "few", arch="qwen35", mtp=True, layers=4, draft_ids=[7, 3, 100, 250, 40, 41])
    write_hf(base / "plain", arch="llama", mtp=True)
    return base


def run(model, draft: int, samplings: list[Sampling]) -> tuple[list[list[int]], int]:
    """The texts of all prompts side by side, and how many drafts were right. Blocks and state slots are in no order."""
    kv = KvCache(model.spec, BLOCKS * len(PROMPTS), 16, model.kv_dtype, len(PROMPTS) + 1, MOST)
    runner = Runner(model, kv)
    tokens = [list(prompt) for prompt in PROMPTS]
    computed, accepted = [0] * len(PROMPTS), 0
    while any(len(text) - len(prompt) < COUNT for text, prompt in zip(tokens, PROMPTS, strict=True)):
        rows = []
        for i, text in enumerate(tokens):
            left = COUNT - (len(text) - len(PROMPTS[i]))
            blocks = [(b * 5 % BLOCKS) * len(PROMPTS) + i for b in range(BLOCKS)]
            wanted = min(draft, left - 1) if len(text) - computed[i] == 1 else 0
            if left:
                count = len(text) - computed[i]
                rows.append(
                    Row(str(i), text, computed[i], count, blocks, True, samplings[i], len(PROMPTS[i]), wanted, len(PROMPTS) - i)
                )
        for result in runner.step(Plan([], rows, 1)).rows:
            i = int(result.request_id)
            assert result.tokens, result.error
            tokens[i] = tokens[i] + result.tokens
            computed[i] = len(tokens[i]) - 1
            accepted += len(result.tokens) - 1
    return tokens, accepted


@pytest.mark.parametrize("samplings", [MIXED, GREEDY], ids=["mixed", "greedy"])
@pytest.mark.parametrize("name", ["hybrid", "few", "plain"])
def test_no_number_of_drafts_changes_a_token(folders, name, samplings):
    model = load_model(find_model(str(folders / name)), "f32")
    expected, none = run(model, 0, samplings)
    assert none == 0
    rights = []
    for draft in (1, 2, 3, MOST):
        tokens, right = run(model, draft, samplings)
        assert tokens == expected
        rights.append(right)
    assert any(rights) or (name, samplings) != ("hybrid", MIXED)  # now and then a random head is right too


def test_a_head_may_be_left_out(folders):
    """The text of the model without its head is that of the model with it."""
    with_head = load_model(find_model(str(folders / "hybrid")), "f32")
    without = load_model(find_model(str(folders / "hybrid")), "f32", mtp=False)
    assert run(with_head, 3, MIXED)[0] == run(without, 0, MIXED)[0]
