"""Whole servers on fake cards: the real PyCUDA, the real kernels, streams that run late or in random order.

Every text is checked token by token against the CPU's model, fed with the same tokens before: a card may take another one
only where the CPU's two best lie closer than GAP.
"""

from pathlib import Path

import pytest
import torch

from gpu_worker.device import proven
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.proven import Place, Proof
from gpu_worker.model.batch import Batch
from gpu_worker.model.load import load_model
from tests.cuda.fake import environ
from tests.make_models import write_hf
from tests.system.stack import Answer, Stack, prompt_ids, stream, together
from wire.model_files import find_model

pytestmark = pytest.mark.timeout(900)
GAP = 2e-2  # of two logits
PROMPT, GENERATED = 24, 40
CTX = 160  # of four chats' 4 * 64 cells
RAM = "1MiB"  # of images: one or two of bard's
FAST = "random:1"
MODES = [pytest.param(mode, marks=() if mode == FAST else pytest.mark.long) for mode in environ.MODES]


class CardStack(Stack):
    """A server on fake cards, whose processes must leave nothing behind on them."""

    def __init__(self, folder: Path, mode: str, cards: int = 1, **settings: object) -> None:
        if reason := environ.missing():
            pytest.skip(f"no fake card: {reason}")
        self.counters = folder / "counters"
        self.counters.mkdir(parents=True)
        self.killed: list[int] = []  # pids of workers
        there = environ.variables(mode, cards, counters=self.counters)
        there |= {"PARKADE_PROVEN": str(folder / "proofs.json"), "OMP_NUM_THREADS": "1"}
        device = ",".join(f"cuda:{i}" for i in range(cards))
        flags = {"model": "bard", "device": device, "ctx": CTX, "slots": 4, "park_ram": RAM, "exact": "off"}
        flags["policy"] = "watermark"  # lets in more than fit
        super().__init__(folder / "run", there, **flags | settings)

    def end(self) -> None:
        """Stop it; the cards' side of every process that was not killed is clean."""
        assert self.stop() == 0
        found = environ.counters_of(self.counters)
        assert len(found) > len(self.killed), "nobody had a card"
        for pid, counters in found.items():
            wrong = environ.complaints(counters)
            assert not [line for line in wrong if pid not in self.killed or line.startswith(environ.WRONG)], (pid, wrong)


@pytest.fixture(scope="module")
def bard():
    """bard on the CPU."""
    return load_model(find_model("bard"), "bf16", threads=1)


def check(model, prompt: list[int], ids: list[int]) -> None:
    """Each token is the greatest logit behind those before it, or close to it."""
    tokens = prompt + ids
    blocks = -(-len(tokens) // 16)
    kv = KvCache(model.spec, blocks, 16, model.kv_dtype, 1)
    logits = model.logits(model.forward(Batch.of([(tokens, 0, list(range(blocks)))], last_only=False), kv))[len(prompt) - 1 : -1]
    short = logits.max(-1).values - logits[torch.arange(len(ids)), ids]
    assert float(short.max()) <= GAP, f"token {int(short.argmax())} of {ids} is {float(short.max()):.3f} below the CPU's best"


def chat(stack: Stack, number: int, **body: object):
    options = {"prompt": prompt_ids(number, PROMPT), "max_tokens": GENERATED, "temperature": 0} | body
    return stream(stack.url, **options)


def check_all(model, answers: list[Answer]) -> None:
    for number, answer in enumerate(answers):
        assert (len(answer.ids), answer.finish_reason, answer.done) == (GENERATED, "length", True), answer
        check(model, prompt_ids(number, PROMPT), answer.ids)


@pytest.mark.parametrize("mode", MODES)
def test_chats_that_do_not_fit_are_parked_saved_recomputed_and_right(tmp_path, bard, mode):
    with CardStack(tmp_path, mode) as stack:
        check_all(bard, together(*(chat(stack, number) for number in range(4))))
        parks = stack.parks()
        assert sum(count for how, count in parks.items() if how.startswith("save")), parks
        assert sum(count for how, count in parks.items() if how.startswith("recompute")), parks
        hang_up = [
            chat(stack, number, on_tokens=lambda answer, after=3 + 5 * number: len(answer.ids) < after) for number in range(4)
        ]
        together(*hang_up)  # running, parking, parked, resuming: whatever they are by then
        stack.until(lambda: {slot["state"] for slot in stack.slots()} == {"idle"}, "all slots idle")
        stack.until(lambda: stack.metric("parkade_hostcache_used_bytes") == 0, "no image kept")
        stack.end()


@pytest.mark.long
@pytest.mark.parametrize("mode", [FAST, "lazy"])
@pytest.mark.parametrize("victim", ["gpu_worker", "hostcache"])
def test_a_killed_process_costs_a_pause_at_most(tmp_path, bard, mode, victim):
    with CardStack(tmp_path, mode, park_ram="16MiB") as stack:
        gone = []

        def kill_once(answer: Answer) -> None:
            if len(answer.ids) >= GENERATED // 2 and not gone:
                gone.append(stack.pid_of(victim))
                stack.kill(victim)

        answers = together(*(chat(stack, number, on_tokens=kill_once if not number else None) for number in range(4)))
        check_all(bard, answers)
        assert gone
        if victim == "gpu_worker":
            stack.killed = gone
        else:  # it parks again once the host cache is back
            stack.until(lambda: "cuda0" in stack.log.partition("host cache lost")[2], "the worker has seen it")
            before = sum(count for how, count in stack.parks().items() if how.startswith("save"))
            stack.until(lambda: stack.log.count("attached to the host cache") == 2, "attached again")
            together(*(chat(stack, number) for number in range(4)))
            assert sum(count for how, count in stack.parks().items() if how.startswith("save")) > before
        stack.end()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """A random hybrid with a head, small enough that exact products of 64 rows are quick."""
    size = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 96, "interval": 2}
    shape = {"key_heads": 2, "value_heads": 2, "key_dim": 32, "value_dim": 32}
    return str(write_hf(tmp_path_factory.mktemp("tiny") / "hybrid", "qwen35", mtp=True, seed=3, **size, **shape))


