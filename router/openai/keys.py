"""Who may ask for what over HTTP: the API keys and admin keys of the files, and what is open where there are none.

The text of keys is known here alone; everything behind this adapter knows names.
"""

import hashlib
import hmac
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from router.openai.errors import ApiError
from wire.config import Config
from wire.keys import read_keys

OPEN_PATHS = ("/health",)  # a load balancer has no key
ADMIN_PATH = "/slots"  # what is there shows and moves everybody's requests
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")  # then a proxy on this machine speaks for somebody else


class Keys:
    """The keys in force, as digests: of API keys with their names, of admin keys."""

    def __init__(self, config: Config) -> None:
        """ConfigError if a file does not do."""
        self._files = config.api_key_file, config.admin_key_file
        self.reload()

    def reload(self) -> None:
        """Read the files again. ConfigError if one does not do; then the keys from before stay in force."""
        api, admin = self._files
        api_keys = _digests(read_keys(api, "--api-key-file")) if api else {}
        admin_keys = _digests(read_keys(admin, "--admin-key-file")) if admin else {}
        self._api, self._admin = api_keys, admin_keys

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._api) + len(self._admin)

    def name_of(self, scope: Scope) -> str:
        """The name of the key with which a request is made; empty where none is asked for, and for an admin. ApiError 401 or 403
        if it may not be made."""
        path, headers = scope["path"], Headers(scope=scope)
        if path in OPEN_PATHS:
            return ""
        given = _given(headers.get("authorization", ""))
        name, admin = _find(self._api, given), _find(self._admin, given)
        if admin is not None:
            return ""
        if path == ADMIN_PATH or path.startswith(ADMIN_PATH + "/"):
            self._check_admin_path(name, scope, headers)
        elif name is None and self._api:
            raise _unknown_key()
        return name or ""

    def _check_admin_path(self, name: str | None, scope: Scope, headers: Headers) -> None:
        """ApiError unless nobody has any key, and the client is on this machine."""
        if self._admin or self._api:
            if name is None:
                raise _unknown_key()
            raise ApiError(403, f"{ADMIN_PATH} is for the keys of --admin-key-file.", code="admin_key_required")
        if not _is_local(scope, headers):
            why = f"Without --admin-key-file {ADMIN_PATH} is open to clients on the server's own machine only."
            raise ApiError(403, why, code="admin_key_required")


class KeyCheck:
    """ASGI middleware: passes on what is allowed, with the key's name in the scope's state as `key`."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, or answer 401 or 403."""
        if scope["type"] == "http":
            try:
                name = self._keys.name_of(scope)
            except ApiError as error:
                await error.response({"www-authenticate": "Bearer"} if error.status == 401 else None)(scope, receive, send)
                return
            scope["state"] = {**scope.get("state", {}), "key": name}
        await self._app(scope, receive, send)


def _unknown_key() -> ApiError:
    return ApiError(
        401,
        "Incorrect API key provided, or none; send it as 'Authorization: Bearer KEY' (parkade: --api-key KEY).",
        code="invalid_api_key",
    )


def _digests(names: dict[bytes, str]) -> dict[bytes, str]:
    return {hashlib.sha256(key).digest(): name for key, name in names.items()}


def _given(authorization: str) -> bytes:
    """The digest of the key that a header carries; of nothing that could be a key if it carries none."""
    scheme, _, key = authorization.partition(" ")
    return hashlib.sha256(key.encode("latin-1").strip() if scheme.lower() == "bearer" else b"").digest()


def _find(digests: dict[bytes, str], given: bytes) -> str | None:
    """The name of a key, or None. Takes the same time whichever key it is, or none."""
    found = None
    for digest, name in digests.items():
        found = name if hmac.compare_digest(given, digest) else found
    return found


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Whether the client is on this machine, as far as can be seen: the other end of the connection, and no sign of a proxy."""
    if any(name in headers for name in FORWARDED):
        return False
    try:
        address = ip_address((scope.get("client") or ("",))[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
