"""The toy model behind the whole server: what parks, recompute and neighbours must not change is known without a server."""

import pytest

from gpu_worker.model.load import load_model
from gpu_worker.model.toy import Oracle
from tests.system.stack import Stack, prompt_ids, stream, together
from wire.messages import Sampling
from wire.model_files import find_model

GENERATED = 400


@pytest.mark.parametrize("park_ram", ["16MiB", "0"])
def test_parked_texts_are_what_the_oracle_says(tmp_path, park_ram):
    model = load_model(find_model("toy"))
    with Stack(tmp_path / "run", model="toy", ctx=1024, slots=4, park_ram=park_ram, park_mode="save") as stack:
        bodies = [{"prompt": prompt_ids(i, 100), "temperature": 0.5 * (i % 2), "seed": i} for i in range(4)]
        answers = together(*(stream(stack.url, max_tokens=GENERATED, **body) for body in bodies))
    assert sum(answer.parkade["parks"] for answer in answers) > 0
    for body, answer in zip(bodies, answers, strict=True):
        sampling = Sampling(temperature=body["temperature"], seed=body["seed"])
        assert answer.ids == Oracle(model, body["prompt"]).text(GENERATED, sampling)
