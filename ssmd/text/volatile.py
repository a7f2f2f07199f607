"""Known volatile text: what clients put into a system prompt for a server's accounts, and change with every request.

A model has no use for it. At the beginning of a prompt it makes all that follows new, so that no state fits. The clock
of a template is no such text: a session freezes it (SessionInfo.clock).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class VolatileText:
    """One kind of volatile text. form: matches it at the beginning of a block of a system prompt.

    name: as an answer lists it. source: a description of it by others.
    """

    name: str
    form: re.Pattern[str]
    source: str


KNOWN = (
    # Claude Code's: a line of fields, the version's with a hash of the first words of the user, `cch` of the request.
    VolatileText(
        "x-anthropic-billing-header",
        re.compile(
            r"x-anthropic-billing-header: cc_version=[^\s;]+;(?: [a-z][a-z0-9_]*=[^\s;]*;)*[ \t]*(?:(?:\r?\n)+|\Z)"
        ),
        "https://github.com/anthropics/claude-code/issues/68900",
    ),
)


def without_volatile(text: str) -> tuple[str, str | None]:
    """Return a block of a system prompt without known volatile text at its beginning, and that text's name.

    A block that begins otherwise is returned unchanged, with None.
    """
    for one in KNOWN:
        if found := one.form.match(text):
            return text[found.end() :], one.name
    return text, None
