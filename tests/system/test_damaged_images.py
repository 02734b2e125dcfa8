"""Parked images under attack in a running server: another process of this user maps the arena as a worker does, and writes there.

The toy model's text is a function of every cell that was read, so an answer that its oracle knows was computed from whole cells.
"""

import asyncio
import functools
import os
import socket
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.model.load import load_model
from gpu_worker.model.toy import Oracle, ToyModel, chained
from router.client import Client
from tests.hostcache.service import DECODER
from tests.system.stack import Heard, Stack, by_zeromq, hear, prompt_ids
from wire import arena
from wire.codec import pack
from wire.messages import Attach, Sampling
from wire.model_files import find_model
from wire.sockets import hostcache_path

CTX, BLOCK = 1024, 16
PROMPT, GENERATED = 100, 350
SAMPLING = {"temperature": 0.8, "seed": 5}


@functools.cache
def toy() -> ToyModel:
    return load_model(find_model("toy"))


class Intruder:
    """Maps the arena like a worker. Finds images by what their first cells must be."""

    def __init__(self, stack: Stack) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(20)
        self.sock.connect(hostcache_path(stack.run_dir))
        self.sock.send(pack(Attach(worker="intruder-1-1", unit_bytes=arena.PAGE_BYTES)))
        payload, fds, _, _ = socket.recv_fds(self.sock, 4096, 1)
        self.mapping = arena.Mapping(fds[0], DECODER.unpack(payload).arena_bytes)
        os.close(fds[0])
        model = toy()
        self.block_bytes = KvCache(model.spec, 1, BLOCK, model.kv_dtype).block_bytes
        self._place = int(model._places[0])

    def close(self) -> None:
        self.mapping.close()
        self.sock.close()

    def blocks(self, tokens: list[int]) -> list[np.ndarray]:
        """The blocks of the image of a sequence, in its order."""
        firsts = self.mapping.bytes.view(np.uint64)[:: arena.PAGE_BYTES // 8]
        found = []
        for cell in chained(0, tokens)[::BLOCK]:
            at = np.flatnonzero(firsts == np.uint64(cell ^ self._place))
            if len(at):  # a block that a neighbour has too is saved twice; neither is anybody else's
                found.append(self.mapping.view(int(at[-1]) * arena.PAGE_BYTES, self.block_bytes))
        return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory) -> Iterator[Stack]:
    run_dir = tmp_path_factory.mktemp("damaged") / "run"
    with Stack(run_dir, model="toy", ctx=CTX, slots=4, park_ram="8MiB", park_mode="save") as stack:
        yield stack


def text(prompt: list[int], count: int) -> list[int]:
    return Oracle(toy(), prompt).text(count, Sampling(**SAMPLING))


Attack = Callable[[list[np.ndarray], list[np.ndarray], list[np.ndarray]], None]


def one_bit(mine: list[np.ndarray], _yours: list[np.ndarray], _older: list[np.ndarray]) -> None:
    random = Random(len(mine))
    block = random.choice(mine)
    block[random.randrange(len(block))] ^= 1 << random.randrange(8)


def swapped(mine: list[np.ndarray], _yours: list[np.ndarray], _older: list[np.ndarray]) -> None:
    mine[0][:], mine[1][:] = mine[1].copy(), mine[0].copy()


def swapped_with_another(mine: list[np.ndarray], yours: list[np.ndarray], _older: list[np.ndarray]) -> None:
    mine[2][:], yours[2][:] = yours[2].copy(), mine[2].copy()


def anothers(mine: list[np.ndarray], yours: list[np.ndarray], _older: list[np.ndarray]) -> None:
    for block, foreign in zip(mine, yours):
        block[:] = foreign


def older_generation(mine: list[np.ndarray], _yours: list[np.ndarray], older: list[np.ndarray]) -> None:
    mine[len(older) - 1][:] = older[-1]  # the block that was not full yet


