"""What docker/ says: packages by hash and as pyproject.toml wants them, folders that are there, a health check.

That the images build, answer and stop is shown by scripts/image.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import TinyArtifacts
from daemon import daemon
from modules import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text("utf-8")
HASHES = r"(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n?)+"
PINNED = re.compile(rf"^([\w.-]+)==(\S+)(?: ;[^\\]*)? \\\n{HASHES}", re.MULTILINE)


@pytest.mark.parametrize("runtime", ["litert", "openvino"])
def test_every_package_is_pinned_as_the_project_wants_it(runtime: str) -> None:
    text = (DOCKER / f"requirements-{runtime}.txt").read_text("utf-8")
    pinned = {canonicalize_name(name): version for name, version in PINNED.findall(text)}
    assert len(pinned) == len([line for line in text.splitlines() if "==" in line.partition(";")[0]])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for line in (*project["dependencies"], *project["optional-dependencies"][runtime]):
        wanted = Requirement(line)
        version = pinned[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(version), f"{line}: {version} is pinned; scripts/lock writes it anew"


def test_the_build_has_what_the_wheel_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    made_of = {name.partition("/")[0] for name in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]}
    made_of |= {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    copied = set(re.findall(r"[\w./${}-]+", " ".join(re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE))))
    assert made_of <= copied
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name in copied:
        assert name.partition("/")[0] in let_in, name
        assert (ROOT / name.replace("${RUNTIME}", "litert")).exists(), name


def test_what_compose_mounts_is_there() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))["services"]
    mounted = [one.split(":")[0] for service in services.values() for one in service["volumes"]]
    files = [DOCKER / one for one in mounted if one.startswith(".")]
    assert len(files) == 4
    assert all(file.is_file() for file in files)
    assert [name for name, service in services.items() if "profiles" not in service] == ["ssmd"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", ()))


def test_the_health_check(artifacts: TinyArtifacts) -> None:
    with daemon(artifacts["llama-f32"], None) as one:
        port = one.url.rpartition(":")[2]
        done = checked(port)
        assert (done.returncode, done.stderr) == (0, "")
        assert '"status":"ok"' in done.stdout
    gone = checked(port)
    assert gone.returncode == 1
    assert "the daemon does not answer" in gone.stderr


def checked(port: str) -> subprocess.CompletedProcess[str]:
    """What the health check says of a daemon at a port."""
    command: list[str | Path] = [sys.executable, "-SE", DOCKER / "healthcheck.py"]
    return subprocess.run(command, env={"SSMD_PORT": port}, capture_output=True, text=True, check=False)
