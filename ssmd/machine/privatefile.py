"""Files that hold secrets: whether anybody else can read them, or say what stands in them."""

from __future__ import annotations

import os
import stat


def others_write(found: os.stat_result) -> bool:
    """Whether every user of this computer can write the file."""
    return hasattr(os, "getuid") and bool(found.st_mode & stat.S_IWOTH)


def others_read(found: os.stat_result) -> bool:
    """Whether somebody else can read the file: not root, and not the group through which it is read here."""
    if not hasattr(os, "getuid"):
        return False
    others = stat.S_IROTH | (stat.S_IRGRP if found.st_uid == os.getuid() else 0)
    return bool(found.st_mode & others)


def of_another_user(found: os.stat_result) -> bool:
    """Whether the file belongs to somebody who is neither this user nor root."""
    return hasattr(os, "getuid") and found.st_uid not in (0, os.getuid())
