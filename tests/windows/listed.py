"""What of the tests runs in a Windows Python (scripts/wine); as a plugin of pytest, which of these do not, and why."""

from __future__ import annotations

import pytest

RUN = (
    *("tests/machine", "tests/test_config.py", "tests/model/test_made.py", "tests/model/test_artifact.py"),
    *("tests/sessions/rows/test_codec.py", "tests/sessions/rows/test_damage.py", "tests/sessions/rows/test_lock.py"),
    *("tests/sessions/rows/test_migrate.py", "tests/sessions/rows/test_retention.py", "tests/sessions/test_store.py"),
    *("tests/sessions/test_old_files.py", "tests/sessions/files/test_transfer.py"),
    *("tests/hub/test_wheel.py", "tests/daemon_client/test_discovery.py", "tests/daemon_client/test_logfile.py"),
    *("tests/runtimes/litert/test_litert.py", "tests/runtime/test_trial.py", "tests/runtime/test_caches.py"),
    *("tests/cli/test_config_cli.py", "tests/cli/test_data_dir.py"),
)
ARTIFACTS = (
    "llama-f32",
    "llama-int8",
    "granite-f32",
    "granite-int8",
    "mamba-f32",
)  # of another system; here none is built
NOT_COLLECTED = ("tests/machine/test_progress.py",)  # it draws on a terminal of Unix
NOT_HERE = {  # reasons: parts of the ids of tests
    "Windows has no Unix sockets": ("test_privatesocket.py",),
}


def pytest_ignore_collect(collection_path: object) -> bool | None:
    """Leave out what cannot be imported."""
    return True if str(collection_path).replace("\\", "/").endswith(NOT_COLLECTED) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is not here, and say why."""
    for item in items:
        for why, parts in NOT_HERE.items():
            if any(part in item.nodeid for part in parts):
                item.add_marker(pytest.mark.skip(reason=why))