def other_layout(mine: list[np.ndarray], _yours: list[np.ndarray], _older: list[np.ndarray]) -> None:
    for block in mine:
        block[:] = np.roll(block, len(block) // 8)  # keys where values are


def emptied(mine: list[np.ndarray], _yours: list[np.ndarray], _older: list[np.ndarray]) -> None:
    for block in mine:
        block[:] = 0


def nothing(_mine: list[np.ndarray], _yours: list[np.ndarray], _older: list[np.ndarray]) -> None:
    pass


class Scene:
    """Two requests that are parked, by hand and twice, while a third takes the whole pool: all their cells must be loaded."""

    def __init__(self, client: Client, intruder: Intruder, number: int) -> None:
        self.client, self.intruder = client, intruder
        self.prompts = [prompt_ids(10 * number + i, PROMPT) for i in range(3)]
        self.heard: dict[str, Heard] = {}
        self.news = asyncio.Event()
        self.ids = [f"{number}-{name}" for name in ("mine", "yours")]

    async def run(self, attack: Attack) -> tuple[list[Heard], Heard]:
        """The two as they were heard, and the third."""
        streams = [asyncio.create_task(self._stream(i)) for i in range(2)]
        await self._parked(40)
        older = [block.copy() for block in self.intruder.blocks(self._tokens(0))]
        await self._resumed()
        await self._parked(120)
        mine, yours = (self.intruder.blocks(self._tokens(i)) for i in range(2))
        assert len(mine) >= 13 and len(yours) >= 13 and len(older) >= 8
        full = await hear(self.client, (self.prompts[2] * 10)[:980], max_tokens=40, **SAMPLING)
        attack(mine, yours, older)
        await self._resumed()
        return list(await asyncio.gather(*streams)), full

    async def _stream(self, i: int) -> Heard:
        def on_message(heard: Heard) -> None:
            self.heard[self.ids[i]] = heard
            self.news.set()

        return await hear(
            self.client, self.prompts[i], request_id=self.ids[i], max_tokens=GENERATED, on_message=on_message, **SAMPLING
        )

    async def _parked(self, tokens: int) -> None:
        """Both, each after so many tokens."""

        async def park(name: str) -> None:
            while name not in self.heard or len(self.heard[name].ids) < tokens:
                self.news.clear()
                await self.news.wait()
            answer = await self.client.park(name, 60.0)
            assert answer.code == "", answer

        await asyncio.gather(*map(park, self.ids))

    async def _resumed(self) -> None:
        for name in self.ids:
            answer = await self.client.resume(name)
            assert answer.code == "", answer

    def _tokens(self, i: int) -> list[int]:
        """Those of which there are cells: the newest has none."""
        return (self.prompts[i] + self.heard[self.ids[i]].ids)[:-1]


HIT = {  # which of the two
    nothing: [],
    one_bit: [0],
    swapped_with_another: [0, 1],
    swapped: [0],
    anothers: [0],
    older_generation: [0],
    other_layout: [0],
    emptied: [0],
}
SHORT = (nothing, one_bit, swapped_with_another)
CASES = [pytest.param(attack, id=attack.__name__, marks=() if attack in SHORT else pytest.mark.long) for attack in HIT]


@pytest.mark.parametrize("attack", CASES)
def test_a_damaged_image_costs_a_recompute_and_nothing_else(stack, attack):
    number = list(HIT).index(attack)
    intruder = Intruder(stack)
    before = stack.metric("parkade_images_damaged_total")

    async def scenario(client: Client):
        scene = Scene(client, intruder, number)
        return scene.prompts, *await scene.run(attack)

    try:
        prompts, parked, full = by_zeromq(stack, scenario)
    finally:
        intruder.close()
    hit = HIT[attack]
    for i, heard in enumerate(parked):
        assert heard.ids == text(prompts[i], GENERATED) and heard.finished.reason == "length"
        returns = [notice.mode for notice in heard.notices if notice.event == "resumed" and notice.kind == "explicit"]
        assert returns == ["save", "recompute" if i in hit else "save"]
    assert full.ids == text((prompts[2] * 10)[:980], 40)
    assert stack.metric("parkade_images_damaged_total") == before + len(hit)
    assert stack.log.count("of its image is damaged") == before + len(hit)
    later = by_zeromq(stack, lambda client: hear(client, prompts[0], max_tokens=GENERATED, **SAMPLING))
    assert later.ids == parked[0].ids
    assert stack.metric("parkade_hostcache_used_bytes") == 0
