"""Files of keys: API keys for HTTP, and the CURVE keys of ZeroMQ peers on another machine. One key a line, `KEY` or `NAME KEY`.

Lines that start with # and empty ones do not count. CURVE keys are Z85 text of 40 characters, as `parkade keygen` writes them.
"""

import errno
import hashlib
import os
import stat
import struct
from pathlib import Path

import zmq
from zmq.utils import z85

from wire.config import ConfigError

MAX_NAME_CHARS = 64
CURVE_KEY_CHARS = 40


def read_keys(path: str, flag: str) -> dict[bytes, str]:
    """The name of each key in the file; one without a name gets one that is made from it and does not tell it. ConfigError that
    names the flag if there is no key, if a line has more than two words, or if a key is there twice."""
    try:
        lines = _plain_file(path).splitlines()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    names: dict[bytes, str] = {}
    for number, words in enumerate(map(bytes.split, lines), 1):
        if not words or words[0].startswith(b"#"):
            continue
        *name, key = words
        if len(name) > 1 or (name and (len(name[0]) > MAX_NAME_CHARS or not name[0].isascii())):
            raise ConfigError(
                f"{flag} {path}: line {number} is not KEY or NAME KEY, NAME with at most {MAX_NAME_CHARS} characters"
            )
        if key in names:
            raise ConfigError(f"{flag} {path}: the key of line {number} is there twice")
        names[key] = name[0].decode() if name else "key-" + hashlib.sha256(key).hexdigest()[:12]
    if not names:
        raise ConfigError(f"{flag} {path}: it holds no key")
    return names


def _plain_file(path: str) -> bytes:
    """What the file holds. OSError for a pipe or a device: to wait for one, at a SIGHUP, would stop a loop that serves."""
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        return file.read()


def read_allowed(path: str, flag: str) -> dict[bytes, str]:
    """The name of each public CURVE key (its 32 bytes) in the file. ConfigError as of read_keys, or if one is no such key."""
    return {curve_key(key, flag, path): name for key, name in read_keys(path, flag).items()}


def read_secret(path: str, flag: str) -> bytes:
    """The secret CURVE key in the file, as text. ConfigError as of read_keys, or if it is not one key alone, or everybody's."""
    keys = list(read_keys(path, flag))
    if Path(path).stat().st_mode & 0o007:
        raise ConfigError(f"{flag} {path}: every user can read or change it; chmod 600 it")
    if len(keys) != 1:
        raise ConfigError(f"{flag} {path}: it holds {len(keys)} keys instead of one")
    curve_key(keys[0], flag, path)
    return keys[0]


def curve_key(text: bytes, flag: str, path: str) -> bytes:
    """The 32 bytes of a CURVE key. ConfigError if `text` is none; it is not repeated, it may be a secret."""
    try:
        if len(text) == CURVE_KEY_CHARS:
            return z85.decode(text)
    except (KeyError, struct.error):  # a character, or five of them, that mean nothing
        pass
    raise ConfigError(f"{flag} {path}: a key is not the Z85 text of a CURVE key, {CURVE_KEY_CHARS} characters")


def new_pair() -> tuple[bytes, bytes]:
    """A new public and secret CURVE key, as text that no file of keys takes for a comment."""
    while True:
        public, secret = zmq.curve_keypair()
        if not (public.startswith(b"#") or secret.startswith(b"#")):
            return public, secret
