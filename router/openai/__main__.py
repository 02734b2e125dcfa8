"""`python -m router.openai`: serves HTTP until a signal, then lets what is under way finish and refuses the rest."""

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
import uvloop

from router.client import Client
from router.openai.app import create_app
from router.openai.connections import connection_class
from router.openai.keys import Keys
from router.openai.serving import Serving
from router.openai.text import Text, TextError
from wire.config import Config, ConfigError
from wire.model_files import ModelError, ModelFiles, find_model
from wire.service import file_limit, log, notify, passed_sockets, raise_file_limit, run, watchdog_s
from wire.sockets import client_address

BACKLOG = 1024
UNSENT_BYTES = 16 << 10  # for a reader that stops the kernel keeps 15 to 30 KiB with it, and 3 MiB without
SILENT_S = 120  # what was sent and not acknowledged for so long, or probes of a quiet peer: its machine is gone
CLOSING_S = 1  # for connections after the drain: all that counts has ended


def main(config: Config) -> int:
    """Serve until told to stop. ConfigError for what the user has to change."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it means to read the keys again, and they have not been read yet
    raise_file_limit()
    try:
        files = find_model(config.model)
        text = Text(files)
    except (ModelError, TextError) as error:
        raise ConfigError(str(error)) from None
    keys = Keys(config)
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(one) for one in map(taken_over, passed_sockets())]
        listeners = listeners or [stack.enter_context(listen(config.host, config.port))]
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        runner.run(serve(config, files, text, keys, listeners))
    return 0


def taken_over(listener: socket.socket) -> socket.socket:
    """A socket that systemd listens on, with the options that `listen` sets; --host and --port do not count then."""
    if listener.family != socket.AF_UNIX:
        limit_peers(listener)
    listener.setblocking(False)
    return listener


def limit_peers(listener: socket.socket) -> None:
    """What it accepts inherits these: little unsent for a peer that does not read, and an end for one that has gone without a
    word. The time is longer than a client that reads nothing may have, so that it can still be told why (`slow_client`)."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_NOTSENT_LOWAT", UNSENT_BYTES),
        ("TCP_USER_TIMEOUT", 1000 * SILENT_S),
        ("TCP_KEEPIDLE", max(1, SILENT_S // 4)),
        ("TCP_KEEPINTVL", max(1, SILENT_S // 8)),
    ):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, with `limit_peers`. ConfigError if the address is not to be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    except UnicodeError:
        raise ConfigError(f"--host {host!a}: no host can have such a name") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        limit_peers(listener)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--port {port} on {host}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


async def serve(config: Config, files: ModelFiles, text: Text, keys: Keys, listeners: list[socket.socket]) -> None:
    """Answer until SIGTERM or SIGINT and for `drain_s` after it; a second signal ends at once. SIGHUP: read the keys again."""
    async with Client(client_address(config.run_dir)) as client:
        serving = Serving(client, files, text, config, keys)
        server = Server(http_config(serving))
        gc.freeze()  # a collection would walk through the vocabulary and all modules; nothing of them ever goes
        stop, hurry = asyncio.Event(), asyncio.Event()

        def told() -> None:
            (hurry if stop.is_set() else stop).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, told)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, read_again, keys)
        running = asyncio.ensure_future(server.serve(listeners))
        stopping = asyncio.ensure_future(_drain(serving, server, stop, hurry, config.drain_s))
        for listener in listeners:
            log.info("model %s, listening on %s port %d", files.name, *listener.getsockname()[:2])
        notify("READY=1\nSTATUS=serving")
        alive = asyncio.ensure_future(feed_watchdog(watchdog_s()))
        try:
            await running
        finally:
            stopping.cancel()
            alive.cancel()


def read_again(keys: Keys) -> None:
    """Take the keys that the files hold now. Who is being answered is answered to the end."""
    try:
        keys.reload()
    except ConfigError as error:
        log.error("the keys from before stay in force: %s", error)
    else:
        log.info("the files of keys were read again: %d keys", len(keys))


async def feed_watchdog(every_s: float | None) -> None:
    """Tell systemd that this loop turns, for as long as it does."""
    while every_s:
        notify("WATCHDOG=1")
        await asyncio.sleep(every_s)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal instead of with status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def http_config(serving: Serving) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        create_app(serving),
        http=connection_class(file_limit()),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=CLOSING_S,
    )


async def _drain(serving: Serving, server: uvicorn.Server, stop: asyncio.Event, hurry: asyncio.Event, drain_s: float) -> None:
    """After `stop`: refuse new work with 503, wait for what is under way (the router ends it within `drain_s`), close."""
    await stop.wait()
    serving.draining = True
    notify("STOPPING=1")
    log.info("draining %d answers under way", serving.active)
    ends = (asyncio.ensure_future(serving.idle.wait()), asyncio.ensure_future(hurry.wait()))
    await asyncio.wait(ends, timeout=drain_s + CLOSING_S, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    serving.cut.set()
    try:
        async with asyncio.timeout(CLOSING_S):
            await serving.idle.wait()
    except TimeoutError:
        server.force_exit = True  # clients that do not read
    server.should_exit = True


if __name__ == "__main__":
    sys.exit(run("router.openai", main))
