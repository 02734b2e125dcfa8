"""A parked, recomputed, replayed or accompanied run equals the solo run: ids, bytes and log probabilities."""

import pytest

from tests.system.stack import Answer, Stack, prompt, stream, together

KINDS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 7}}
CTX = 2048


def one(stack: Stack, kind: str, tokens: int, **body: object) -> Answer:
    return together(request(stack, kind, tokens, **body))[0]


def request(stack: Stack, kind: str, tokens: int, **body: object):
    return stream(stack.url, prompt=prompt(1), max_tokens=tokens, logprobs=1, **KINDS[kind], **body)


def company(stack: Stack, tokens: int) -> list:
    return [stream(stack.url, prompt=prompt(2 + i, 60 + 40 * i), max_tokens=tokens, temperature=1.0, seed=i) for i in range(3)]


def assert_equal(answer: Answer, solo: Answer) -> None:
    assert answer.ids == solo.ids
    assert answer.text == solo.text
    assert answer.logprobs == solo.logprobs


FAST = pytest.param("auto", 80, 20, id="int4-short")  # f32 in the fast tier is bard's: test_drafted_parks.py
SLOW = [
    pytest.param(dtype, 400, 50, id=name, marks=pytest.mark.long)
    for dtype, name in (("auto", "int4"), ("bf16", "bf16"), ("f32", "f32"))
]


@pytest.mark.parametrize(("dtype", "tokens", "every"), [FAST, *SLOW])
def test_parked_recomputed_accompanied_and_replayed_runs_equal_the_solo_run(tmp_path, dtype, tokens, every):
    with Stack(tmp_path / "solo", ctx=CTX, dtype=dtype) as stack:
        solo = {kind: one(stack, kind, tokens) for kind in KINDS}
        assert all(
            len(answer.ids) == tokens and answer.parkade["exact"] and not answer.parkade["parks"] for answer in solo.values()
        )
        assert solo["greedy"].ids != solo["seeded"].ids
    with Stack(tmp_path / "saved", ctx=CTX, dtype=dtype, park_every=every) as stack:
        for kind in KINDS:
            answer = one(stack, kind, tokens)
            assert_equal(answer, solo[kind])
            assert answer.parkade["parks"] == (tokens - 1) // every
            assert answer.parkade["recomputed_tokens"] == 0
        assert stack.metric("parkade_preempt_total", kind="forced") == 2 * ((tokens - 1) // every)
    # everything recomputed, in company, and a worker that is killed in the middle
    with Stack(
        tmp_path / "recomputed", ctx=CTX, dtype=dtype, park_every=every, park_ram="0", step_tokens=48, no_reuse=True
    ) as stack:
        for kind in KINDS:
            answer = one(stack, kind, tokens)
            assert_equal(answer, solo[kind])
            assert answer.parkade["recomputed_tokens"] > tokens
        answer, *others = together(request(stack, "seeded", tokens), *company(stack, tokens))
        assert_equal(answer, solo["seeded"])
        assert all(len(other.ids) == tokens for other in others)
        killed: list[int] = []
        at_half = stack.kill_worker_at(tokens // 2, killed)
        answer, *others = together(request(stack, "greedy", tokens, on_tokens=at_half), *company(stack, tokens))
        assert killed
        assert_equal(answer, solo["greedy"])
        assert all(len(other.ids) == tokens and other.done for other in others)


@pytest.mark.parametrize("step_tokens", [7, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 33, 200))])
def test_the_size_of_a_prefill_chunk_changes_nothing(tmp_path, step_tokens, reference):
    with Stack(tmp_path / "run", ctx=CTX, step_tokens=step_tokens) as stack:
        assert_equal(one(stack, "greedy", 60), reference)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Answer:
    with Stack(tmp_path_factory.mktemp("reference") / "run", ctx=CTX) as stack:
        return one(stack, "greedy", 60)
