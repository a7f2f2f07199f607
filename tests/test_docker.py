"""Checks of docker/: packages by hash and as pyproject.toml wants them, folders that are there, a health check.

That the images build, answer and stop is shown by scripts/image.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import TinyArtifacts
from daemon import CHAT, daemon
from modules import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ssmd.config import Settings
from ssmd.machine.duration import parse_duration
from ssmd.server import FLUSH_S, GRACE_S, LINGER_S, STUCK_S
from ssmd.sessions.remote.postgres.address import read_address

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text("utf-8")
HASHES = r"(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n?)+"
PINNED = re.compile(rf"^([\w.-]+)==(\S+)(?: ;[^\\]*)? \\\n{HASHES}", re.MULTILINE)


REMOTE = yaml.safe_load((DOCKER / "compose.remote.yaml").read_text("utf-8"))


def test_the_daemons_of_a_remote_are_set_as_ssmd_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    daemons = {name: one for name, one in REMOTE["services"].items() if one["image"].startswith("ssmd:")}
    assert len({one["volumes"][0] for one in daemons.values()}) == len(daemons) == 2  # a data directory each
    for one in daemons.values():
        for name, value in one["environment"].items():
            monkeypatch.setenv(name, re.sub(r"\$\{.*\}", "key-of-a-test", value))
        settings = Settings()
        address = read_address(settings.remote or "")
        assert (settings.ack, address.packs) == ("remote", Path("/packs"))
        mounted = {volume.split(":")[1] for volume in one["volumes"]}
        assert mounted == {"/data", str(settings.models_dir), "/packs", address.parameters["host"]}
        whole_s = settings.drain + GRACE_S + STUCK_S + FLUSH_S + LINGER_S
        assert parse_duration(one["stop_grace_period"]) > whole_s  # then Docker kills
    named = {v.split(":")[0] for one in REMOTE["services"].values() for v in one["volumes"] if v[0] != "."}
    assert named == set(REMOTE["volumes"])
    made = re.search(r"install -d .*", DOCKERFILE)
    assert made is not None
    assert {"/data", "/models", "/packs"} <= set(made[0].split())  # else the volumes are root's


def test_the_balancer_of_a_remote_has_its_daemons(tmp_path: Path) -> None:
    balancer = REMOTE["services"]["balancer"]
    text = (DOCKER / "haproxy.cfg").read_text("utf-8")
    asked = set(re.findall(r"\$\{(\w+)\}", text))
    assert asked == set(balancer["environment"])
    servers = {value.split(":")[0] for name, value in balancer["environment"].items() if name != "LISTEN"}
    assert servers == {name for name, one in REMOTE["services"].items() if one["image"].startswith("ssmd:")}
    if program := shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin"):
        here = {"LISTEN": ":7763", "SSMD_A": "127.0.0.1:1", "SSMD_B": "127.0.0.1:2"}
        done = subprocess.run([program, "-c", "-f", DOCKER / "haproxy.cfg"], env=here, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("runtime", ["litert", "openvino"])
def test_every_package_is_pinned_as_the_project_wants_it(runtime: str) -> None:
    text = (DOCKER / f"requirements-{runtime}.txt").read_text("utf-8")
    pinned = {canonicalize_name(name): version for name, version in PINNED.findall(text)}
    assert len(pinned) == len([line for line in text.splitlines() if "==" in line.partition(";")[0]])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    for line in (*project["dependencies"], *extras[runtime], *extras["remote"]):
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
    assert len(files) == 5
    assert all(file.is_file() for file in files)
    assert [name for name, service in services.items() if "profiles" not in service] == ["ssmd"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", ()))


def test_compose_gives_prometheus_a_key_that_only_reads(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """The entrypoint's own script makes the keys file, and a real daemon takes it."""
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))
    service = compose["services"]["ssmd"]
    script = service["entrypoint"][-2].replace("$$", "$")
    program = tmp_path / "bin" / "ssmd"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"; env')
    program.chmod(0o755)
    keys = tmp_path / "keys"
    given = {"OWN_KEY": "own-key-%s*", "PROMETHEUS_KEY": "key-to-look", "SSMD_API_KEYS_FILE": str(keys)}
    given |= {"PATH": f"{program.parent}:/usr/bin:/bin"}
    command = ["sh", "-c", script, "ssmd", *service["command"]]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "serve"
    assert "own-key" not in done.stdout
    assert keys.stat().st_mode & 0o777 == 0o600
    with daemon(artifacts["llama-f32"], None, settings=Settings(api_keys_file=keys)) as one:
        looks, own = ({"authorization": f"Bearer {key}"} for key in ("key-to-look", "own-key-%s*"))
        assert one.served.ask("GET", "/metrics", headers=looks).status == 200
        assert one.served.ask("GET", "/metrics").status == 401
        refused = one.served.ask("POST", CHAT, one.body(), headers=looks)
        assert (refused.status, refused.json["error"]["code"]) == (403, "read_only_key")
        assert one.served.ask("POST", CHAT, one.body(), headers=own).status == 200


def test_no_secret_of_compose_is_used_twice() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))
    services = compose["services"]
    assert services["ssmd"]["environment"]["OWN_KEY"].startswith("${SSMD_API_KEY:?")
    assert services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    assert services["prometheus"]["secrets"] == ["prometheus_key"]
    assert compose["secrets"] == {"prometheus_key": {"environment": "PROMETHEUS_KEY"}}
    [scrape] = yaml.safe_load((DOCKER / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    assert scrape["authorization"]["credentials_file"] == "/run/secrets/prometheus_key"


def test_no_secret_of_the_environment_is_read_only() -> None:
    """Compose copies such a secret into the container, and refuses to where that is read-only."""
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))
    copied = {name for name, secret in compose["secrets"].items() if "environment" in secret}
    given = {name: s for name, s in compose["services"].items() if copied & set(s.get("secrets", ()))}
    assert list(given) == ["prometheus"]
    assert [name for name, service in given.items() if service.get("read_only")] == []
    assert all(service["cap_drop"] == ["ALL"] for service in compose["services"].values())


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
    """Run the health check for a daemon at a port."""
    command: list[str | Path] = [sys.executable, "-SE", DOCKER / "healthcheck.py"]
    return subprocess.run(command, env={"SSMD_PORT": port}, capture_output=True, text=True, check=False)
