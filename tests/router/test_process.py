"""`python -m router` as a process: signals, exit statuses, what it leaves behind, metrics before anything happened."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.client import Client
from tests.router.stage import Stage, ids_of, until
from wire.messages import Generate, Submit
from wire.sockets import client_address

pytestmark = pytest.mark.system


@pytest.fixture
def run_dir():
    with tempfile.TemporaryDirectory(prefix="parkade-") as path:
        yield path


@pytest.fixture
def process(run_dir):
    environ = {**os.environ, "PARKADE_RUN_DIR": run_dir, "PARKADE_DRAIN_S": "60"}
    process = subprocess.Popen([sys.executable, "-m", "router"], env=environ, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()
    process.stderr.close()


def test_sigterm_drains_and_leaves_nothing_behind(run, process, run_dir):
    async def story():
        stage = Stage(None, run_dir, None)
        async with Client(client_address(run_dir)) as client:
            worker = await stage.worker()
            stream = client.submit(Generate("r", [1], max_tokens=3))
            submit = await worker.next(Submit)
            process.send_signal(signal.SIGTERM)
            await until(client, lambda status: status.draining)
            await worker.play(submit)
            assert await ids_of(stream) == [0, 1, 2]
        await stage.close()

    run(story())
    assert process.wait(20) == 0
    assert list(Path(run_dir).iterdir()) == []


def test_a_second_sigterm_ends_every_stream_with_a_word(run, process, run_dir):
    async def story():
        async with Client(client_address(run_dir)) as client:
            stream = client.submit(Generate("r", [1]))
            await stream.accepted()
            process.send_signal(signal.SIGTERM)
            await until(client, lambda status: status.draining)
            process.send_signal(signal.SIGTERM)
            assert [(m.reason, m.code) async for m in stream] == [("error", "drain_timeout")]

    run(story())
    assert process.wait(20) == 0


def test_a_sigkill_ends_the_clients_streams(run, process, run_dir):
    async def story():
        async with Client(client_address(run_dir)) as client:
            stream = client.submit(Generate("r", [1]))
            await stream.accepted()
            process.kill()
            assert [(m.reason, m.code) async for m in stream] == [("error", "router_lost")]

    run(story())


def test_metrics_are_all_there_from_the_start(run, process, run_dir):
    async def story():
        async with Client(client_address(run_dir)) as client:
            return await client.status(timeout_s=20)

    text = run(story()).metrics
    samples = {(s.name, *s.labels.values()): s.value for family in text_string_to_metric_families(text) for s in family.samples}
    wanted = [("parkade_preempt_total", kind) for kind in ("pressure", "forced", "explicit")]
    wanted += [("parkade_kv_cells", state) for state in ("active", "reusable", "parking", "resuming", "free")]
    wanted += [("parkade_park_denied_total", reason) for reason in ("full", "fragmented", "memory", "not_attached", "too_many")]
    wanted += [("parkade_parks_total", "save", "asked"), ("parkade_parks_total", "recompute", "copy_dearer")]
    wanted += [
        (name,)
        for name in (
            "parkade_resume_total",
            "parkade_recompute_tokens_total",
            "parkade_recompute_stalled_total",
            "parkade_images_damaged_total",
            "parkade_requests_preempted",
            "parkade_hostcache_budget_bytes",
            "parkade_hostcache_used_bytes",
            "parkade_hostcache_held_bytes",
            "parkade_tokens_generated_total",
            "parkade_requests_running",
            "parkade_requests_queued",
            "parkade_time_to_first_token_seconds_count",
            "parkade_token_gap_seconds_count",
            "parkade_parked_seconds_count",
        )
    ]
    assert {name: samples.get(name) for name in wanted} == dict.fromkeys(wanted, 0.0)


@pytest.mark.parametrize("run_dir", ["/nonexistent/folder", "/tmp/" + "x" * 120])
def test_a_run_dir_that_does_not_do_is_one_line_and_status_78(run_dir):
    done = subprocess.run([sys.executable, "-m", "router", "--run-dir", run_dir], capture_output=True, text=True, timeout=30)
    assert done.returncode == 78
    assert "--run-dir" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
