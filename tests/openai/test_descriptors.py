"""The adapter's process without a free descriptor: answers go on, it does not spin or end, and later everybody is answered."""

import asyncio
import os
import resource
from pathlib import Path

import httpx
import pytest

from router.openai.connections import HEAD_S, OTHER_DESCRIPTORS
from tests.descriptors import LIMIT_S, ended, goes_on, knock
from tests.openai.test_process import process, wire_router
from wire.messages import Accepted, Finished, Tokens, Usage

pytestmark = pytest.mark.system

MOST = 32  # connections
DESCRIPTORS = OTHER_DESCRIPTORS + MOST
COMING = 80
HELLO = {"prompt": "Hello", "stream": True, "max_tokens": 10_000}
WORD = 19556


@pytest.mark.parametrize("last", [False, True], ids=["more connections than may be", "really none left"])
async def test_without_a_free_descriptor_answers_go_on_and_it_does_not_spin(tmp_path: Path, last: bool) -> None:
    few = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))}
    async with process(tmp_path, **few) as (running, url), httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        port = int(url.rpartition(":")[2])
        async with wire_router(tmp_path) as router:
            request = http.build_request("POST", "/v1/completions", json=HELLO)
            asking = asyncio.ensure_future(http.send(request, stream=True))
            asked = await router.next()
            await router.say(Accepted(asked.request_id, 1))
            lines = (await asking).aiter_lines()

            async def token(offset: int) -> None:
                await router.say(Tokens(asked.request_id, offset, [WORD]))
                while not (await anext(lines)).startswith("data: "):
                    pass

            kept = MOST
            if last:
                kept = 2
                used = len(os.listdir(f"/proc/{running.pid}/fd"))
                resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (used + kept, used + kept))
            socks = knock(("127.0.0.1", port), COMING)
            async with asyncio.timeout(HEAD_S / 2):  # after HEAD_S they would end anyway
                while sum(map(ended, socks)) < COMING - kept:
                    await asyncio.sleep(0.01)
            offset = await goes_on(running.pid, token, 0)
            for sock in socks:
                sock.close()
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as other:
                assert (await other.get("/v1/models")).status_code == 200
            await router.say(Finished(asked.request_id, "stop", Usage(3, offset, exact=True)))
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        async with wire_router(tmp_path) as router:  # the next one is found
            health = asyncio.ensure_future(http.get("/health"))
            asked = asyncio.ensure_future(router.next())
            assert (await health).status_code == 200
            asked.cancel()
        assert running.returncode is None
