"""Both event loops: the router must not depend on one."""

import asyncio
import os
import resource

import pytest
import uvloop


@pytest.fixture(scope="session", autouse=True)
def many_files():
    """A thousand clients in one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine in a loop of its own."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run(coroutine):
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(coroutine, float(os.environ.get("PARKADE_TEST_PATIENCE_S", "60"))))

    return run
