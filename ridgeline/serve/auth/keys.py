"""API keys: kept as SHA-256, compared in constant time, each with a name and limits of its own.

A key is 256 random bits, so that a plain hash is enough: there is no dictionary to try. The name of
a key is its tenant; the prefix cache is salted with an HMAC of it under a secret of this process,
so that no tenant can hit, probe or guess another's blocks, whatever `cache_salt` it sends. Keys
that name the same `cache_group` share on purpose.

    [[keys]]
    name = "alice"
    sha256 = "…"                  # ridgeline new-key alice
    requests_per_minute = 60      # optional, as are all below
    tokens_per_minute = 100000
    cache_group = "team"
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

from ridgeline.errors import BadInput

MAX_NAME = 100  # characters
_MAX_FILE_BYTES = 1 << 20
Rate = Annotated[int, msgspec.Meta(ge=1)]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key as the file holds it."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    requests_per_minute: Rate | None = None
    tokens_per_minute: Rate | None = None
    cache_group: str | None = None
    admin: bool = False


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[Key]


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends a request: `salt` goes into the hashes of its prefix cache."""

    name: str = ""
    salt: str = ""
    admin: bool = True

    def tenant(self, cache_salt: str | None) -> str:
        """The tenant of one request; a `cache_salt` only ever divides further."""
        return f"{self.salt}\0{cache_salt or ''}" if self.salt else cache_salt or ""


NOBODY = Caller()
"""The caller where no key is asked for."""


class KeyRing:
    """Every key that opens this server. Empty: no key is asked for."""

    def __init__(self, keys: tuple[Key, ...] = (), secret: bytes | None = None) -> None:
        self.keys = keys
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._digests = [bytes.fromhex(key.sha256) for key in keys]
        self._callers = [self._caller(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self.keys)

    def find(self, given: bytes) -> Caller | None:
        """Whose key it is. Every key is compared, whether or not one has matched before."""
        digest, found = sha256(given).digest(), None
        for known, caller in zip(self._digests, self._callers, strict=True):
            if hmac.compare_digest(digest, known):
                found = caller
        return found

    def named(self, name: str) -> Caller:
        """Who acts under a key's name, also when the key is gone; NOBODY for no name."""
        for key, caller in zip(self.keys, self._callers, strict=True):
            if key.name == name:
                return caller
        return self._caller(Key(name=name, sha256="0" * 64)) if name else NOBODY

    def _caller(self, key: Key) -> Caller:
        kind, name = ("key", key.name) if key.cache_group is None else ("group", key.cache_group)
        salt = hmac.new(self._secret, f"{kind}\0{name}".encode(), sha256).hexdigest()
        return Caller(name=key.name, salt=salt, admin=key.admin)


def load_keys(api_key: str | None, file: str | None) -> KeyRing:
    """The ring of one key given in the clear, and of a file of hashed ones."""
    keys = _read(Path(file)) if file else []
    if api_key is not None:
        if not api_key.strip():
            raise BadInput("the API key is empty", fix="give one: ridgeline new-key NAME")
        digest = sha256(api_key.encode()).hexdigest()
        keys.append(Key(name="default", sha256=digest, admin=True))
    names = [key.name for key in keys]
    if len(set(names)) < len(names):
        raise BadInput("two API keys have the same name", value=", ".join(names))
    return KeyRing(tuple(keys))


def _read(file: Path) -> list[Key]:
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise BadInput("the file of API keys is too large", value=str(file))
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        found = msgspec.convert(table, _KeyFile).keys
    except (OSError, ValueError) as error:  # TOML and msgspec errors are ValueErrors
        raise BadInput("the file of API keys cannot be read", value=str(error)) from None
    if not found:
        raise BadInput("the file of API keys holds none", value=str(file))
    return list(found)


def new_key(name: str) -> tuple[str, str]:
    """A fresh key, to be shown once, and its entry for the file. BadInput: no name, or too long."""
    if not 1 <= len(name) <= MAX_NAME:
        raise BadInput(
            "the name of a key is too long" if name else "a key needs a name",
            value=f"{len(name)} characters",
            limit=f"1 to {MAX_NAME}",
            fix="take a shorter name" if name else "say whose key it is",
        )
    key = "rl-" + secrets.token_urlsafe(32)
    digest = sha256(key.encode()).hexdigest()
    checked = msgspec.convert({"name": name, "sha256": digest}, Key)
    name_text = msgspec.json.encode(checked.name).decode()
    return key, f'[[keys]]\nname = {name_text}\nsha256 = "{checked.sha256}"\n'
