"""Drafts change how many steps a text takes and nothing else: ids, text, log probabilities and ends are those without a head."""

import pytest

from tests.system.models import RANDOM, TRAINED, model_of
from tests.system.stack import Answer, Stack, prompt, stream, together

CTX = 2048
# each begins with a prompt of its own; together they cover what a verified row must take into account
REQUESTS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "narrow": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 3},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "bias": {"temperature": 0.7, "seed": 4, "logit_bias": {"100": 4, "101": -100}},
    "logprobs": {"temperature": 0.5, "seed": 5, "logprobs": 3},
    "end token": {"temperature": 1.0, "seed": 6, "ignore_eos": False, "min_tokens": 20},
    "stop string": {"temperature": 0, "stop": [" the"]},
}


ALONE = ("greedy", "seeded")


def answers(stack: Stack, tokens: int) -> dict[str, Answer]:
    """Each of ALONE with nobody beside it, then the others at once, and with them a greedy one of every length up to 12: an end
    falls on every place of an accepted run."""
    bodies = {name: {"prompt": prompt(1, 60), "max_tokens": tokens, **body} for name, body in REQUESTS.items()}
    found = {name: together(stream(stack.url, **bodies.pop(name)))[0] for name in ALONE}
    bodies |= {f"length {length}": {"prompt": prompt(2, 40), "max_tokens": length, "temperature": 0} for length in range(1, 13)}
    return found | dict(zip(bodies, together(*(stream(stack.url, **body) for body in bodies.values())), strict=True))


def assert_equal(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    for name, answer in found.items():
        assert answer.error is None, (name, answer.error)
        assert answer.ids == expected[name].ids, name
        assert answer.same_as(expected[name]), name
        assert answer.logprobs == expected[name].logprobs, name
        assert answer.usage["total_tokens"] == expected[name].usage["total_tokens"], name


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """(model, dtype) -> what it says without drafts; each is asked once."""
    known = {}

    def ask(model: str, dtype: str, tokens: int) -> dict[str, Answer]:
        if (model, dtype) not in known:
            folder = tmp_path_factory.mktemp("without")
            with Stack(folder / "run", model=model_of(model, folder), ctx=CTX, slots=4, dtype=dtype, draft=0) as stack:
                known[model, dtype] = answers(stack, tokens)
                assert stack.drafts() == {}
        return known[model, dtype]

    return ask


def cases() -> list:
    fast = {("bard", "f32", 3), ("smollm2", "auto", 2)}
    every = [(model, "f32", draft) for model in (*TRAINED, *RANDOM) for draft in (1, 2, 3, 8)]
    every += [(model, dtype, draft) for model, dtype in (("bard", "bf16"), ("smollm2", "auto")) for draft in (2, 8)]
    marks = {case: () if case in fast else pytest.mark.long for case in every}
    return [pytest.param(*case, marks=mark, id="-".join(map(str, case)).replace(" ", "-")) for case, mark in marks.items()]


@pytest.mark.parametrize(("model", "dtype", "draft"), cases())
def test_drafts_change_no_answer(tmp_path, without, model, dtype, draft):
    tokens = 40 if model == "smollm2" else 80
    expected = without(model, dtype, tokens)
    with Stack(tmp_path / "run", model=model_of(model, tmp_path), ctx=CTX, slots=4, dtype=dtype, draft=draft) as stack:
        assert_equal(answers(stack, tokens), expected)
        drafts = stack.drafts()
        assert sorted(drafts) == list(range(1, draft + 1)), drafts
        assert all(0 <= accepted <= drafted for drafted, accepted in drafts.values()), drafts
        for shorter, longer in zip(range(1, draft), range(2, draft + 1)):
            assert all(b <= a for a, b in zip(drafts[shorter], drafts[longer], strict=True)), drafts
        drafted, accepted = drafts[1]
        assert drafted > 0
        if model in TRAINED:
            assert accepted > 0.1 * drafted, drafts  # a random one: next to none
