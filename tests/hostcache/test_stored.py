"""The arena in systemd's descriptor store, through a stop: images of living workers stay, an arena of nobody is emptied."""

import os
import signal
from pathlib import Path

import pytest

from tests.hostcache.service import HostCache, ask
from wire.messages import Granted, Reserve


@pytest.mark.parametrize("attached", [True, False])
def test_what_a_stop_leaves_in_a_kept_arena(tmp_path: Path, attached: bool) -> None:
    with HostCache(tmp_path / "run", store=True) as cache:
        worker, _, fd = cache.attach()
        os.close(fd)
        assert isinstance(ask(worker, Reserve(ask=1, request_id="r", nbytes=4096)), Granted)
        (kept,) = cache.kept.values()
        assert os.fstat(kept).st_blocks
        if not attached:
            worker.close()
            cache.until(lambda figures: figures.leases == 0)
        cache.signal(signal.SIGTERM)
        assert cache.process.wait(30) == 0
        assert bool(os.fstat(kept).st_blocks) == attached
        worker.close()
