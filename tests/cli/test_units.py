"""The units for systemd: systemd itself finds nothing to say about them, and their settings are settings."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wire.config import load

ROOT = Path(__file__).parents[2]
UNITS = sorted(path for path in (ROOT / "systemd").iterdir() if path.suffix in (".service", ".target", ".slice"))
PYTHON = "/opt/parkade/.venv/bin/python"


def test_the_settings_are_settings() -> None:
    config = load({}, str(ROOT / "systemd" / "config.toml"), {})
    assert config.run_dir == "/run/parkade"


def test_there_is_one_for_each_process() -> None:
    started = {match for unit in UNITS for match in re.findall(rf"^ExecStart={PYTHON} -m (\S+)", unit.read_text(), re.MULTILINE)}
    assert started == {"hostcache", "router", "gpu_worker", "router.openai"}


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_finds_nothing_to_say(tmp_path: Path) -> None:
    for unit in UNITS:
        name = unit.name.replace("@.", "@cpu0.")
        (tmp_path / name).write_text(unit.read_text().replace(PYTHON, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", *sorted(map(str, tmp_path.iterdir()))], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")  # it warns of typos with status 0
