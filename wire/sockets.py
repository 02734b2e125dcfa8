"""Where the processes meet: names in the run directory, and ZeroMQ sockets with the options that every one of them needs."""

import os
from pathlib import Path

import zmq

from wire.config import ConfigError

MAX_FRAME_BYTES = 64 << 20  # a 32 MiB body of token ids fits; more is cut off by the socket
LINGER_MS = 200
HIGH_WATER_MARK = 1000  # messages a pipe holds before a send fails with EAGAIN
MAX_PATH_BYTES = 107  # of a Unix socket
TCP_HEARTBEAT_MS = 5000


def client_address(run_dir: str | Path) -> str:
    """Where clients of the router connect (DEALER)."""
    return f"ipc://{run_dir}/client.sock"


def worker_address(run_dir: str | Path) -> str:
    """Where workers connect to the router (DEALER with an identity)."""
    return f"ipc://{run_dir}/worker.sock"


def hostcache_path(run_dir: str | Path) -> str:
    """Unix SOCK_SEQPACKET socket of the host cache."""
    return f"{run_dir}/hostcache.sock"


def check_path(path: str) -> None:
    """ConfigError if no socket can have this path."""
    try:
        nbytes = len(path.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"--run-dir: not UTF-8, as the names of sockets have to be: {path!a}") from None
    if nbytes > MAX_PATH_BYTES:
        many = f"{nbytes} bytes, the limit is {MAX_PATH_BYTES} (characters beyond ASCII have several)"
        raise ConfigError(f"--run-dir: the socket's path has {many}: {path}")


def router_socket(context: zmq.Context, address: str, fd: int | None = None, handover: bool = False) -> zmq.Socket:
    """A bound ROUTER: unknown or full peers are errors (EHOSTUNREACH, EAGAIN), never silent drops. `fd`: a descriptor that
    listens at this address already; it is the socket's from now on. `handover`: peers have identities of their own, and who comes
    with one that is there takes its place; without it nobody can."""
    path = address.removeprefix("ipc://")
    check_path(path)
    socket = context.socket(zmq.ROUTER)
    _options(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, handover)
    if fd is not None:
        socket.setsockopt(zmq.USE_FD, fd)
    umask = os.umask(0o077)  # the file of the socket is for this user, whatever the folder is for
    try:
        socket.bind(address)
    finally:
        os.umask(umask)
    return socket


def bind_tcp(socket: zmq.Socket, address: str, domain: bytes, secret_key: bytes | None) -> None:
    """Bind a ROUTER, which keeps what it is bound to, to a TCP address too. Its peers there are asked about in `domain` (RFC 27);
    they need CURVE where there is a secret key. zmq.ZMQError if the address is not to be had."""
    socket.setsockopt(zmq.USE_FD, -1)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.HEARTBEAT_IVL, TCP_HEARTBEAT_MS)  # a machine that vanishes says nothing
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * TCP_HEARTBEAT_MS)
    if secret_key is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    socket.bind(address)


def dealer_socket(
    context: zmq.Context, address: str, identity: bytes | None = None, curve: tuple[bytes, bytes] | None = None
) -> zmq.Socket:
    """A connected DEALER. Only workers set an identity (name-pid-boot), so a former life is never mistaken for this one. `curve`:
    the server's public and our own secret key, for a TCP address that wants them. ValueError for keys that are none."""
    socket = context.socket(zmq.DEALER)
    _options(socket)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    if curve is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, curve[0])
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(curve[1]))
        socket.setsockopt(zmq.CURVE_SECRETKEY, curve[1])
    if address.startswith("tcp:"):
        socket.setsockopt(zmq.IPV6, "[" in address)
        socket.setsockopt(zmq.HEARTBEAT_IVL, TCP_HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * TCP_HEARTBEAT_MS)
    socket.connect(address)
    return socket


def _options(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
