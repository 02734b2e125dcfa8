"""The sources' pressure test in its shape, on a hybrid that drafts: bands, contexts, four long chats, three rounds."""

import pytest

from tests.system.stack import Stack, stream, together

CHATS = 4
ROUNDS = 3
PROMPT_TOKENS = 1000
ROUND_S = 900


def chats(stack: Stack, tokens: int) -> list:
    bodies = [{"prompt": [10 + (i * 7919 + k * 37) % 1900 for k in range(PROMPT_TOKENS)], "seed": i} for i in range(CHATS)]
    return together(*(stream(stack.url, max_tokens=tokens, temperature=0.8, **body) for body in bodies), timeout_s=ROUND_S)


@pytest.mark.long
@pytest.mark.timeout(ROUNDS * ROUND_S)
@pytest.mark.parametrize(("ctx", "tokens"), [(8192, 3500), (16384, 6000)])
@pytest.mark.parametrize(("high", "low"), [(94, 80), (90, 70), (98, 90)])
def test_all_chats_of_all_rounds_are_whole(tmp_path, ctx, tokens, high, low):
    settings = {"policy": "watermark", "high": high, "low": low}
    with Stack(tmp_path / "run", model="bard", ctx=ctx, slots=CHATS, park_ram="8GiB", **settings) as stack:
        rounds = [chats(stack, tokens) for _ in range(ROUNDS)]
        for answers in rounds:
            assert [(len(a.ids), a.finish_reason, a.error, a.done) for a in answers] == [(tokens, "length", None, True)] * CHATS
            assert [a.ids for a in answers] == [a.ids for a in rounds[0]]
            assert sum(a.parkade["parks"] for a in answers) > 0, "the pool was never short: the test shows nothing"
            assert sum(a.parkade["recomputed_tokens"] for a in answers) == 0
        assert stack.drafts()[1][1] > 0
        assert stack.metric("parkade_hostcache_used_bytes") == 0
