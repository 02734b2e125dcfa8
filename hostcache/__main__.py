"""`python -m hostcache`: reads the settings, opens the arena and the socket, serves until SIGTERM."""

import logging
import sys

from hostcache.budget import PAGE_BYTES
from hostcache.server import Server, listen, open_arena
from wire.config import Config
from wire.memory import budget_bytes, total_bytes
from wire.service import notify, run
from wire.sockets import hostcache_path

log = logging.getLogger("parkade")


def main(config: Config) -> None:
    """Serve `config.run_dir`; ConfigError if the budget is larger than the memory or the socket is taken."""
    budget, line = budget_bytes(config.park_ram, total_bytes())
    listener = listen(hostcache_path(config.run_dir))
    server = Server(listener, *open_arena(budget // PAGE_BYTES * PAGE_BYTES))
    log.info("%s", line)
    notify(f"READY=1\nSTATUS={line}")
    server.run()


if __name__ == "__main__":
    sys.exit(run("hostcache", main))
