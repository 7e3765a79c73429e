"""API keys: stored as SHA-256, compared in constant time, each with a name and limits.

A key has 256 random bits, so that a plain hash is enough: there is no dictionary to try. The name
of a key is its tenant. The prefix cache is salted with an HMAC of the tenant under a secret of this
process, or of the tiers of the KV cache where blocks outlive it: no tenant can hit, probe or guess
another's blocks, whatever `cache_salt` it sends. Keys with the same `cache_group` share blocks on
purpose.

    [[keys]]
    name = "alice"
    sha256 = "…"                  # ridgeline new-key alice
    requests_per_minute = 60      # optional, as are all below
    tokens_per_minute = 100000
    cache_group = "team"
    min_priority = 0              # lower goes first; an administrator's key: -100
    share = 2.0                   # of a busy engine, next to the 1.0 of another key
    admin = false
"""

from __future__ import annotations

import hmac
import secrets
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec

from ridgeline.errors import DECODE_ERRORS, BadInput

MAX_NAME_CHARS = 100
_MAX_FILE_BYTES = 1 << 20
PerMinute = Annotated[int, msgspec.Meta(ge=1)]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key as the file stores it."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    cache_group: str | None = None
    min_priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] | None = None
    share: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    admin: bool = False


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[ApiKey]


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends a request. `salt` goes into the block hashes of its prefix cache; `min_priority` is
    the most urgent priority it may ask for, `share` its part of an engine that is busy."""

    name: str = ""
    salt: str = ""
    admin: bool = True
    min_priority: int = -100
    share: float = 1.0

    def tenant(self, cache_salt: str | None) -> str:
        """The tenant of one request; a `cache_salt` only ever divides further."""
        return f"{self.salt}\0{cache_salt or ''}" if self.salt else cache_salt or ""


ANONYMOUS = Caller()
"""The caller if no keys are configured."""


class KeyRing:
    """The keys of this server; empty if none are configured."""

    def __init__(self, keys: tuple[ApiKey, ...] = (), secret: bytes | None = None) -> None:
        self.keys = keys
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._digests = [bytes.fromhex(key.sha256) for key in keys]
        self._callers = [self._caller(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self.keys)

    def with_secret(self, secret: bytes | None) -> KeyRing:
        """The same keys, with tenants salted by `secret`; None keeps the present one."""
        return self if secret is None else KeyRing(self.keys, secret)

    def find(self, key: bytes) -> Caller | None:
        """The owner of a key. Every digest is compared, even after one has matched."""
        digest, owner = sha256(key).digest(), None
        for known, caller in zip(self._digests, self._callers, strict=True):
            if hmac.compare_digest(digest, known):
                owner = caller
        return owner

    def caller_named(self, name: str) -> Caller:
        """The caller of a key's name, even if the key is gone; ANONYMOUS for an empty name."""
        for key, caller in zip(self.keys, self._callers, strict=True):
            if key.name == name:
                return caller
        return self._caller(ApiKey(name=name, sha256="0" * 64)) if name else ANONYMOUS

    def _caller(self, key: ApiKey) -> Caller:
        kind, name = ("key", key.name) if key.cache_group is None else ("group", key.cache_group)
        salt = hmac.new(self._secret, f"{kind}\0{name}".encode(), sha256).hexdigest()
        default = -100 if key.admin else 0
        min_priority = default if key.min_priority is None else key.min_priority
        return Caller(
            name=key.name,
            salt=salt,
            admin=key.admin,
            min_priority=min_priority,
            share=key.share,
        )


def load_keys(api_key: str | None, file: str | None) -> KeyRing:
    """One key in plain text and a file of hashed ones; BadInput if either cannot be used."""
    keys = _read(Path(file)) if file else []
    if api_key is not None:
        if not api_key.strip():
            raise BadInput("the API key is empty", fix="create one with `ridgeline new-key NAME`")
        digest = sha256(api_key.encode()).hexdigest()
        keys.append(ApiKey(name="default", sha256=digest, admin=True))
    names = [key.name for key in keys]
    if len(set(names)) < len(names):
        raise BadInput("two API keys have the same name", value=", ".join(names))
    return KeyRing(tuple(keys))


def new_key(name: str) -> tuple[str, str]:
    """A new key, to be shown once, and its entry for the file. BadInput for an unusable name."""
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise BadInput(
            "the name of an API key is too long" if name else "an API key needs a name",
            value=f"{len(name)} characters",
            limit=f"1 to {MAX_NAME_CHARS}",
            fix="choose a shorter name" if name else "name the key's owner",
        )
    key = "rl-" + secrets.token_urlsafe(32)
    entry = ApiKey(name=name, sha256=sha256(key.encode()).hexdigest())
    quoted_name = msgspec.json.encode(entry.name).decode()
    return key, f'[[keys]]\nname = {quoted_name}\nsha256 = "{entry.sha256}"\n'


def _read(file: Path) -> list[ApiKey]:
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            limit = f"{_MAX_FILE_BYTES} bytes"
            raise BadInput("the file of API keys is too large", value=str(file), limit=limit)
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        keys = msgspec.convert(table, _KeyFile).keys
    except (OSError, *DECODE_ERRORS) as error:
        raise BadInput("the file of API keys cannot be read", value=str(error)) from None
    if not keys:
        raise BadInput("the file of API keys is empty", value=str(file))
    return list(keys)
