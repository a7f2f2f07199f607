"""What of the tests runs in a Windows Python, as a plugin of pytest; and which of these do not, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

RUN = (
    *("tests/test_config.py", "tests/test_installed.py"),
    *("tests/machine", "tests/model", "tests/text/test_tokenizer.py"),
    *("tests/sessions/rows", "tests/sessions/test_store.py", "tests/sessions/test_match.py"),
    *("tests/sessions/test_old_files.py", "tests/sessions/files/test_transfer.py"),
    *("tests/hub/test_wheel.py", "tests/daemon_client/test_discovery.py", "tests/daemon_client/test_logfile.py"),
    *("tests/runtimes/litert/test_litert.py", "tests/runtimes/litert/test_batches.py", "tests/runtime/test_trial.py"),
    *("tests/cli/test_config_cli.py", "tests/cli/test_rm.py"),
)
# Parts of test ids, by what Windows, or wine, does not have.
NOT_HERE: dict[str, tuple[str, ...]] = {}
