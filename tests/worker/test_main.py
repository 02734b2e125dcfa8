"""What a worker settles before it opens its socket: drafts, states, memory, and what it says of them."""

import logging
import math

import psutil
import pytest
from msgspec import structs

from gpu_worker import __main__ as worker
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.draft_cost import CARD_DRAFT, CARD_STEP, CARD_VERIFY, DRAFT, SEQUENCE, STEP, TOO_MUCH, VERIFY, draft_cost
from gpu_worker.policy.limits import Limits
from tests.make_models import write_hf
from wire.config import FIELDS, Config, ConfigError, policy_settings
from wire.messages import Hello
from wire.model_files import find_model
from wire.model_spec import MtpSpec


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A hybrid with a head, and a plain model without."""
    base = tmp_path_factory.mktemp("models")
    write_hf(base / "hybrid", arch="qwen35", mtp=True, layers=4)
    write_hf(base / "plain", arch="llama")
    return base


def settled(folder, **settings):
    config = Config(model=str(folder), dtype="f32", ctx=256, **settings)
    files = find_model(config.model)
    draft = worker.drafts_of(config, files, on_card=False)
    return config, files, worker.model_on_cpu(config, files, draft), draft


def test_workers_share_the_processors(folders, monkeypatch):
    asked = []
    monkeypatch.setattr(worker, "available_processors", lambda: 5)
    monkeypatch.setattr(worker, "load_model", lambda files, dtype, **options: asked.append(options["threads"]))
    for device in ("auto", "cpu,cuda:0", "cpu,cpu,cpu,cpu,cpu,cpu"):
        settled(folders / "plain", device=device)
    assert asked == [5, 2, 1]


def test_a_number_of_drafts_is_taken_as_it_is(folders):
    _, _, model, draft = settled(folders / "hybrid", draft="3")
    assert draft == worker.Draft(3) and model.spec.mtp is not None


def test_without_drafts_the_head_stays_in_its_file(folders):
    _, _, model, draft = settled(folders / "hybrid", draft="0")
    assert draft == worker.Draft(0, "--draft 0") and model.spec.mtp is None
    plain = KvCache(model.spec, 2, 16, model.kv_dtype)
    assert plain.hidden is None and plain.layers == len(model.spec.attention_layers)


def test_auto_drafts_where_a_draft_is_cheap_and_says_why_not(folders, monkeypatch):
    monkeypatch.setattr(worker, "draft_cost", lambda spec, on_card: (TOO_MUCH, 90))
    _, _, model, draft = settled(folders / "hybrid")
    assert draft == worker.Draft(worker.DRAFT_AUTO) and model.spec.mtp is not None
    monkeypatch.setattr(worker, "draft_cost", lambda spec, on_card: (TOO_MUCH + 5, 90))
    _, _, model, draft = settled(folders / "hybrid")
    assert draft == worker.Draft(0, "a draft costs about 85% of a step") and model.spec.mtp is None


def test_a_draft_costs_a_pass_of_the_head_and_a_row():
    spec = find_model("smollm2").spec
    layer = 576 * (2 * 576 + 2 * 192) + 3 * 576 * 1536
    step = 30 * layer + 49152 * 576
    with_head = structs.replace(spec, mtp=MtpSpec(intermediate=1536, draft_vocab=8192))
    draft = layer + 2 * 576 * 576 + 8192 * 576 + DRAFT
    alone, of_four = VERIFY[0], VERIFY[3]
    assert draft_cost(with_head)[0] == math.ceil((alone * step + 100 * draft) / (step + STEP + SEQUENCE))
    assert draft_cost(with_head)[3] == math.ceil((of_four * step + 100 * draft) / (step + STEP + 4 * SEQUENCE))
    everything = structs.replace(spec, mtp=MtpSpec(intermediate=1536))
    assert draft_cost(everything)[0] > draft_cost(with_head)[0] + 15


def test_a_draft_costs_little_where_messages_and_plans_take_most_of_a_step():
    spec = find_model("bard").spec
    assert max(draft_cost(spec)) < 20


def test_what_a_draft_costs_on_a_card():
    spec = find_model("smollm2").spec
    layer = 576 * (2 * 576 + 2 * 192) + 3 * 576 * 1536
    step = 30 * layer + 49152 * 576
    with_head = structs.replace(spec, mtp=MtpSpec(intermediate=1536, draft_vocab=8192))
    draft = layer + 2 * 576 * 576 + 8192 * 576 + CARD_DRAFT
    assert draft_cost(with_head, on_card=True) == (math.ceil((CARD_VERIFY * step + 100 * draft) / (step + CARD_STEP)),)


def test_a_pool_of_all_that_fits_is_for_cards(folders):
    config = Config(model=str(folders / "plain"), ctx=0)
    with pytest.raises(ConfigError, match="^--ctx 0: on the CPU the pool needs a number of cells"):
        worker.engine_on_cpu(config, find_model(config.model), worker.Draft(), 0)


def test_the_limits_know_what_a_step_feeds_before_they_are_made(folders):
    for settings in ({"slots": 5}, {"slots": 100, "draft": "3"}):
        config, files, model, draft = settled(folders / "hybrid", **settings)
        hello = Hello("w", 1, "m", "cpu", "f32", 256, 16, 5, 256, True, draft=draft.most, reuse=False, state_slots=9)
        assert worker.limits(config, files, model.spec, hello).step_budget == worker.step_budget(config, draft.most)


def test_a_model_without_a_head(folders):
    assert settled(folders / "plain")[3] == worker.Draft(0, "plain has no head that drafts")
    with pytest.raises(ConfigError, match="^--draft 2: plain has no head that drafts; use --draft auto or 0$"):
        settled(folders / "plain", draft="2")


def test_the_limits_of_a_hybrid(folders):
    config, files, model, _ = settled(folders / "hybrid", draft="3", slots=5)
    hello = Hello(
        "w", 1, "m", "cpu", "f32", 256, 16, 5, 256, True, state_slots=7, draft=3, reuse=worker.may_reuse(config, model.spec)
    )
    limits = worker.limits(config, files, model.spec, hello)
    assert (limits.reuse, limits.state_slots, limits.draft_max) == (False, 7, 3)
    assert limits.draft_cost == draft_cost(model.spec)


def test_the_limits_of_a_plain_model(folders):
    config, files, model, _ = settled(folders / "plain")
    hello = Hello("w", 1, "m", "cpu", "f32", 256, 16, 5, 256, True, reuse=worker.may_reuse(config, model.spec))
    limits = worker.limits(config, files, model.spec, hello)
    assert (limits.reuse, limits.state_slots, limits.draft_max) == (True, None, 0)


def test_the_limits_say_how_large_an_image_is(folders):
    config, files, model, _ = settled(folders / "hybrid", draft="2")
    kv = KvCache(model.spec, 16, 16, model.kv_dtype, 4, 2)
    sizes = {"pool_bytes": kv.bytes, "state_bytes": kv.state_bytes, "state_slots": 4}
    hello = Hello("w", 1, "m", "cpu", "f32", 256, 16, 5, 256, True, reuse=False, **sizes)
    limits = worker.limits(config, files, model.spec, hello)
    assert (limits.block_bytes, limits.state_bytes) == (kv.block_bytes, kv.state_bytes) and kv.state_bytes


def test_what_does_not_fit_is_refused_with_the_numbers(folders, monkeypatch):
    config, _, model, _ = settled(folders / "hybrid", draft="2")
    kv = KvCache(model.spec, 16, 16, model.kv_dtype, 10, 2)
    whole = kv.bytes + kv.states.bytes
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(whole))
    worker.check_memory(config, model, 16, 10, 2)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(whole - 1))
    with pytest.raises(ConfigError) as refused:
        worker.check_memory(config, model, 16, 10, 2)
    text = str(refused.value)
    assert text.startswith("--ctx 256: beside 1 MiB of weights the pool needs ") and "lower --ctx or --slots" in text
    assert f"10 recurrent states {-(-kv.states.bytes // 2**20)} MiB" in text


class Memory:
    def __init__(self, available: int) -> None:
        self.available = available


def test_a_line_for_the_log(caplog):
    hello = Hello(
        "w", 1, "m", "cpu", "f32", 256, 16, 5, 256, False, "why", state_bytes=1 << 20, state_slots=3, draft_note="--draft 0"
    )
    with caplog.at_level(logging.INFO, "parkade"):
        worker.announce(hello)
        worker.announce(structs.replace(hello, device="cuda:1 Card"))
    first, second = caplog.messages
    assert second == first.replace("m as f32:", "m as f32 on cuda:1 Card:")
    assert [first] == [
        "m as f32: weights 0 MiB, pool 256 cells in 0 MiB, 3 recurrent states in 3.0 MiB, so no reuse of earlier prompts, "
        "exact no (why), no drafts (--draft 0)"
    ]


def test_the_capacity_is_told_once_for_each_budget(caplog):
    hello = Hello("w", 1, "m", "cpu", "f32", 256, 16, 5, 256, True, pool_bytes=256 * 1000)
    tell = worker.tell_capacity(hello, Config())
    with caplog.at_level(logging.INFO, "parkade"):
        tell(0)
        tell(1 << 30)
        tell(0)
    none, some = caplog.messages
    assert "every park is computed again" in none
    assert "1024.0 MiB holds so many parks" in some
    assert len(some.splitlines()) > 5


def test_every_setting_that_the_scheduler_knows_by_the_same_name_reaches_it():
    both = {field.name for field in FIELDS} & set(Limits.__struct_fields__)
    others = {"exact", "park_every"}  # proven at the worker's start; for tests, so that no simulated run has it
    assert set(policy_settings(Config())) == both - others
    assert policy_settings(Config(park_ram="0", park_mode="save"))["park_mode"] == "recompute"
    assert policy_settings(Config(park_ram="1", park_mode="auto"))["park_mode"] == "auto"
