"""For all tests: settings of the machine they run on do not count, tests of real processes are marked as such, and who runs where."""

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
    """What lies under tests/system starts real processes: where there are two test processes (pytest-xdist), only one of them has
    such tests, and the other tests stay together file by file, as they share what their modules set up."""
    for item in items:
        is_system = item.path.is_relative_to(HERE / "system")
        if is_system:
            item.add_marker(pytest.mark.system)
        if item.config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group("system" if is_system else str(item.path.relative_to(HERE))))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tests that compute without asking for threads have one: their tensors are far too small to share out, and two teams of
    threads in two test processes would take the processors from each other."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
