"""64 chats at once, each with a secret of its own, parked and brought back at random: none ever shows another's.

The toy model's text is a function of all that was said in its chat: a cell, an image, a block found by hash or a message that
is another chat's would change it. All chats begin with the same words, so they do share blocks.
"""

import asyncio
from random import Random

import pytest

from gpu_worker.model.load import load_model
from gpu_worker.model.toy import Oracle
from router.client import Client
from tests.system.stack import Heard, Stack, by_zeromq, hear, prompt_ids
from wire.messages import Sampling
from wire.model_files import find_model

CHATS = 64
BEGINNING = prompt_ids(0, 40)
SECRET, ANSWER = 8, 40
SETTINGS = {"ctx": 1024, "slots": 16, "park_ram": "4MiB", "park_every": 15, "park_mode": "save"}


def secret_of(chat: int) -> list[int]:
    """Tokens that no other chat has next to one another."""
    return [3 + chat, *Random(chat).sample(range(70, 1970), SECRET - 1)]


def sampling_of(chat: int) -> dict:
    return {"temperature": 0.7 * (chat % 2), "seed": chat}


async def chat(client: Client, number: int, turns: int, finished: list[Heard]) -> list[int]:
    """All that was said in it."""
    said = [*BEGINNING, *secret_of(number)]
    for turn in range(turns):
        heard = await hear(client, said, request_id=f"{number}-{turn}", max_tokens=ANSWER, **sampling_of(number))
        finished.append(heard)
        said += [*heard.ids, 3 + number, 2 + turn]
    return said


async def park_at_random(client: Client, turns: int, random: Random) -> None:
    """For ever; whether a request is still there is no matter."""
    while True:
        request_id = f"{random.randrange(CHATS)}-{random.randrange(turns)}"
        answer = await client.park(request_id, 20.0)
        if answer.code != "unknown_request":
            await asyncio.gather(*(client.status() for _ in range(random.randrange(4))))
            await client.resume(request_id)


async def scenario(client: Client, turns: int) -> tuple[list[list[int]], list[Heard]]:
    finished: list[Heard] = []
    random = Random(7)
    parking = [asyncio.create_task(park_at_random(client, turns, random)) for _ in range(4)]
    said = await asyncio.gather(*(chat(client, number, turns, finished) for number in range(CHATS)))
    for task in parking:
        assert not task.done(), task.exception()
        task.cancel()
    return said, finished


def expected(number: int, turns: int, model) -> list[int]:
    said = [*BEGINNING, *secret_of(number)]
    for turn in range(turns):
        answer = Oracle(model, said).text(ANSWER, Sampling(**sampling_of(number)))
        said += [*answer, 3 + number, 2 + turn]
    return said


@pytest.mark.parametrize(
    ("turns", "victim"),
    [(1, ""), pytest.param(3, "", marks=pytest.mark.long), pytest.param(3, "gpu_worker", marks=pytest.mark.long)],
    ids=["parks", "three turns", "and a kill"],
)
def test_no_chat_shows_anothers_secret(tmp_path, turns, victim):
    with Stack(tmp_path / "run", model="toy", **SETTINGS) as stack:

        async def attacked(client: Client):
            if victim:
                asyncio.get_running_loop().call_later(1.0, stack.kill, victim)
            return await scenario(client, turns)

        said, finished = by_zeromq(stack, attacked)
        damaged = stack.metric("parkade_images_damaged_total")
        used = stack.metric("parkade_hostcache_used_bytes")
    model = load_model(find_model("toy"))
    secrets = [threes(secret_of(number)) for number in range(CHATS)]
    for number, tokens in enumerate(said):
        assert tokens == expected(number, turns, model), number
        shown = threes(tokens)
        assert [other for other, secret in enumerate(secrets) if secret & shown] == [number]
    kinds = {(notice.kind, notice.mode) for heard in finished for notice in heard.notices}
    assert {"explicit", "forced"} <= {kind for kind, _ in kinds} and "save" in {mode for _, mode in kinds}, kinds
    assert len(finished) == CHATS * turns and sum(heard.parks for heard in finished) >= CHATS
    assert (damaged, used) == (0, 0)


def threes(tokens: list[int]) -> set[tuple[int, ...]]:
    """Each three tokens in a row."""
    return set(zip(tokens, tokens[1:], tokens[2:]))
