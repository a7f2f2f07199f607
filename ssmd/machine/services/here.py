"""The manager of services of this computer."""

from __future__ import annotations

import sys

from ssmd.machine.services.service import Manager


def here(*, system: bool, ask: bool = True) -> Manager:
    """Return this computer's service manager. Raises ServiceError.

    system: the machine's manager, not this user's. ask: False to only write a definition, which needs no running
    manager.
    """
    if sys.platform == "darwin":
        from ssmd.machine.services.launchd import Launchd

        return Launchd.here(system=system, ask=ask)
    if sys.platform == "win32":
        from ssmd.machine.services.windows import TaskScheduler

        return TaskScheduler.here(system=system)
    from ssmd.machine.services.systemd import Systemd

    return Systemd.here(system=system, ask=ask)
