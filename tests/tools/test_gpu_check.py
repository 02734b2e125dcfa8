"""The part of tools/gpu_check that starts the kernels' tests: on a card they run there, with torch's real memory."""

import os
import subprocess
import sys

import pytest

from tests.cuda.fake import environ
from tools.gpu_check import __main__ as gpu_check


@pytest.mark.skipif(bool(environ.missing()), reason=environ.missing())
def test_the_kernels_tests_run_on_the_card(monkeypatch, tmp_path):
    for name, value in environ.variables(counters=tmp_path).items():
        monkeypatch.setenv(name, value)
    done = gpu_check.pytest_on_card([], ["tests/kernels/test_mlp.py"], limit_s=60)
    assert gpu_check.passed(done), done.stdout + done.stderr
    assert sum(counters["launches"] for counters in environ.counters_of(tmp_path).values())


def test_on_a_card_tests_have_the_real_torch_on_card():
    code = "import tests.conftest, importlib.util as u; print(u.find_spec('gpu_worker.device.torch_on_card').origin)"
    environment = {**os.environ, "KERNELS_ON": "card"}
    done = subprocess.run([sys.executable, "-c", code], cwd=gpu_check.ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(gpu_check.ROOT / "gpu_worker/device/torch_on_card.py"), done.stderr


def test_skipped_tests_prove_nothing():
    assert gpu_check.passed(subprocess.CompletedProcess([], 0, "3 passed, 1 skipped in 0.1s"))
    assert not gpu_check.passed(subprocess.CompletedProcess([], 0, "3 skipped in 0.1s"))
    assert not gpu_check.passed(subprocess.CompletedProcess([], 1, "1 failed, 3 passed in 0.1s"))
