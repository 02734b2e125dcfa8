"""Where the processes meet: names in the run directory, and ZeroMQ sockets with the options that every one of them needs."""

from pathlib import Path

import zmq

MAX_FRAME_BYTES = 64 << 20  # a 32 MiB body of token ids fits; more is cut off by the socket
LINGER_MS = 200
HIGH_WATER_MARK = 1000  # messages a pipe holds before a send fails with EAGAIN
MAX_IPC_PATH_CHARS = 107


def client_address(run_dir: str | Path) -> str:
    """Where clients of the router connect (DEALER)."""
    return f"ipc://{run_dir}/client.sock"


def worker_address(run_dir: str | Path) -> str:
    """Where workers connect to the router (DEALER with an identity)."""
    return f"ipc://{run_dir}/worker.sock"


def hostcache_path(run_dir: str | Path) -> str:
    """Unix SOCK_SEQPACKET socket of the host cache."""
    return f"{run_dir}/hostcache.sock"


def router_socket(context: zmq.Context, address: str, fd: int | None = None) -> zmq.Socket:
    """A bound ROUTER: unknown or full peers are errors (EHOSTUNREACH, EAGAIN), never silent drops. `fd`: a descriptor that
    listens at this address already; it is the socket's from now on."""
    path = address.removeprefix("ipc://")
    if len(path) > MAX_IPC_PATH_CHARS:
        raise ValueError(f"--run-dir: the socket's path has {len(path)} characters, the limit is {MAX_IPC_PATH_CHARS}: {path}")
    socket = context.socket(zmq.ROUTER)
    _options(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if fd is not None:
        socket.setsockopt(zmq.USE_FD, fd)
    socket.bind(address)
    return socket


def dealer_socket(context: zmq.Context, address: str, identity: bytes | None = None) -> zmq.Socket:
    """A connected DEALER. Only workers set an identity (name-pid-boot), so a former life is never mistaken for this one."""
    socket = context.socket(zmq.DEALER)
    _options(socket)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(address)
    return socket


def _options(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
