"""Sizes as people write them."""

from __future__ import annotations

import pytest

from ssmd.config import Settings, SettingsError
from ssmd.machine.size import parse_size, show_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("1000000", 10**6), ("8GiB", 8 << 30), ("500 MB", 5 * 10**8), ("1.5kb", 1500), (" 2TiB ", 2 << 40)],
)
def test_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "8 GiB!", "-1", "8G", "1e9", "１GB", "9" * 19 + "TB", "1.2.3MB", "nan"])
def test_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected bytes|more than any disk"):
        parse_size(text)


def test_shown() -> None:
    shown = [show_size(n) for n in (0, 949, 999_949, 22_600_000, 8 << 30, 5 * 10**15)]
    assert shown == ["0.0 kB", "0.9 kB", "999.9 kB", "22.6 MB", "8.6 GB", "5000.0 TB"]


def test_the_quota_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSMD_QUOTA", raising=False)
    assert Settings().quota == 8 << 30
    monkeypatch.setenv("SSMD_QUOTA", "500MB")
    assert Settings().quota == 500_000_000
    assert Settings(quota="1GiB").quota == 1 << 30
    with pytest.raises(SettingsError, match="--quota = 'much': expected bytes"):
        Settings(quota="much")
    with pytest.raises(SettingsError, match="quota"):
        Settings(quota=True)