def prove_exact(folder: Path) -> None:
    place = Place("fake card 0", str(torch.__version__), 13000, proven.kernels_digest())
    proven.keep(Proof(place, True), folder / "proofs.json")


@pytest.mark.long
@pytest.mark.parametrize("mode", ["random:2", "lazy"])
def test_where_exactness_is_proven_parked_runs_equal_the_solo_run(tmp_path, tiny, mode):
    """Alone; then parked at every 7 tokens, beside others, saved or computed again."""

    def one(stack: Stack, number: int):
        prompt = [3 + token % 200 for token in prompt_ids(number, PROMPT)]  # of its vocabulary
        return chat(stack, number, prompt=prompt, logprobs=2, **kinds[number % 2])

    kinds = {"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 7}
    prove_exact(tmp_path)
    with CardStack(tmp_path, mode, model=tiny, exact="on", ctx=256, park_ram="16MiB") as stack:
        assert "exact yes" in stack.log
        solo = [together(one(stack, number))[0] for number in range(2)]
        stack.end()
    (tmp_path / "again").mkdir()
    prove_exact(tmp_path / "again")
    with CardStack(tmp_path / "again", mode, model=tiny, exact="on", park_every=7, step_tokens=16, park_ram="200KiB") as stack:
        assert "exact yes" in stack.log
        answers = together(*(one(stack, number) for number in range(4)))
        for answer, alone in zip(answers, solo):
            assert len(answer.ids) == GENERATED
            assert answer.same_as(alone) and answer.logprobs == alone.logprobs
            assert answer.parkade["parks"] >= GENERATED // 7 and answer.parkade["exact"]
        assert sum(answer.parkade["recomputed_tokens"] for answer in answers) > 0
        assert len(stack.parks()) > 1, "all were saved, or none"
        stack.end()


@pytest.mark.long
def test_several_cards_share_the_work(tmp_path, bard):
    with CardStack(tmp_path, FAST, cards=2, ctx=256) as stack:
        for index in range(2):  # one that is ready is enough for the server
            stack.until(lambda index=index: f" as bf16 on cuda:{index} fake card {index}" in stack.log, f"card {index} is there")
        check_all(bard, together(*(chat(stack, number) for number in range(6))))
        launches = [counters["launches"] for counters in environ.counters_of(stack.counters).values() if counters["launches"]]
        assert len(launches) == 2 and min(launches) > max(launches) // 4, launches
        stack.end()


# start ----------------------------------------------------------------------------------------------------------------
def test_a_card_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(AssertionError, match="serve said") as caught:
        CardStack(tmp_path, "lazy", device="cuda:2")
    lines = str(caught.value).splitlines()
    assert "error: --device cuda:2: this machine has 1 card(s), counted from cuda:0; or choose --device cpu" in lines
    assert not [line for line in lines if "Traceback" in line or "PyCUDA ERROR" in line]


def test_a_pool_of_all_that_fits(tmp_path):
    with CardStack(tmp_path, "eager", ctx=0, gpu_memory=0.5) as stack:
        cells = stack.http.get("/props").json()["pool_cells"]
        block = (3 * 2 * 2 + 1) * 16 * 64 * 2  # keys and values of three layers and two heads, and a row for the hidden row
        assert 0.95 * (2 << 30) < cells // 16 * block < 2 << 30
        assert f"ctx {cells}" in stack.log
        stack.end()
