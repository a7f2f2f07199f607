"""The bytes that this machine may still send to a remote that has a quota for it.

The machine keeps to it by itself: the remote does not refuse what it sends. A count is kept for COUNT_S, as it looks at
all rows of the machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ssmd.machine.size import show_size
from ssmd.sessions.remote.remote import Quota, Remote, RemoteError

COUNT_S = 300.0  # s until the machine's bytes are counted again, and a new quota is seen
AGAIN_S = 30.0  # s until that if there is no room
STATES_SHARE = 0.9  # of a quota that states may fill: the rest is for text


class OverQuota(RemoteError):
    """A remote in which this machine has as many bytes as it may. Its turns wait."""

    reason = "over_quota"


class Allowance:
    """The bytes that this machine may still send. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: in s."""
        self._clock = clock
        self._quota: Quota | None = None
        self._added = 0  # bytes since the count
        self._counted_s = -math.inf

    def take(self, remote: Remote, machine: str, nbytes: int) -> None:
        """Count bytes of text that are to be sent. Raises OverQuota if the machine may not have them."""
        if not self._takes(remote, machine, nbytes, 1.0):
            assert self._quota is not None
            raise OverQuota(
                f"this machine has {show_size(self._quota.used)} of {show_size(self._quota.limit)} in {remote.name}: "
                "remove conversations, or ask the remote's administrator for more",
                refused=True,
            )

    def takes_state(self, remote: Remote, machine: str, nbytes: int) -> bool:
        """Count the bytes of a state that is to be sent. Returns False if it has to stay. Raises RemoteError."""
        return self._takes(remote, machine, nbytes, STATES_SHARE)

    def _takes(self, remote: Remote, machine: str, nbytes: int, share: float) -> bool:
        for kept_s in (COUNT_S, AGAIN_S):
            if self._clock() - self._counted_s >= kept_s:
                self._quota, self._added, self._counted_s = remote.quota(machine), 0, self._clock()
            if self._quota is None or self._quota.used + self._added + nbytes <= share * self._quota.limit:
                self._added += nbytes
                return True
        return False
