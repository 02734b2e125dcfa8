"""What is settled on a card before its worker serves: which card, what fits, what is proven."""

import logging
import os
import subprocess
import sys

import pytest

from gpu_worker import on_card
from gpu_worker.device import proven
from gpu_worker.device.proven import Proof
from gpu_worker.model import exactness
from gpu_worker.on_card import OpenCard, card_of, engine_on, place_of
from tests.cuda.fake import build, environ
from wire.config import Config, ConfigError
from wire.model_files import find_model

MIB = 1 << 20


@pytest.fixture
def mode() -> str:
    return "eager"


@pytest.fixture(autouse=True)
def no_proofs(tmp_path, monkeypatch):
    monkeypatch.setenv("PARKADE_PROVEN", str(tmp_path / "proofs.json"))


def opened(card) -> OpenCard:
    return OpenCard(card.card, card.torch, card.card.memory()[0])


def engine(card, **settings: object):
    """bard without drafts, with six states."""
    config = Config(**{"model": "bard", "slots": 4, "ctx": 256, "exact": "off"} | settings)
    return engine_on(opened(card), config, find_model("bard"), 0, 6, 64)


def test_no_card_for_the_cpu():
    assert card_of("cpu") is None


def test_auto_is_the_cpu_where_there_is_no_card_and_says_why(fake_driver, caplog):
    with caplog.at_level(logging.INFO, "parkade"):
        assert card_of("auto") is None
    (line,) = caplog.messages
    assert line.startswith("computing on the CPU: ") and "--device" not in line


def test_auto_is_the_cpu_where_the_card_is_too_old(fake_driver, caplog, monkeypatch):
    monkeypatch.setattr(on_card, "OLDEST", 100)
    environ.configure(cards=1)
    before = environ.counters()
    with caplog.at_level(logging.INFO, "parkade"):
        assert card_of("auto") is None
    assert caplog.messages == ["computing on the CPU: the kernels need a card of compute capability 10.0, a fake card 0 has 9.0"]
    assert not environ.complaints(environ.counters(), before)
    environ.configure(cards=0)


def test_auto_is_the_first_card(fake_driver):
    environ.configure(cards=2)
    found = card_of("auto")
    try:
        assert found.device == "cuda:0" and found.free_bytes > 0
    finally:
        found.close()
        environ.configure(cards=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "f32"}, "--dtype f32: a card computes in bf16"),
        ({"gpu_memory": 0.0001}, "--device cuda:0 with --gpu-memory 0.0001: the weights alone need 8 MiB, its share is 1 MiB"),
        ({"ctx": 10**7}, "and 6 recurrent states of 3 MiB; lower --ctx or --slots, or raise --gpu-memory"),
        ({"ctx": 0, "gpu_memory": 0.0045}, "lower --slots, or raise --gpu-memory"),
    ],
)
def test_what_does_not_fit_is_one_line(card, settings, words):
    with pytest.raises(ConfigError) as caught:
        engine(card, **settings)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_memory_that_runs_out_is_one_line(card):
    environ.configure(mode="eager", card_bytes=10 * MIB)
    with pytest.raises(
        ConfigError, match="^--device cuda:0 with --gpu-memory 1: its memory ran out with . MiB left.*--step-tokens$"
    ):
        engine(card, gpu_memory=1.0)


def test_a_worker_whose_memory_runs_out_says_so_and_leaves_nothing_on_the_card(tmp_path, fake_driver):
    (counters := tmp_path / "counters").mkdir()
    settings = {"MODEL": "bard", "DEVICE": "cuda:0", "GPU_MEMORY": "1", "SLOTS": "4", "EXACT": "off", "RUN_DIR": str(tmp_path)}
    there = environ.variables("eager", card_bytes=10 * MIB, counters=counters)
    there |= {f"PARKADE_{name}": value for name, value in settings.items()}
    done = subprocess.run(
        [sys.executable, "-m", "gpu_worker"], cwd=build.ROOT, env=os.environ | there, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 78 and "its memory ran out" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    (found,) = environ.counters_of(counters).values()
    assert not environ.complaints(found)


def test_a_pool_takes_what_is_left(card, caplog):
    with caplog.at_level(logging.INFO, "parkade"):
        made = engine(card, ctx=0, gpu_memory=0.25)
    assert made.device == "cuda:0 fake card 0" and (made.dtype, made.exact, made.exact_note) == ("bf16", False, "--exact off")
    taken = 4096 * MIB - card.card.memory()[0]
    assert 1020 * MIB < taken <= 1024 * MIB + made.kv.block_bytes
    assert caplog.messages[0].startswith(
        "cuda:0 fake card 0: 4096 MiB free at first, of which 1024 MiB may be taken: weights 9 MiB"
    )
    made.close()


def test_a_pool_is_not_larger_than_its_books(card, monkeypatch):
    monkeypatch.setattr(on_card, "MOST_BLOCKS", 50)
    made = engine(card, ctx=0)
    assert made.kv.num_blocks == 50
    made.close()


def test_exactness_is_offered_only_where_it_is_proven(card, monkeypatch):
    made = engine(card, exact="on")
    assert (made.exact, made.exact_note) == (False, "not proven on a fake card 0; make gpu-check does that")
    made.close()
    proven.keep(Proof(place_of(card.card), True))
    asked = []
    monkeypatch.setattr(exactness, "prove", lambda model, allocate: asked.append(model.exact) or (False, "a row differs"))
    made = engine(card, exact="on")  # not this model
    assert (made.exact, made.exact_note, asked) == (False, "a row differs", [True])
    made.close()


@pytest.mark.long
def test_exactness_is_proven_for_the_model_that_is_served(card):
    proven.keep(Proof(place_of(card.card), True))
    made = engine(card, exact="on")
    assert (made.exact, made.exact_note) == (True, "")
    made.close()
