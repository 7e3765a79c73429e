"""Tenants find their own stored blocks after a restart, and only those."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.errors import CannotRun
from ridgeline.serve.auth.keys import load_keys
from ridgeline.serve.auth.tenant_secret import NAME, tenant_secret


def test_secret_outlives_the_process_and_is_private(tmp_path: Path) -> None:
    secret = tenant_secret(str(tmp_path), None)
    assert secret == tenant_secret(str(tmp_path), None)
    assert (tmp_path / NAME).stat().st_mode & 0o077 == 0
    assert secret != tenant_secret(str(tmp_path / "other"), None)
    keys = load_keys("k", None)
    one, other = keys.with_secret(secret), load_keys("k", None).with_secret(secret)
    assert one.caller_named("default").salt == other.caller_named("default").salt
    assert keys.with_secret(None).caller_named("default").salt != one.caller_named("default").salt


def test_secret_of_an_object_store() -> None:
    url = "memory://tenant-secret-test"
    assert tenant_secret(None, url) == tenant_secret(None, url)
    assert tenant_secret(None, None) is None


def test_damaged_secret_is_refused(tmp_path: Path) -> None:
    tenant_secret(str(tmp_path), None)
    (tmp_path / NAME).write_bytes(b"short")
    with pytest.raises(CannotRun, match="remove it"):
        tenant_secret(str(tmp_path), None)
