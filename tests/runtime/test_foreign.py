"""A runtime from elsewhere: a distribution of its own (tests/data/foreign) with an entry point and a class, installed
by pip, on which the contract suite runs as its author would run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ssmd.cli import app
from ssmd.cli.making import BuildFailed, converter_of
from ssmd.refit import catalog
from ssmd.runtime.info import targets

ROOT = Path(__file__).parents[2]
QUICK = ("padding", "splits", "parts", "moving")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, installed; the project's environment stays as it is."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("foreign") / "site"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index")
    done = subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(folder), str(ROOT / "tests" / "data" / "foreign")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def suite(site: Path, *arguments: str, families: str = "llama,mamba") -> tuple[int, str]:
    """Exit code and output of the contract suite, with what is in its full set alone, for the runtime `plain`."""
    asked = {"SSMD_CONTRACT_RUNTIMES": "plain", "SSMD_CONTRACT_FAMILIES": families, "PYTHONPATH": str(site)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not ui", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments],
        cwd=ROOT,
        env={**kept, **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_it_keeps_the_contract(site: Path) -> None:
    """Rules 1, 2 and 4 and states in parts, of a model with KV rows and one without."""
    code, said = suite(site, *(f"tests/contract/test_{name}.py" for name in QUICK))
    assert code == 0, said
    assert int(re.findall(r"(\d+) passed", said)[0]) >= 45, said


@pytest.mark.full
def test_it_keeps_the_whole_contract(site: Path) -> None:
    code, said = suite(site, "tests/contract")
    assert code == 0, said
    assert int(re.findall(r"(\d+) passed", said)[0]) >= 132, said


def test_the_suite_sees_a_state_that_is_wrong(site: Path) -> None:
    """The convolution's past is one token old: text would hardly show it."""
    model = site / "plain_runtime" / "model.py"
    right = model.read_text()
    wrong = right.replace("past[len(x) :].T", "past[len(x) - 1 : -1].T")
    assert wrong != right
    model.write_text(wrong)
    try:
        code, said = suite(site, "tests/contract/test_splits.py", "-x", families="mamba")
    finally:
        model.write_text(right)
    assert (code, "test_splits_agree" in said) == (1, True), said


@pytest.mark.parametrize(
    ("code", "said"),
    [  # more of them are in test_devices.py
        ("raise RuntimeError('no luck')", "(RuntimeError: no luck); its package is odd-runtime"),
        (
            "class Odd:\n    def devices(self):\n        raise OSError('none')",
            "cannot list its devices (OSError: none)",
        ),
    ],
)
def test_one_that_fails_leaves_the_others_alone(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "odd_runtime-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-runtime\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ssmd.runtimes]\nodd = odd_runtime:Odd\n")
    (tmp_path / "odd_runtime.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_runtime", raising=False)
    monkeypatch.setenv("SSMD_DATA_DIR", str(tmp_path / "data"))
    done = CliRunner().invoke(app, ["doctor", "--json"])
    report = {one["name"]: one for one in json.loads(done.stdout)["runtimes"]}
    assert said in report["odd"]["problem"]
    assert report["litert"]["devices"]
    assert done.exit_code == 1


INFO = """
from pathlib import Path
from ssmd.runtime import BuildOption, RuntimeInfo, Target

def made(target, value):
    if value != "3":
        raise ValueError(f"{value!r} is not 3")
    return target, value

INFO = RuntimeInfo(
    rank=0,
    targets=(Target("odd"), Target("odd-npu", "npu", "NPU")),
    packs=True,
    graphs=Path(__file__).parent,
    build_options={"size": BuildOption("a number", made)},
)
"""


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package whose runtime must not be imported, with an empty module `build`."""
    info = tmp_path / "odd_runtime-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-runtime\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ssmd.runtimes]\nodd = odd_runtime.runtime:Odd\n")
    package = tmp_path / "odd_runtime"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "build.py").write_text("CONVERTER = 'usual'\nNPU = 'of the NPU'\n")
    (package / "runtime.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("odd_runtime", "odd_runtime.info", "odd_runtime.build"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return package


def test_its_facts_are_those_of_a_shipped_one(odd: Path) -> None:
    (odd / "info.py").write_text(INFO)
    (odd / "smollm2@odd-npu-int8.graph").write_bytes(b"")
    assert [t for t in targets() if t.startswith("odd")] == ["odd", "odd-npu"]
    assert {name for name in sys.modules if name.startswith("odd_runtime")} == {"odd_runtime", "odd_runtime.info"}
    made: list[object] = [converter_of("odd"), converter_of("odd-npu"), converter_of("odd-npu", "size", "3")]
    assert made == ["usual", "of the NPU", ("odd-npu", "3")]
    for asked, said in (
        (("odd", "size", "4"), "size: '4' is not 3"),
        (("litert", "size", "3"), "size is not an option .* for runtime litert; add --runtime odd or odd-npu"),
        (("odd", "colour", "3"), r"colour is not an option .* for runtime odd; its options: size \(a number\)"),
    ):
        with pytest.raises(BuildFailed, match=said):
            converter_of(*asked)
    assert [file.parent for file in catalog.files("odd-npu")] == [odd]
    assert "odd" in catalog.on_processor()
    command = ["build", "x/y", "--runtime", "odd", "--models-dir", str(odd), "--option"]
    for option, said in (("size", "--option size: expected NAME=VALUE"), ("size=4", "size: '4' is not 3")):
        done = CliRunner().invoke(app, [*command, option])
        assert isinstance(done.exception, BuildFailed)
        assert (done.exception.usage, said in str(done.exception)) == (True, True)


@pytest.mark.parametrize(
    "code",
    [
        "raise OSError('none')",
        "import sys; sys.exit(3)",
        "other = 1",
    ],
)
def test_facts_that_fail_leave_the_others_alone(odd: Path, code: str, caplog: pytest.LogCaptureFixture) -> None:
    (odd / "info.py").write_text(code + "\n")
    assert {"odd", "litert", "npu"} <= {*targets()}
    assert "the facts of runtime odd cannot be read" in caplog.text
