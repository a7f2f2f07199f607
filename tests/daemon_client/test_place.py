"""Commands that are to be quick find the directories that the settings name."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from ssmd.config import Settings
from ssmd.daemon.place import data_dir, models_dir

A, B = Path("/a/data"), Path("/b/models")


@pytest.mark.parametrize("data", [None, A, Path("here/../there"), Path("~/x")])
@pytest.mark.parametrize("models", [None, B])
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SSMD_DATA_DIR": "/e/data"},
        {"SSMD_DATA_DIR": "relative/data", "SSMD_MODELS_DIR": "~/models"},
        {"SSMD_DATA_DIR": "", "SSMD_MODELS_DIR": ""},
        {"SSMD_data_dir": "/small/letters", "ssmd_MODELS_dir": "/small/models"},
        {"SSMD_CONFIG": "FILE"},
        {"SSMD_CONFIG": "FILE", "SSMD_DATA_DIR": "/e/data"},
        {"XDG_CONFIG_HOME": "HOME"},
        {"XDG_CONFIG_HOME": "HOME", "SSMD_MODELS_DIR": "/e/models"},
        {"XDG_DATA_HOME": "/x/share"},
    ],
    ids=lambda v: ",".join(v) or "nothing",
)
def test_as_the_settings_say(
    variables: dict[str, str],
    data: Path | None,
    models: Path | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    file = tmp_path / "ssmd" / "config.toml"
    file.parent.mkdir()
    file.write_text('data_dir = "/f/data"\nmodels_dir = "/f/models"\n')
    file.chmod(0o600)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    for name, value in variables.items():
        monkeypatch.setenv(name, {"FILE": str(file), "HOME": str(tmp_path)}.get(value, value))
    wanted = Settings(data_dir=data, models_dir=models)
    assert data_dir(data) == wanted.data_dir
    assert models_dir(models, data) == wanted.models_dir


def test_a_broken_settings_file_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSMD_CONFIG", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="does not exist"):
        data_dir(None)
    assert data_dir(A) == A, "what need not be known is not asked for"


def test_a_misspelt_variable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the one that says which daemon is meant."""
    monkeypatch.setenv("SSMD_DATA_DRI", str(A))
    for asked in (partial(data_dir, None), partial(data_dir, A), partial(models_dir, None, None)):
        with pytest.raises(ValueError, match="SSMD_DATA_DRI: no such setting; did you mean SSMD_DATA_DIR"):
            asked()


def test_it_is_quick() -> None:
    asked = (
        "import sys; from ssmd.daemon.place import models_dir; models_dir(None, None); print('pydantic' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SSMD_")}
    environment |= {"XDG_CONFIG_HOME": "/nowhere"}
    assert subprocess.check_output([sys.executable, "-c", asked], text=True, env=environment) == "False\n"
