"""`parkade serve`: checks the settings, starts the processes, says when they are ready, and drains them at the end."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys

import msgspec

from parkade.run_dir import run_dir
from parkade.supervisor import Failure, Program, Supervisor, ended_how
from router.client import Client
from wire import failpoints, sockets
from wire.config import Config, ConfigError, as_environ, devices
from wire.messages import Status
from wire.model_files import find_model
from wire.service import USER_ERROR, log, notify, write_out

POLL_S = 0.1
ASK_S = 5.0
KEEPERS = ("openai", "router")  # of files that a SIGHUP has read again


def serve(config: Config) -> int:
    """Run a server until it is told to stop; the exit status. ConfigError before anything has been started."""
    failpoints.check()
    find_model(config.model)
    config = msgspec.structs.replace(config, port=free_port(config.host, config.port))
    with run_dir(config.run_dir) as path:
        return asyncio.run(_serve(msgspec.structs.replace(config, run_dir=path)))


def programs(config: Config) -> list[Program]:
    """The processes of a server. Clients' side first in the order of stopping, the host cache last."""
    environ = os.environ | as_environ(config)
    environ.pop("PARKADE_CONFIG", None)  # it is resolved already
    environ.pop("NOTIFY_SOCKET", None)  # that is ours
    environ.setdefault("PYTHONUNBUFFERED", "1")
    environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's spinning threads starve the router on a small machine

    def program(name: str, module: str, wave: int, **more: str) -> Program:
        return Program(name, (sys.executable, "-m", module), environ | more, wave)

    return [
        program("hostcache", "hostcache", 2),
        program("router", "router", 0),
        *(program(name, "gpu_worker", 1, PARKADE_WORKER_NAME=name) for name in devices(config.device)),
        program("openai", "router.openai", 0),
    ]


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. ConfigError if the HTTP adapter could not listen there."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return probe.getsockname()[1]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    except UnicodeError:
        raise ConfigError(f"--host {host!a}: no host can have such a name") from None
    except OSError as error:
        raise ConfigError(f"--port {port} on {host}: {error.strerror}; choose another with --port") from None


def url_of(host: str, port: int) -> str:
    """The address of the HTTP adapter as a URL."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _serve(config: Config) -> int:
    """Start, wait for ready, wait for a signal, drain."""
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    def hung_up() -> None:
        """A closed terminal means to stop, as it always has; any other SIGHUP, to read the files of keys again."""
        if has_terminal and not _terminal():
            told()
        else:
            for name in KEEPERS:
                supervisor.tell(name, signal.SIGHUP)

    has_terminal = _terminal() and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # that is nohup's
    for number, heard in ((signal.SIGTERM, told), (signal.SIGINT, told), (signal.SIGHUP, hung_up)):
        loop.add_signal_handler(number, heard)
    log.info("model %s, ctx %d, slots %d, policy %s, park-ram %s, run-dir %s", config.model, config.ctx, config.slots,
             config.policy, config.park_ram, config.run_dir)  # fmt: skip
    supervisor = Supervisor(programs(config))
    ready = asyncio.ensure_future(_until_ready(config))
    stopped = asyncio.ensure_future(stop.wait())
    try:
        supervisor.start()
        await asyncio.wait({ready, stopped, supervisor.failed}, return_when=asyncio.FIRST_COMPLETED)
        if supervisor.failed.done():
            return _give_up(supervisor.failed.result())
        if ready.done():
            ready.result()  # an exception there is a bug, and ends us
            supervisor.settled = True
            await _say_ready(config)
            await stopped
            log.info("draining: up to %g s for what runs; a second signal cuts it short", config.drain_s)
            notify("STOPPING=1")
        await supervisor.stop(config.drain_s if ready.done() else 0.0, hurry)
        log.info("cut short" if hurry.is_set() else "done")
        return 1 if hurry.is_set() else 0
    finally:
        ready.cancel()
        stopped.cancel()
        await supervisor.kill()


def _terminal() -> bool:
    """Whether this process has a terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)  # that says nothing; what is asked is whether it has gone
    return True


def _give_up(failure: Failure) -> int:
    line = failure.line or "it said nothing"
    raise ConfigError(line if failure.status == USER_ERROR else f"{failure.name} {ended_how(failure.status)}: {line}")


async def _until_ready(config: Config) -> None:
    """Until /health answers 200."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(config.host, config.host)
    while not await _healthy(host, config.port):
        await asyncio.sleep(POLL_S)


async def _healthy(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(ASK_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                await writer.drain()
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return status_line.split()[1:2] == [b"200"]


async def _say_ready(config: Config) -> None:
    try:
        async with asyncio.timeout(ASK_S), Client(sockets.client_address(config.run_dir)) as client:
            log.info("ready: %s", _in_words(await client.status()))
    except TimeoutError:
        log.warning("ready, but the router did not tell its state within %g s", ASK_S)
    notify("READY=1\nSTATUS=serving")
    with contextlib.suppress(OSError):  # a full disk, or nobody who reads
        write_out(1, f"ready {url_of(config.host, config.port)}\n")


def _in_words(status: Status) -> str:
    workers = (
        f"{w.name} {w.model} as {w.dtype} on {w.device}, ctx {w.pool_cells}, slots {w.slots}, exact {'yes' if w.exact else 'no'}"
        + (f" ({w.exact_note})" if w.exact_note else "")
        + (f", drafts up to {w.draft}" if w.draft else f", no drafts ({w.draft_note})")
        for w in status.workers
    )
    return "; ".join(workers)
