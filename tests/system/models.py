"""The models that system tests run: the trained ones by name, and random ones that are written for the test."""

from pathlib import Path

import pytest

from tests.make_models import write_hf
from wire.model_files import find_model

TRAINED = ("bard", "smollm2")
RANDOM = ("random hybrid", "random llama")


def model_of(name: str, folder: Path) -> str:
    """What `--model` wants for one of TRAINED and RANDOM. Random models are written below `folder`, each time the same.

    Skips the test if the model comes without its head."""
    match name:
        case "random hybrid":
            return str(write_hf(folder / "hybrid", "qwen35", context=4096, layers=8, mtp=True, seed=1))
        case "random llama":  # drafts only every other token
            drafted = list(range(0, 256, 2))
            size = {"layers": 4, "tied": False, "context": 4096}
            return str(write_hf(folder / "llama", "llama", mtp=True, draft_ids=drafted, **size))
        case _:
            if find_model(name).spec.mtp is None:
                pytest.skip(f"{name} has no head that drafts")
            return name
