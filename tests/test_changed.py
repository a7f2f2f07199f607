"""`scripts/test --changed` runs what a change can break: for a path of each kind the test that must be among them."""

from __future__ import annotations

import changed
import pytest
from modules import ROOT


@pytest.mark.parametrize(
    ("path", "test"),
    [
        ("docs/http.md", "test_words.py"),
        ("SECURITY.md", "test_words.py"),
        ("migrations/versions/0011_sessions.py", "sessions/test_old_files.py"),
        ("migrations/script.py.mako", "sessions/rows/test_migrate.py"),
        ("ssmd/cli/show.py", "cli/test_cli.py"),
        ("ssmd/cli/show.py", "machine/test_installation.py"),
        ("ssmd/text/new.jinja", "test_wheel.py"),
        (".gitignore", "test_wheel.py"),
        ("clients/ssmd_tray/history.py", "clients/tray/test_watching.py"),
        ("clients/ssmd_tray/qt/menu.py", "test_wheel.py"),
        ("ssmd/refit/graphs/smollm2@litert-cpu-int8.graph", "refit/test_catalog.py"),
        ("runtimes/ssmd_openvino/library.py", "test_installed.py"),
        ("runtimes/ssmd_litert/build.py", "contract/test_parity.py"),
        ("runtimes/ssmd_wgpu/shaders/scan.wgsl", "runtimes/wgpu/test_wgpu_shaders.py"),
        ("scripts/configuration", "test_words.py"),
        ("scripts/models/smollm2.json", "refit/test_catalog.py"),
        ("tests/data/templates/qwen3.jinja", "text/test_template.py"),
        ("tests/data/artifacts/granite-f32.tar.zst", "api/test_api.py"),
        ("tests/data/foreign/plain_runtime/model.py", "runtime/test_foreign.py"),
        ("ssmd/runtime/__init__.py", "runtime/test_foreign.py"),
        ("ssmd/runtime/checked.py", "runtime/test_foreign.py"),
        ("ssmd/build/builder.py", "runtime/test_foreign.py"),
        ("tests/contract/driving.py", "runtime/test_foreign.py"),
        ("ssmd/sessions/files/sessionfile.py", "sessions/files/test_fuzz_session_file.py"),
        ("ssmd/hub/download.py", "hub/test_pull.py"),
        ("benchmarks/daemon_process.py", "whole/test_edit.py"),
        ("pyproject.toml", "text/test_stops.py"),
    ],
)
def test_what_a_change_can_break_is_run(path: str, test: str) -> None:
    assert ROOT / "tests" / test in changed.broken_by([path])


@pytest.mark.parametrize(
    ("path", "test"),
    [
        ("docs/http.md", "engine/test_engine.py"),
        ("ssmd/text/stops.py", "refit/test_refit.py"),
        ("runtimes/ssmd_wgpu/device.py", "runtimes/litert/test_litert.py"),
    ],
)
def test_what_it_cannot_break_is_not(path: str, test: str) -> None:
    assert ROOT / "tests" / test not in changed.broken_by([path])


def test_the_nearest_tests_come_first() -> None:
    found = [file.relative_to(ROOT / "tests").as_posix() for file in changed.nearest("ssmd/text/stops.py")]
    assert found[0] == "text/test_stops.py"
    assert sorted(found) == sorted(
        file.relative_to(ROOT / "tests").as_posix() for file in changed.broken_by(["ssmd/text/stops.py"])
    )
    assert found.index("engine/test_engine.py") < found.index("cli/test_cli.py")
