"""`python -m router`: one loop, two sockets, until SIGTERM and a drain; a second signal ends every stream at once."""

import asyncio
import signal
import sys

import uvloop
import zmq

from router.gate import Gate
from router.keys import KeyLimits
from router.server import Server
from wire.config import Config, ConfigError
from wire.service import log, raise_file_limit, run


def main(config: Config) -> int:
    """Serve. ConfigError if the sockets cannot be made in the run directory."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it means to read the list of clients again: nothing to do before it was read
    raise_file_limit()
    limits = KeyLimits(config.key_requests, config.key_queued_tokens, config.key_cells)
    gate = Gate(config) if config.listen else None
    server = Server(config.run_dir, config.max_queued, config.drain_s, limits, gate)
    try:
        server.open()
    except (zmq.ZMQError, ValueError) as error:
        raise ConfigError(f"--run-dir {config.run_dir}: {error}") from None
    if gate is not None:
        try:
            server.open_gate()
        except zmq.ZMQError as error:
            raise ConfigError(f"--listen {config.listen}: {error}") from None
        log.info(
            "clients may come in at %s, %s", gate.address, f"{len(gate)} by their keys" if len(gate) else "from this machine"
        )
    log.info("serving in %s, at most %d requests queued", config.run_dir, config.max_queued)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(server))
    log.info("stopped")
    return 0


async def serve(server: Server) -> None:
    """Serve until a signal and the drain after it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.read_again)
    await server.run()


if __name__ == "__main__":
    sys.exit(run("router", main))
