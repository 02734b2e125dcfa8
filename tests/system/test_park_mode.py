"""How a park keeps its cells, and why: client, metrics and log tell the same, and the text is the same in every mode."""

import re
from collections import Counter

import pytest

from tests.system.stack import Stack, by_zeromq, hear, prompt_ids
from wire.messages import Sampling

EVERY = 20
TOKENS = 150
LINE = re.compile(r"parked (\S+) \(forced\): (\d+) cells, (save|recompute), (\w+)(: .*)?$", re.MULTILINE)
METRIC = re.compile(r'^parkade_parks_total\{mode="(\w+)",reason="(\w+)"\} ([\d.]+)$', re.MULTILINE)
WHY = {
    "save": {("save", "asked")},
    "recompute": {("recompute", "asked")},
    "auto": {("save", "unmeasured"), ("save", "cheaper"), ("recompute", "copy_dearer"), ("recompute", "budget_dear")},
}


@pytest.fixture(scope="module")
def unparked(tmp_path_factory):
    with Stack(tmp_path_factory.mktemp("unparked") / "run", model="bard", ctx=512) as stack:
        return ask(stack).ids


def ask(stack: Stack):
    async def scenario(client):
        return await hear(client, prompt_ids(1, 40), max_tokens=TOKENS, sampling=Sampling(temperature=0))

    return by_zeromq(stack, scenario)


@pytest.mark.parametrize("mode", [mode if mode == "auto" else pytest.param(mode, marks=pytest.mark.long) for mode in WHY])
def test_the_client_the_metrics_and_the_log_tell_the_same_of_each_park(tmp_path, unparked, mode):
    with Stack(tmp_path / "run", model="bard", ctx=512, park_every=EVERY, park_mode=mode) as stack:
        heard = ask(stack)
        assert heard.ids == unparked and heard.finished.reason == "length"
        told = [(notice.mode, notice.reason) for notice in heard.notices if notice.event == "parked"]
        assert len(told) == (TOKENS - 1) // EVERY
        assert set(told) <= WHY[mode]
        assert all(notice.reason == "" for notice in heard.notices if notice.event == "resumed")
        text = stack.http.get("/metrics").text
        counted = {(mode, reason): float(value) for mode, reason, value in METRIC.findall(text) if float(value)}
        assert counted == Counter(told)
        lines = LINE.findall(stack.log)
        assert [(mode, reason) for _, _, mode, reason, _ in lines] == told
        # the newest token has no cell yet
        assert [int(cells) for _, cells, *_ in lines] == [39 + known for known in heard.known[::2]]
        measured = [numbers for *_, numbers in lines if numbers]
        assert len(measured) == sum(reason in ("cheaper", "copy_dearer", "budget_dear") for _, reason in told)
        assert all("copies" in numbers and "computing" in numbers and "budget" in numbers for numbers in measured)
        assert mode != "auto" or measured, "nothing was ever measured"
