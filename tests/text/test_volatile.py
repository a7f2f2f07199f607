"""Known volatile text at the beginning of a system prompt: its exact forms go, whatever is only like them stays."""

from __future__ import annotations

import pytest

from ssmd.text.volatile import KNOWN, without_volatile

HEADER = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"
NAME = "x-anthropic-billing-header"


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (HEADER, ""),
        (f"{HEADER}\n", ""),
        ("x-anthropic-billing-header: cc_version=2.1.197.e8a; cc_entrypoint=sdk-cli;", ""),
        ("x-anthropic-billing-header: cc_version=2.1.37.3d0; cc_entrypoint=cli; cch=00000;", ""),
        ("x-anthropic-billing-header: cc_version=9.9.9;", ""),
        (f"{HEADER} cc_workload=cron;\nYou help.", "You help."),
        (f"{HEADER}\nYou help.\n", "You help.\n"),
        (f"{HEADER}\n\nYou help.", "You help."),
        (f"{HEADER}\r\nYou help.", "You help."),
        (f"{HEADER} \n  You help.", "  You help."),
        (f"{HEADER}\n{HEADER}", HEADER),
    ],
)
def test_billing_header_is_dropped(text: str, rest: str) -> None:
    assert without_volatile(text) == (rest, NAME)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "You help.",
        f"You help.\n{HEADER}",
        f" {HEADER}",
        f"\n{HEADER}",
        f"{HEADER} and more words",
        f"{HEADER}You help.",
        HEADER.removesuffix(";"),
        HEADER.upper(),
        HEADER.replace(": ", ":", 1),
        HEADER.replace("cc_version=2.1.177.01c; ", ""),
        "x-anthropic-billing-header:",
        "x-anthropic-billing-header: what is it?",
        "x-anthropic-other-header: cc_version=2.1.177.01c;",
    ],
)
def test_text_like_a_billing_header_stays(text: str) -> None:
    assert without_volatile(text) == (text, None)


def test_long_text_like_a_header_is_read_in_no_time() -> None:
    """Fields without end are read once: no field is tried again with another cut."""
    text = "x-anthropic-billing-header: cc_version=1;" + " a=b;" * 200_000 + "c"
    assert without_volatile(text) == (text, None)


def test_each_known_text_has_its_source() -> None:
    assert all(one.source.startswith("https://") and one.name for one in KNOWN)
