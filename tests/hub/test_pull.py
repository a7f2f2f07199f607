"""`ssmd pull` as it runs, against a hub on this machine that serves, breaks off, lies and redirects."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import httpx2
import mirror
import pytest
import tiny
from conftest import TinyArtifacts
from huggingface_hub import constants
from mirror import Mirror, sharded, surroundings
from refitting import stripped
from terminal import terminal

from ssmd.hub import hub as hub_module
from ssmd.hub.hub import HubError, is_name, request
from ssmd.machine.size import show_size
from ssmd.model.artifact import Artifact
from ssmd.model.source import Source
from ssmd.refit import catalog
from ssmd.refit.graphfile import StrippedGraph

NAME = "acme/tiny-llama"
WEIGHTS = "model.safetensors"
TOKEN = "hf_secretsecret"
Ran = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def source(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(artifacts.source("llama-f32"), tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture
def hub(source: Path) -> Iterator[Mirror]:
    with mirror.running(NAME, source) as running:
        yield running


ONLY_FETCHED = (
    "import sys, ssmd.cli.pull; sys.modules['ssmd.cli.pull'].check_texts = lambda source: None; "
    "from ssmd.refit import catalog; catalog.choose_graph = lambda *_: (None, '')"
)


def ssmd(
    home: Path,
    hub: Mirror | None,
    *arguments: str,
    file_limit: int | None = None,
    attempts: int = 5,
    whole: bool = False,
    **extra: str,
) -> Ran:
    """Before it tries again it waits 10 ms at the most: half a second more each time is for real networks. whole: what
    was fetched is looked at then, which takes as long once more."""
    soon = f"from ssmd.hub import download; download.WAITS_S = (0.01,) * {attempts - 1}; "
    before = soon if whole else soon + ONLY_FETCHED
    return commands.ssmd(*arguments, env=surroundings(home, hub, **extra), file_limit=file_limit, before=before)


def pulled(home: Path, hub: Mirror | None, *arguments: str, **extra: Any) -> dict[str, Any]:
    done = ssmd(home, hub, "pull", NAME, "--json", *arguments, **extra)
    assert (done.returncode, done.stderr) == (0, "")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def refused(home: Path, hub: Mirror | None, *arguments: str, **extra: Any) -> str:
    """The one line that says why. Nothing is in place, and no secret was said."""
    done = ssmd(home, hub, *(arguments or ("pull", NAME)), **extra)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.rstrip("\n").isprintable()
    assert not re.search(f"{TOKEN}|signature", done.stderr)
    assert not in_place(home)
    return done.stderr


def in_place(home: Path) -> list[Path]:
    return [p for p in (home / "data").glob("sources/*/*") if not p.name.startswith(".")]


def partial(home: Path) -> Path:
    [folder] = (home / "data").glob("sources/*/.*.partial")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# What is fetched


def test_pull_brings_what_a_build_reads(hub: Mirror, source: Path, tmp_path: Path) -> None:
    true = contents(source)
    hub.files |= {"README.md": b"# model", "pytorch_model.bin": b"pickle", "consolidated.safetensors": b"twice"}
    hub.files |= {"onnx/model.onnx": b"other", ".gitattributes": b"", "handler.py": b"code"}
    commit = hub.commit_now()
    done = ssmd(tmp_path, hub, "pull", NAME, whole=True)
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "data/sources/acme--tiny-llama" / commit
    first, why_not, last = done.stdout.splitlines()
    assert first == f"{NAME} main is {commit}: 6 files, 1.1 MB"
    assert why_not.startswith("ssmd has no stripped graph of this config for runtime litert or openvino; ")
    assert re.search(r"; it is nearly smollm2, but .*hidden_size is \d+, not 576", why_not)
    assert last == f"{folder}; try: ssmd build {NAME}"
    there = contents(folder)
    record = json.loads(there.pop("pulled.json"))
    assert there == true
    assert (record["name"], record["hub"], record["commit"]) == (NAME, f"127.0.0.1:{hub.port}", commit)
    assert record["files"][WEIGHTS] == {"size": len(true[WEIGHTS]), "sha256": hashlib.sha256(true[WEIGHTS]).hexdigest()}
    assert Source.open(folder).lineage == Source.open(source).lineage
    assert not list(folder.parent.glob(".*.partial"))
    hub.asked.clear()
    again = pulled(tmp_path, hub)
    assert (again["fetched"], again["path"], again["commit"]) == (False, str(folder), commit)
    assert [a.path for a in hub.asked] == [f"/api/models/{NAME}/revision/main"]


def test_the_library_itself_gets_the_same_files_from_the_mirror(hub: Mirror, source: Path, tmp_path: Path) -> None:
    """Otherwise the mirror would be a hub of our own making."""
    with mirror.running(NAME, source) as storage:
        hub.storage = storage.url
        code = (
            "import sys, huggingface_hub as h; i = h.model_info(sys.argv[1], files_metadata=True)\n"
            "[h.hf_hub_download(i.id, s.rfilename, revision=i.sha, local_dir=sys.argv[2]) for s in i.siblings]"
        )
        env = surroundings(tmp_path, hub, HF_TOKEN=TOKEN)
        subprocess.run([sys.executable, "-c", code, NAME, str(tmp_path / "theirs")], env=env, check=True)
        assert {a.authorization for a in storage.asked} == {None}
    folder = tmp_path / "theirs"
    theirs = {n: b for n, b in contents(folder).items() if not n.startswith(".cache")}
    hub.storage = None
    ours = contents(Path(pulled(tmp_path, hub)["path"]))
    ours.pop("pulled.json")
    assert theirs == ours == contents(source)


def test_shards_are_those_of_the_index(source: Path, tmp_path: Path) -> None:
    files = sharded(source)
    with mirror.running(NAME, {**files, "model-00001-of-00009.safetensors": b"of another time"}) as hub:
        done = pulled(tmp_path, hub)
        assert set(done["files"]) == set(files)
        assert Source.open(Path(done["path"])).tensors.keys() == Source.open(source).tensors.keys()


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        ("../../evil.safetensors", "'../../evil.safetensors', which is no plain safetensors name"),
        ("/tmp/evil.safetensors", "no plain safetensors name"),
        ("a/evil.safetensors", "no plain safetensors name"),
        ("missing.safetensors", "has no file 'missing.safetensors'"),
        ("Shard.safetensors", "upper and lower case"),
    ],
)
def test_an_index_that_names_no_shards(source: Path, tmp_path: Path, shard: str, said: str) -> None:
    files = {name: content for name, content in contents(source).items() if name != WEIGHTS}
    index = json.dumps({"weight_map": {"a": shard, "b": "shard.safetensors"}}).encode()
    evil = {name: b"evil" for name in ("../../evil.safetensors", "/tmp/evil.safetensors", "a/evil.safetensors")}
    evil |= {"Shard.safetensors": b"", "shard.safetensors": b"", "model.safetensors.index.json": index}
    with mirror.running(NAME, {**files, **evil}) as hub:
        assert said in refused(tmp_path, hub)
        assert not hub.asked_for("shard.safetensors")
        assert not [p for p in tmp_path.rglob("*") if "evil" in p.name]


def test_a_revision_is_pinned(hub: Mirror, source: Path, tmp_path: Path) -> None:
    first = hub.commit
    hub.revisions |= {"v1.0": first, "refs/pr/3": first}
    assert pulled(tmp_path, hub, "--revision", "v1.0")["commit"] == first
    assert {a.path.split("/")[4] for a in hub.asked if "/resolve/" in a.path} == {first}
    hub.files["generation_config.json"] = b'{"eos_token_id": 2}'
    second = hub.commit_now()
    assert pulled(tmp_path, hub)["commit"] == second
    assert pulled(tmp_path, hub, "--revision", "refs/pr/3") | {"fetched": False} == pulled(
        tmp_path, hub, "--revision", first
    ) | {"revision": "refs/pr/3"}
    assert sorted(p.name for p in in_place(tmp_path)) == sorted([first, second, "revisions.json"])
    for revision, said in (
        ("v9", "has no revision 'v9'"),
        ("\x1b[31m", "is not a revision"),
        ("../x", "no revision"),
    ):
        assert said in ssmd(tmp_path, hub, "pull", NAME, "--revision", revision).stderr
    home = tmp_path / "lied"
    hub.revisions["x"] = "../../../etc"
    assert "names '../../../etc' as the commit" in refused(home, hub, "pull", NAME, "--revision", "x")
    hub.listing = json.dumps({"sha": second, "siblings": []}).encode()
    assert f"commit {first} was requested" in refused(home, hub, "pull", NAME, "--revision", first)


def test_to_another_folder(hub: Mirror, source: Path, tmp_path: Path) -> None:
    to = tmp_path / "there" / "model"
    done = pulled(tmp_path, hub, "--to", str(to))
    assert done["path"] == str(to)
    assert {n: b for n, b in contents(to).items() if n != "pulled.json"} == contents(source)
    assert not (tmp_path / "data" / "sources").exists()
    assert [p.name for p in to.parent.iterdir()] == ["model"]
    assert "not an empty folder" in refused(tmp_path, hub, "pull", NAME, "--to", str(to))
    (tmp_path / "empty").mkdir()
    pulled(tmp_path, hub, "--to", str(tmp_path / "empty"))


# Broken transfers


def test_a_transfer_that_breaks_off_goes_on(hub: Mirror, source: Path, tmp_path: Path) -> None:
    hub.breaks[WEIGHTS] = [300_000, 0, 250_000]
    pulled(tmp_path, hub)
    ranges = [a.range for a in hub.asked_for(WEIGHTS)]
    assert ranges[0] is None
    assert all(r is not None and r.startswith("bytes=") for r in ranges[1:])
    assert len(ranges) == 4
    assert hub.sent[WEIGHTS] == len(hub.files[WEIGHTS])  # not a byte twice


def test_one_that_stays_broken_is_resumed_by_the_next_command(hub: Mirror, source: Path, tmp_path: Path) -> None:
    hub.breaks[WEIGHTS] = [400_000, *[0] * 20]
    said = refused(tmp_path, hub)
    size = len(hub.files[WEIGHTS])
    assert re.search(rf"broke off 5 times \(.+\); 400000 of {size} bytes are kept, and the same command goes on", said)
    assert (partial(tmp_path) / WEIGHTS).stat().st_size == 400_000
    assert "is not here and --offline, SSMD_OFFLINE or HF_HUB_OFFLINE" in refused(
        tmp_path, hub, HF_HUB_OFFLINE="1"
    )  # it is not taken for whole
    hub.breaks.clear()
    done = pulled(tmp_path, hub)
    assert hub.asked_for(WEIGHTS)[-1].range == "bytes=400000-"
    assert hub.sent[WEIGHTS] == size
    assert (Path(done["path"]) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_a_server_without_ranges(hub: Mirror, tmp_path: Path) -> None:
    hub.ranges, hub.breaks[WEIGHTS] = False, [300_000]
    done = pulled(tmp_path, hub)
    assert (Path(done["path"]) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


@pytest.mark.parametrize("left", ["altered", "longer", "whole"])
def test_what_an_earlier_run_left_is_not_believed(hub: Mirror, tmp_path: Path, left: str) -> None:
    hub.breaks[WEIGHTS] = [400_000, *[0] * 4]
    refused(tmp_path, hub)
    true = hub.files[WEIGHTS]
    content = {"altered": b"x" + true[1:400_000], "longer": true + b"x", "whole": true}[left]
    (partial(tmp_path) / WEIGHTS).write_bytes(content)
    (partial(tmp_path) / "stray.safetensors").write_bytes(b"stray")
    hub.sent.clear()
    done = pulled(tmp_path, hub)
    assert (Path(done["path"]) / WEIGHTS).read_bytes() == true
    assert not (Path(done["path"]) / "stray.safetensors").exists()
    assert (WEIGHTS in hub.sent) == (left != "whole")


def test_a_link_in_the_partial_folder_is_not_followed(hub: Mirror, tmp_path: Path) -> None:
    hub.breaks[WEIGHTS] = [400_000, *[0] * 4]
    refused(tmp_path, hub)
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    (partial(tmp_path) / WEIGHTS).unlink()
    (partial(tmp_path) / WEIGHTS).symlink_to(mine)
    refused(tmp_path, hub)
    assert mine.read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_stopped_in_the_middle(hub: Mirror, tmp_path: Path, name: str) -> None:
    sign = signal.Signals[name]
    hub.stalls[WEIGHTS] = 500_000
    process = commands.start("pull", NAME, env=surroundings(tmp_path, hub, HF_HUB_DOWNLOAD_TIMEOUT="60"))
    deadline = time.monotonic() + 60
    while hub.sent.get(WEIGHTS, 0) < 400_000 or (partial(tmp_path) / WEIGHTS).stat().st_size < 400_000:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "another ssmd fetches" in refused(tmp_path, hub)
    process.send_signal(sign)
    out, err = process.communicate(timeout=30)
    if sign is signal.SIGINT:
        assert (process.returncode, out) == (130, "")
        assert err == "stopped; the fetched part is kept, and the same command continues\n"
    assert not in_place(tmp_path)
    hub.stalls.clear()
    hub.going.set()
    pulled(tmp_path, hub)
    found = re.fullmatch(r"bytes=(\d+)-", hub.asked_for(WEIGHTS)[-1].range or "")
    assert found is not None
    assert int(found[1]) >= 400_000


def test_a_server_that_stands_still_is_left(hub: Mirror, tmp_path: Path) -> None:
    hub.stalls["config.json"] = 0
    said = refused(tmp_path, hub, attempts=2, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert "config.json broke off 2 times" in said


# Lies


@pytest.mark.parametrize("file", [WEIGHTS, "tokenizer.json", "tokenizer_config.json"])
def test_wrong_bytes_are_not_put_in_place(hub: Mirror, tmp_path: Path, file: str) -> None:
    hub.wrong.add(file)
    assert f"what came as {file} has another hash" in refused(tmp_path, hub)
    assert (partial(tmp_path) / file).stat().st_size == 0
    hub.wrong.clear()
    pulled(tmp_path, hub)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"lengths": {WEIGHTS: 5}}, "and sends 5"),
        ({"lengths": {WEIGHTS: 10**12}}, "and sends 1000000000000"),
        ({"lengths": {WEIGHTS: None}, "more": {WEIGHTS: 1 << 20}}, "more comes as model.safetensors"),
        ({"more": {WEIGHTS: 1}}, "the two disagree"),
        ({"listed": {"config.json": {"size": 10}}}, "lists config.json with 10 bytes and sends"),
        ({"listed": {"config.json": {"size": -1}}}, "lists 'config.json' with the size -1"),
        ({"listed": {"config.json": {"size": True}}}, "with the size True"),
        ({"listed": {"config.json": {"size": 1 << 30}}}, "no more than 67108864 are read"),
        ({"listed": {"tokenizer.json": {"size": 10}}}, "with two sizes"),
        ({"listed": {"config.json": {"blobId": None}}}, "without a hash"),
        ({"listed": {"config.json": {"blobId": "../x"}}}, "without a hash"),
        ({"listed": {WEIGHTS: {"lfs": {"size": 1111616}}}}, "without a hash"),
        ({"entries": [{"rfilename": "config.json", "size": 1}]}, "lists a file twice"),
        ({"entries": [{"rfilename": ["config.json"]}]}, "does not answer as a model hub does"),
        ({"entries": ["config.json"]}, "does not answer as a model hub does"),
        ({"listing": b"<html>Welcome to the hotel's network</html>"}, "does not answer as a model hub does"),
        ({"listing": b"[" * 100_000}, "does not answer as a model hub does"),
        ({"listing": b" " * (33 << 20)}, "list of files is longer"),
    ],
)
def test_lies_are_refused(hub: Mirror, tmp_path: Path, lie: dict[str, Any], said: str) -> None:
    for field, value in lie.items():
        setattr(hub, field, value)
    assert said in refused(tmp_path, hub)
    assert hub.sent.get(WEIGHTS, 0) < 3 << 20


def test_names_that_a_server_makes_up_are_no_paths(hub: Mirror, source: Path, tmp_path: Path) -> None:
    evil = [
        "../../evil",
        "/tmp/evil.json",
        "a/../../evil.json",
        "..",
        "",
        "C:\\evil.json",
        "evil\x00.json",
        "Config.json",
    ]
    hub.entries = [{"rfilename": name, "size": 3, "blobId": "0" * 40} for name in evil]
    hub.entries += [{"rfilename": f"logs/{i}.json", "size": 1 << 40, "blobId": "0" * 40} for i in range(20_000)]
    folder = Path(pulled(tmp_path, hub)["path"])
    assert set(contents(folder)) == {*contents(source), "pulled.json"}
    assert not [p for p in tmp_path.rglob("*") if "evil" in p.name]
    assert len(hub.asked) == 1 + len(contents(source))


def test_names_that_are_none(hub: Mirror, tmp_path: Path) -> None:
    assert is_name("ibm-granite/granite-4.0-h-350m")
    for name in ("tiny", "../tiny", "acme/..", "a/b/c", "acme/x\x1b[31m", "acme--x/y", "/acme", "", "a/b\n", "a/b.git"):
        assert not is_name(name)
    for name in ("tiny", "../../tiny"):
        assert "is not a model's name; expected owner/name" in refused(tmp_path, hub, "pull", name)
    assert "is not a model's name; did you mean smollm2? expected" in refused(tmp_path, hub, "pull", "smolm2")
    assert not hub.asked


# The token and other hosts


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_token_goes_to_the_hub_alone(hub: Mirror, source: Path, tmp_path: Path, host: str) -> None:
    """Storage at another port or under another name, and back at the hub after that."""
    hub.token = TOKEN
    with mirror.running(NAME, source) as storage:
        hub.storage = f"http://{host}:{storage.port}"
        hub.redirects["config.json"] = f"{storage.url}/{NAME}/resolve/{storage.commit}/config.json"
        storage.redirects["config.json"] = f"{hub.url}/storage/config.json"
        pulled(tmp_path, hub, HF_TOKEN=TOKEN)
        assert len(storage.asked) == 3
        assert {a.authorization for a in storage.asked} == {None}
    back = [a for a in hub.asked if a.path == "/storage/config.json"]
    assert [a.authorization for a in back] == [None]
    assert {a.authorization for a in hub.asked if a not in back} == {f"Bearer {TOKEN}"}


def test_a_login_is_for_its_own_hub(hub: Mirror, tmp_path: Path) -> None:
    """The token of `hf auth login` belongs to huggingface.co; HF_ENDPOINT names another hub."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(TOKEN)
    pulled(tmp_path, hub)
    assert {a.authorization for a in hub.asked} == {None}


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("file:///etc/passwd", "redirects from http to file, which is not followed"),
        ("/circle", "redirects in a circle"),
        ("http://a:b", "'http://a:b' is not an address"),
    ],
)
def test_redirects_that_are_not_followed(hub: Mirror, tmp_path: Path, where: str, said: str) -> None:
    hub.redirects[WEIGHTS] = where
    assert said in refused(tmp_path, hub)


