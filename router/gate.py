"""The TCP endpoint for clients on other machines (`--listen`): who may come in by CURVE, and what such a guest may say.

Without it clients come through the run directory alone.
"""

import re
from ipaddress import ip_address

import zmq

from router.request import Request
from wire.config import Config, ConfigError
from wire.keys import read_allowed, read_secret
from wire.messages import Cancel, ClientToRouter, Park, Resume
from wire.sockets import bind_tcp

ZAP_ADDRESS = "inproc://zeromq.zap.01"  # where libzmq asks (RFC 27)
DOMAIN = b"parkade"
UNKNOWN_PEER = "tcp"  # the name of those that come without CURVE
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5}|\*)")


class Gate:
    """Owns the socket on which libzmq asks whether a peer may come in. `open` binds, `answer` is for the loop to call."""

    def __init__(self, config: Config) -> None:
        """ConfigError for an address that is none, or that would let anybody in from elsewhere."""
        self.address = config.listen
        self._clients_file = config.curve_clients
        match = _TCP.fullmatch(config.listen)
        if match is None:
            raise ConfigError(f"--listen {config.listen} is not an address like tcp://10.0.0.1:5555")
        if bool(config.curve_file) != bool(config.curve_clients):
            raise ConfigError("--curve-file and --curve-clients are needed together")
        if not config.curve_file and not _is_loopback(match[1].strip("[]")):
            why = "beyond this machine --curve-file and --curve-clients are needed, or anybody could come in"
            raise ConfigError(f"--listen {config.listen}: {why}")
        self._secret = read_secret(config.curve_file, "--curve-file") if config.curve_file else None
        self._allowed: dict[bytes, str] = {}
        self.reload()

    def reload(self) -> None:
        """Read the list of clients again: it says who may come in now; who is in stays. ConfigError if it does not do."""
        if self._clients_file:
            self._allowed = read_allowed(self._clients_file, "--curve-clients")

    def __len__(self) -> int:
        """How many keys may come in."""
        return len(self._allowed)

    def open(self, context: zmq.Context, clients: zmq.Socket) -> None:
        """Bind the clients' ROUTER to the address too. zmq.ZMQError if that cannot be."""
        self.asked = context.socket(zmq.REP)
        self.asked.setsockopt(zmq.LINGER, 0)
        self.asked.bind(ZAP_ADDRESS)  # first: without it libzmq would let in every key
        try:
            bind_tcp(clients, self.address, DOMAIN, self._secret)
        except zmq.ZMQError:
            self.close()
            raise
        self.address = clients.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Nobody comes in any more."""
        self.asked.unbind(ZAP_ADDRESS)  # now; closing alone does so some time later
        self.asked.close()

    def answer(self) -> None:
        """Say of each peer that waits whether it may come in."""
        while True:
            try:
                version, request, domain, _address, _identity, mechanism, *credentials = self.asked.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            name = self._name_of(domain, mechanism, credentials)
            verdict = [b"400", b"", b""] if name is None else [b"200", b"", name.encode()]
            self.asked.send_multipart([version, request, *verdict, b""])

    def _name_of(self, domain: bytes, mechanism: bytes, credentials: list[bytes]) -> str | None:
        if domain != DOMAIN:
            return None
        if self._secret is None:
            return UNKNOWN_PEER if mechanism == b"NULL" else None
        return self._allowed.get(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else None


def guest_of(frames: list[zmq.Frame]) -> str:
    """The name of the guest that has sent this; empty if it came through the run directory."""
    try:
        return frames[-1].get("User-Id")
    except zmq.ZMQError:
        return ""


def may_say(client: bytes, message: ClientToRouter, requests: dict[str, Request]) -> bool:
    """Whether a guest may say that: he acts on his own requests only, while an operator in the run directory acts on any."""
    if isinstance(message, Cancel | Park | Resume):
        request = requests.get(message.request_id)
        return request is not None and request.client == client
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False  # a name, an interface, * for all of them
