"""A key's share of the cells on a real server: the newer of its streams pause, and nobody's text changes."""

import asyncio

import pytest

from router.client import Client, RejectedError
from tests.system.stack import STREAM_TIMEOUT_S, Heard, Stack, hear, prompt_ids

CTX, SHARE, LENGTH = 512, 30, 80
SAMPLING = {"temperature": 0.8, "seed": 7, "max_tokens": LENGTH}
PROMPTS = [prompt_ids(number, 40) for number in range(3)]  # with their output 120 cells each, and the share is 153


async def keyed_and_alone(address: str) -> tuple[list[Heard], list[Heard], str]:
    """What three streams of a key and one of nobody hear at once, what each hears alone, and what a fourth of the key is told."""
    async with Client(address) as client:
        alone = [await hear(client, prompt, **SAMPLING) for prompt in (*PROMPTS, PROMPTS[0])]
        tasks = [asyncio.create_task(hear(client, prompt, key="ann", **SAMPLING)) for prompt in PROMPTS]
        tasks.append(asyncio.create_task(hear(client, PROMPTS[0], **SAMPLING)))
        await asyncio.sleep(0)  # all are submitted
        with pytest.raises(RejectedError) as refused:
            await hear(client, PROMPTS[0], key="ann", **SAMPLING)
        return list(await asyncio.gather(*tasks)), alone, refused.value.code


@pytest.mark.long
def test_streams_beyond_the_share_of_their_key_wait_and_say_the_same(tmp_path):
    settings = {"model": "bard", "ctx": CTX, "slots": 4, "key_cells": SHARE, "key_requests": 3}
    with Stack(tmp_path / "run", **settings) as stack:
        heard, alone, refused = asyncio.run(asyncio.wait_for(keyed_and_alone(stack.address), STREAM_TIMEOUT_S))
    assert refused == "key_limit"
    assert [one.ids for one in heard] == [one.ids for one in alone]
    assert heard[1].parks >= 1  # it began beside the first, and both grew
    assert heard[0].parks == heard[3].parks == 0
    assert {notice.kind for one in heard for notice in one.notices} == {"explicit"}