def test_a_redirect_does_not_leave_https(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append((str(request.url), request.headers.get("authorization")))
        return httpx2.Response(302, headers={"location": "http://hub.test/x"})

    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.test")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with httpx2.Client(transport=httpx2.MockTransport(answer)) as client:
        monkeypatch.setattr(hub_module, "get_session", lambda: client)
        with pytest.raises(HubError, match="redirects from https to http"), request("https://hub.test/a"):
            pass
    assert asked == [("https://hub.test/a", f"Bearer {TOKEN}")]


# Proxies


def test_a_proxy_that_does_not_answer_is_named(hub: Mirror, tmp_path: Path) -> None:
    """By its variable, and without its password."""
    port = mirror.free_port()
    elsewhere = {"HF_ENDPOINT": "http://hub.test"}
    for variable in ("HTTP_PROXY", "all_proxy"):
        said = refused(tmp_path, hub, **elsewhere, **{variable: f"http://me:{TOKEN}@127.0.0.1:{port}"})
        assert f"hub.test cannot be reached through the proxy http://127.0.0.1:{port} that {variable} names (" in said
    assert "proxy" not in refused(tmp_path, hub, **elsewhere, HTTP_PROXY="http://127.0.0.1:9", NO_PROXY="hub.test")
    for address in (f"socks5h://me:{TOKEN}@127.0.0.1:{port}", f"socks5://127.0.0.1:{port}"):
        said = refused(tmp_path, hub, **elsewhere, ALL_PROXY=address)
        assert f"ALL_PROXY names a SOCKS proxy, {address.partition(':')[0]}://127.0.0.1:{port}, for which" in said
        assert "install socksio" in said
    said = refused(tmp_path, hub, **elsewhere, ALL_PROXY=f"ftp://me:{TOKEN}@x")
    assert "ALL_PROXY is 'ftp://x', which is not a proxy's address" in said
    assert "ALL_PROXY names a SOCKS proxy" in refused(tmp_path, hub, ALL_PROXY="socks5h://x", NO_PROXY="hub.test")


def test_a_proxy_of_other_hosts_does_not_matter(hub: Mirror, tmp_path: Path) -> None:
    """The library makes a client of every proxy that the environment names, and fails on one that it cannot use."""
    for address in ("socks5h://127.0.0.1:9", "ftp://x"):
        done = ssmd(tmp_path, hub, "pull", NAME, "--json", ALL_PROXY=address, NO_PROXY="localhost,127.0.0.1")
        assert (done.returncode, done.stderr) == (0, "")


# Asked for by a command that needs it


@pytest.fixture(scope="module")
def graphs(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graphs that are shipped: one, of a tiny model."""
    folder = tmp_path_factory.mktemp("graphs")
    built, source = Artifact.open(artifacts["granite-int8"]), Source.open(artifacts.source("granite-int8"))
    h = (graph := stripped(built, source, "tiny-granite")).header
    graph.save(folder / catalog.file_name(h.name, h.runtime, h.device_class, h.quantization))
    return folder


def test_run_asks_before_it_pulls(artifacts: TinyArtifacts, graphs: Path, tmp_path: Path) -> None:
    """On a terminal, with the size; elsewhere the error names the command, and --yes takes it."""
    before = f"from pathlib import Path; from ssmd.refit import catalog; catalog.SHIPPED = Path({str(graphs)!r})"
    run = ("run", "tiny-granite", "Hi", "--max-tokens", "4")
    program = f"{before}; import runpy, sys; sys.argv[0] = 'ssmd'; runpy.run_module('ssmd', run_name='__main__')"
    typed = shlex.join((sys.executable, "-c", program, *run))
    with mirror.running("acme/tiny-granite", artifacts.source("granite-int8")) as hub:
        env = surroundings(tmp_path, hub)
        done = commands.ssmd(*run, env=env, before=before)
        assert (done.returncode, done.stdout, hub.asked) == (1, "", [])
        assert done.stderr == "error: there is no model 'tiny-granite' here; get it with: ssmd pull tiny-granite\n"
        question = r"tiny-granite is not installed; pull it \((.*)\)\? \[Y/n\]: "
        with terminal(f"{typed}; echo ended $?", env) as one:
            said = one.until(question)
            one.line("n")
            assert "get it with: ssmd pull tiny-granite" in one.until("ended 1")
        assert not list((tmp_path / "data").glob("models/*"))
        with terminal(f"{typed}; echo ended $?", env) as one:
            one.until(question)
            one.line("")
            one.until("ended 0", 120)
        fetched = [
            hub.files[a.path.rsplit("/", 1)[1]] for a in hub.asked if a.method == "GET" and "/resolve/" in a.path
        ]
        assert f"({show_size(sum(map(len, fetched)))})" in said
        hub.asked.clear()
        shutil.rmtree(tmp_path / "data" / "models")
        done = commands.ssmd(*run, "--yes", env=env, before=before)
        assert (done.returncode, bool(done.stdout)) == (0, True)
        assert "is removed" in done.stderr
        assert not in_place(tmp_path)[1:], "only revisions.json"


def test_serve_pulls_nothing_unasked_on_a_terminal(tmp_path: Path) -> None:
    """Under `docker run -t` no person can answer."""
    serve = shlex.join((sys.executable, "-m", "ssmd", "serve", "qwen3-0.6b", "--port", "0"))
    with terminal(f"{serve}; echo ended $?", surroundings(tmp_path, None)) as one:
        assert "get it with: ssmd pull qwen3-0.6b" in one.until("ended 1")


def test_no_room_for_an_artifact_is_known_before_it_is_made(
    artifacts: TinyArtifacts, graphs: Path, tmp_path: Path
) -> None:
    before = f"from pathlib import Path; from ssmd.refit import catalog; catalog.SHIPPED = Path({str(graphs)!r}); "
    before += "import shutil, types; shutil.disk_usage = lambda path: types.SimpleNamespace(free=1000)"
    words = ("pull", "tiny", "--from", str(artifacts.source("granite-int8")))
    said = commands.ssmd(*words, env=surroundings(tmp_path, None), before=before).stderr
    needed = sum(file.size for file in StrippedGraph.open(next(graphs.iterdir())).header.files)
    assert f"error: no room: {show_size(needed - 1000)} more needed; {show_size(needed)} are to be written and" in said
    assert said.endswith("1.0 kB free: make room, or choose another disk with SSMD_MODELS_DIR\n")


def test_an_unknown_name_lists_those_that_can_be_pulled(hub: Mirror, tmp_path: Path) -> None:
    said = refused(tmp_path, hub, "run", "llama3", "Hi")
    assert "there is no model 'llama3' here; " in said
    assert sorted(said.partition("; ssmd pull gets: ")[2].strip().split(", ")) == catalog.names()
    assert "get the hub's model with: ssmd pull qwen3-0.6b" in refused(tmp_path, hub, "run", "Qwen/Qwen3-0.6B", "Hi")


# Refusals


@pytest.mark.parametrize("command", ["run {} hi", "serve {}", "build {}", "pull tiny --from {}"])
def test_a_file_is_told_what_it_is(command: str, hub: Mirror, tmp_path: Path) -> None:
    """Before anything is installed, or fetched, for it. A GGUF file is a source, but no model."""
    (tmp_path / "x.gguf").touch()
    (tmp_path / "y").write_bytes(b"GGUF\x03\0\0\0")
    (tmp_path / "z").write_bytes(b"a text")
    for name, why in (("x.gguf", "it is not a GGUF file"), ("y", "it ends at byte 8, within its header")):
        said = refused(tmp_path, hub, *command.format(tmp_path / name).split())
        if command.startswith(("run", "serve")):
            why = f"{name} is a GGUF file: make a model of it first, with a name of your own: ssmd pull NAME --from "
        assert why in said
    assert "z is a file, and a model is a folder" in refused(tmp_path, hub, *command.format(tmp_path / "z").split())


def test_build_refuses_before_it_asks_for_packages(hub: Mirror, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "x.gguf").touch()
    without = "import importlib.util, ssmd.build.builder as b; b.find_spec = lambda name: None"
    env = surroundings(tmp_path, hub)

    def said(path: Path) -> str:
        return commands.ssmd("build", str(path), env=env, before=without).stderr

    assert "has no config.json, but GGUF files (x.gguf): name the file, not its folder" in said(folder)
    assert "it is not a GGUF file" in said(folder / "x.gguf")
    assert "config.json" in said(folder / "sub")
    other = shutil.copytree(source, tmp_path / "other")
    (other / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "model_type is 'gpt2'; supported: " in said(other)
    assert "building needs " in said(source)


def test_refusals_of_the_hub(hub: Mirror, tmp_path: Path) -> None:
    hub.token = TOKEN
    assert "or it is private" in refused(tmp_path, hub)
    assert "there is no model acme/tiny-llama at 127.0.0.1" in refused(tmp_path, hub, HF_TOKEN="hf_other")
    assert "there is no model acme/other" in refused(tmp_path, hub, "pull", "acme/other")
    assert "characters that are not allowed in a token" in refused(tmp_path, hub, HF_TOKEN="hf_\x1b")
    hub.api = (401, "")
    assert "does not accept the token in HF_TOKEN" in refused(tmp_path, hub, HF_TOKEN="hf_other")
    hub.api = (503, "")
    assert "is busy or has a problem (HTTP 503)" in refused(tmp_path, hub)
    hub.api = (418, "")
    assert "answers 418 to a request" in refused(tmp_path, hub)
    hub.api, hub.token, hub.refuse = None, None, (403, "GatedRepo")
    said = refused(tmp_path, hub)
    assert f"is gated: accept its terms at {hub.url}/{NAME}, then set HF_TOKEN" in said
    hub.refuse = (403, "")
    assert "forbids reading" in refused(tmp_path, hub)
    hub.refuse = (404, "EntryNotFound")
    assert "lists config.json of acme/tiny-llama, but 127.0.0.1 does not have it" in refused(tmp_path, hub)


def test_without_a_network(hub: Mirror, tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{mirror.free_port()}"
    said = refused(tmp_path, hub, HF_ENDPOINT=nowhere)
    assert "cannot be reached" in said
    assert "ssmd build FOLDER" in said
    path = pulled(tmp_path, hub)["path"]
    assert f"Pulled before: {path}" in ssmd(tmp_path, hub, "pull", NAME, HF_ENDPOINT=nowhere).stderr
    hub.asked.clear()
    here = pulled(tmp_path, hub, HF_HUB_OFFLINE="1")
    assert (here["path"], here["fetched"]) == (path, False)
    assert "forbids fetching into" in ssmd(tmp_path, hub, "pull", NAME, "--to", "x", "--offline").stderr
    assert not hub.asked
    (Path(path) / WEIGHTS).write_bytes(b"cut")
    assert "is not as it was pulled" in ssmd(tmp_path, hub, "pull", NAME, HF_HUB_OFFLINE="1").stderr
    assert "is not as it was pulled" in ssmd(tmp_path, hub, "pull", NAME).stderr
    assert "expected https://" in refused(tmp_path / "x", hub, HF_ENDPOINT="huggingface.co")


@pytest.mark.parametrize(
    ("command", "runtime", "variant"),
    [
        ("pull", "npu", "lfm2-moe"),
        ("build", "litert", "lfm2-moe"),
        ("pull", "wgpu", "lfm3"),
        ("build", "coreml", "lfm3"),
    ],
)
def test_parts_are_refused_before_their_weights_come(
    command: str, runtime: str, variant: str, hub: Mirror, tmp_path: Path
) -> None:
    has, others = {
        "lfm2-moe": ("experts, in 3 of 4", "openvino or wgpu"),
        "lfm3": ("attention windows, in 2 of 5", "litert or openvino or npu"),
    }[variant]
    family, fields = tiny.VARIANTS[variant]
    hub.files["config.json"] = json.dumps({"model_type": family, "vocab_size": 384, **fields}).encode()
    hub.commit_now()
    done = ssmd(tmp_path, hub, command, NAME, "--runtime", runtime)
    assert (done.returncode, done.stdout) == (1, "")
    said = f"{NAME} cannot be built: the model has {has} layers, and runtime {runtime} does not serve them"
    assert done.stderr == f"error: {said}; take --runtime {others}\n"
    assert [a.path.rsplit("/", 1)[1] for a in hub.asked if "/resolve/" in a.path] == ["config.json"]


def test_a_pull_of_experts_names_the_runtime_that_builds_them(tmp_path: Path) -> None:
    source = tiny.write_source(tmp_path / "tiny", "lfm2-moe")
    with mirror.running("acme/tiny-moe", source) as hub:
        done = ssmd(tmp_path, hub, "pull", "acme/tiny-moe")
        assert done.stdout.endswith("; try: ssmd build acme/tiny-moe --runtime openvino\n")
        here = ssmd(tmp_path, hub, "pull", "acme/tiny-moe", "--to", str(tmp_path / "there"))
        assert here.stdout.endswith(f"; try: ssmd build {tmp_path / 'there'} --runtime openvino\n")
        hub.asked.clear()
        said = ssmd(tmp_path, hub, "pull", "tiny", "--from", str(source)).stderr
        assert said.endswith(f"with PyTorch it can be built: ssmd build {source} --runtime openvino\n")
        done = ssmd(tmp_path, hub, "pull", "tiny", "--from", str(source), "--runtime", "wgpu", "--quant", "int4")
        [made] = tmp_path.glob("**/tiny/wgpu-gpu-int4")  # which needs no graph
        assert Artifact.open(made).manifest.family == "lfm2_moe", done.stderr


def test_what_cannot_be_built_is_refused_before_its_weights_come(hub: Mirror, source: Path, tmp_path: Path) -> None:
    true = dict(hub.files)
    for change, said in (
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; supported: "),
        ({"model_type": "rwkv7"}, "model_type is 'rwkv7': it needs the time mixing of RWKV-7, which ssmd"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config is there (gptq, 4 bits)"),
        ({"hidden_size": "\x1b[31m"}, "hidden_size is '\\x1b[31m'"),
    ):
        hub.files["config.json"] = json.dumps({**json.loads(true["config.json"]), **change}).encode()
        hub.commit_now()
        assert said in refused(tmp_path, hub)
        assert [a.path.rsplit("/", 1)[1] for a in hub.asked if "/resolve/" in a.path] == ["config.json"]
        hub.asked.clear()
    hub.files["config.json"] = b"[" * 100_000
    assert "config.json is not JSON" in refused(tmp_path, hub)
    for missing, said in (("config.json", "has no config.json"), ("tokenizer.json", "has no tokenizer.json")):
        hub.files = {n: b for n, b in true.items() if n != missing}
        assert said in refused(tmp_path, hub)
    hub.files = {n: b for n, b in true.items() if n != WEIGHTS}
    assert "has neither model.safetensors nor" in refused(tmp_path, hub)
    for pickle in ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.00.pth", "x.pkl"):
        hub.files = {**{n: b for n, b in true.items() if n != WEIGHTS}, pickle: b"pickle"}
        hub.asked.clear()
        said = refused(tmp_path, hub)
        assert f"has its weights in '{pickle}', a pickle" in said
        assert len(hub.asked) == 1
    assert not list(tmp_path.rglob("*.partial"))


def test_a_checkpoint_that_is_none_is_not_put_in_place(hub: Mirror, tmp_path: Path) -> None:
    """Its hash is right, and it is no safetensors file: a Git link, say, which comes as the path that it points to."""
    hub.files[WEIGHTS] = b"../../blobs/weights"
    commit = hub.commit_now()
    assert f"{NAME} at {commit}: it/model.safetensors is no safetensors file" in refused(tmp_path, hub)
    assert not list(tmp_path.rglob("*.partial"))


# The disk


def test_no_room_is_known_before_anything_comes(hub: Mirror, tmp_path: Path) -> None:
    hub.listed[WEIGHTS] = {"size": 10**15, "lfs": {"size": 10**15, "sha256": "0" * 64}}
    assert "more needed; 1000.0 TB are to be fetched and the disk of" in refused(tmp_path, hub)
    assert [a.path.rpartition("/")[2] for a in hub.asked if "/resolve/" in a.path] == ["config.json"]


def test_a_disk_that_fills_up(hub: Mirror, tmp_path: Path) -> None:
    assert "no room on the disk for model.safetensors" in refused(tmp_path, hub, file_limit=600_000)
    assert (partial(tmp_path) / WEIGHTS).stat().st_size > 400_000
    pulled(tmp_path, hub)
    assert hub.sent[WEIGHTS] < 2 * len(hub.files[WEIGHTS])


def test_a_folder_that_is_not_ours(hub: Mirror, tmp_path: Path) -> None:
    to = tmp_path / "model"
    (tmp_path / f".model-{hub.commit[:12]}.partial").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    assert "is in the way and not a folder of yours" in refused(tmp_path, hub, "pull", NAME, "--to", str(to))
    assert not list((tmp_path / "elsewhere").iterdir())


# Building


@pytest.mark.full
def test_build_makes_an_artifact_of_what_it_pulled(hub: Mirror, tmp_path: Path) -> None:
    done = ssmd(tmp_path, hub, "build", NAME, "--quant", "f32", "--buckets", "16", "--context", "256")
    assert done.returncode == 0, done.stderr
    assert f"{NAME} main is {hub.commit}: 6 files" in done.stdout
    assert (tmp_path / "data/models/tiny-llama/litert-cpu-f32/artifact.json").is_file()
    assert "is removed: --keep-source keeps it" in done.stdout
    assert [p.name for p in in_place(tmp_path)] == ["revisions.json"]


def test_build_pulls_what_is_not_there(hub: Mirror, source: Path, tmp_path: Path) -> None:
    asked = ("build", NAME, "--quant", "f32", "--buckets", "16")
    done = ssmd(tmp_path, hub, *asked, "--context", "1")
    assert "a context of 1 tokens does not hold" in done.stderr
    little = "import ssmd.build.builder as b; b.available = lambda: 1000"
    done = commands.ssmd(*asked, env=surroundings(tmp_path, hub), before=little)
    assert "error: this build takes about " in done.stderr
    assert {a.path.rpartition("/")[2] for a in hub.asked if "/resolve/" in a.path} == {"config.json"}
    refuses = "import ssmd.cli.build, sys; sys.modules['ssmd.cli.build'].check_texts = lambda source: 1 / 0"
    done = commands.ssmd(*asked, env=surroundings(tmp_path, hub), before=refuses)
    assert f"{NAME} main is {hub.commit}: 6 files" in done.stdout
    there = contents(tmp_path / "data/sources/acme--tiny-llama" / hub.commit)
    assert {n: b for n, b in there.items() if n != "pulled.json"} == contents(source)
    hub.asked.clear()
    again = commands.ssmd(*asked, "--keep-source", env=surroundings(tmp_path, hub), before=refuses)
    assert f"was pulled as {hub.commit}" in again.stdout
    assert not hub.asked
    assert "--revision is for a model on the hub" in ssmd(tmp_path, hub, "build", ".", "--revision", "x").stderr
    hub.files["config.json"] = b'{"model_type": "gpt2"}'
    hub.commit_now()
    other = ssmd(tmp_path, hub, "build", NAME, "--revision", hub.commit, "--name", "other")
    assert (other.returncode, "supported: " in other.stderr) == (1, True)
