"""For all tests: settings of the machine they run on do not count, and tests of real processes are marked as such."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

if os.environ.get("KERNELS_ON") != "card":
    from tests.cuda.fake.overlay import sitecustomize

    sitecustomize.install()  # torch_on_card is that of the fake driver; before anybody imports the real one


def pytest_configure() -> None:
    """Forget PARKADE_... variables: a test, and every process it starts, has only the settings that it asks for."""
    for name in [name for name in os.environ if name.startswith("PARKADE_")]:
        del os.environ[name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What lies under tests/system starts real processes."""
    for item in items:
        if item.path.is_relative_to(HERE / "system"):
            item.add_marker(pytest.mark.system)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tests that compute without asking for threads have one: their tensors are far too small to share out, and a team
    whose members wait for one another is slow where others take the processors."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
