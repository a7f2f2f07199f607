"""Access to a bucket: keys that this user alone can read, a connection that is checked, a place of one database."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import ssl
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from buckets import BUCKET, KEY, SECRET, BucketServer, Door
from cluster import Cluster, certify
from cryptography import x509
from remotes import BucketPlace, DatabasePlace, turn

from ssmd.sessions.remote.bucket import BucketPacks
from ssmd.sessions.remote.postgres.address import BucketAddress, read_address
from ssmd.sessions.remote.postgres.postgres import MARK, PostgresRemote
from ssmd.sessions.remote.remote import RemoteError

ABSENT = "0" * 64


def opened(prefix: str = "access", keyfile: Path | None = None) -> BucketPacks:
    return BucketPacks(BucketAddress(BUCKET, prefix, keyfile), MARK)


def refused(said: str, keyfile: Path | None = None) -> None:
    """Open a bucket, which has to fail for good. No key may be in the message."""
    with pytest.raises(RemoteError, match=said) as failed:
        opened(keyfile=keyfile).there(ABSENT)
    assert failed.value.lasting
    assert KEY not in str(failed.value)
    assert SECRET not in str(failed.value)


@pytest.fixture
def door(opened_bucket: BucketServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    made = Door(opened_bucket.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
    yield made
    made.close()


def key_in(door: Door) -> str:
    """Return the access key of the last request."""
    found: list[bytes] = re.findall(rb"Credential=([^/]+)/", door.asked)
    return found[-1].decode()


def test_keys_come_from_the_environment(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    opened().there(ABSENT)
    assert (key_in(door), b"security-token" in door.asked) == (KEY, False)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-an-hour")
    opened().there(ABSENT)
    assert b"x-amz-security-token: of-an-hour" in door.asked
    assert SECRET.encode() not in door.asked
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    refused("keys are missing: set AWS_ACCESS_KEY_ID")


def test_keys_come_from_a_file(door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands before the environment, whose token is not that of its key."""
    file = tmp_path / "credentials"
    lines = "[default]\naws_access_key_id = AKIAONE\naws_secret_access_key = one%\n[two]\naws_access_key_id = AKIATWO\n"
    file.write_text(lines + "aws_secret_access_key = two\naws_session_token = its-own\n")
    file.chmod(0o600)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-another-key")
    opened(keyfile=file).there(ABSENT)
    assert (key_in(door), b"security-token" in door.asked) == ("AKIAONE", False)
    monkeypatch.setenv("AWS_PROFILE", "two")
    opened(keyfile=file).there(ABSENT)
    assert key_in(door) == "AKIATWO"
    assert b"x-amz-security-token: its-own" in door.asked
    monkeypatch.setenv("AWS_PROFILE", "three")
    refused(r"with a section \[three\]", file)


@pytest.mark.skipif(os.name != "posix", reason="Windows has no modes")
def test_a_file_of_keys_that_others_read_is_refused(door: Door, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        refused("could be read or written by others: make it yours alone with `chmod 600", file)
    file.chmod(0o600)
    opened(keyfile=file).there(ABSENT)
    link = tmp_path / "link"
    link.symlink_to(file)
    refused("cannot be read", link)
    refused("cannot be read", tmp_path / "none")
    file.write_text(f"{SECRET}\n")
    refused("is no file as ~/.aws/credentials", file)
    file.write_text(f"[default]\naws_access_key_id = {KEY}\n")
    refused("keys are missing", file)


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("http://s3.example", "by http://, where others could read all"),
        ("http://10.0.0.1:9000", "by http://, where others could read all"),
        ("http://127.0.0.1.example", "by http://, where others could read all"),
        ("http://localhost.example", "by http://, where others could read all"),
        (f"https://{KEY}:{SECRET}@s3.example", "more than https://, a host, a port and a path"),
        (f"https://s3.example?key={SECRET}", "more than https://, a host, a port and a path"),
        ("s3.example:9000", "is not a URL"),
        ("https://s3.example:port", "is not a URL"),
        ("ftp://127.0.0.1", "is not a URL"),
    ],
)
def test_an_endpoint_that_is_not_safe_is_refused(
    endpoint: str, said: str, opened_bucket: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        with monkeypatch.context() as patch:
            patch.setenv(name, endpoint)
            patch.setenv("AWS_ALLOW_HTTP", "true")
            refused(said)


def test_other_variables_lead_nowhere_else(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reads more names than these. A proxy would get what is meant for this computer in the clear."""
    trap = Door(door.port_behind)
    other = f"http://127.0.0.1:{trap.port}"
    for name in ("AWS_ENDPOINT", "AWS_PROXY_URL", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "AWS_METADATA_ENDPOINT"):
        monkeypatch.setenv(name, other)
    for name, value in {
        "AWS_BUCKET": "other",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
        "AWS_ENDPOINT_URL_S3": "",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_PROXY", raising=False)
    opened().there(ABSENT)
    assert f"HEAD /{BUCKET}/access/packs/00/{ABSENT}".encode() in door.asked
    assert not trap.asked
    trap.close()


def test_a_certificate_is_checked(opened_bucket: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the authority in AWS_CA_BUNDLE, whatever another variable allows."""
    certificate, secret = tmp_path / "server.crt", tmp_path / "server.key"
    certify([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))], certificate, secret, ca=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, secret)
    door = Door(opened_bucket.port, context)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{door.port}")
    monkeypatch.setenv("AWS_ALLOW_INVALID_CERTIFICATES", "true")
    refused("its certificate is not one that is trusted here: name its authority in AWS_CA_BUNDLE")
    assert not door.asked
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    assert not opened().there(ABSENT)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://localhost:{door.port}")  # a name that it does not have
    refused("its certificate is not one that is trusted here")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none"))
    refused("AWS_CA_BUNDLE .* cannot be read")
    door.close()


def test_a_bucket_belongs_to_one_database(with_bucket: BucketPlace, server: Cluster) -> None:
    """An empty prefix gets a mark, by one of many machines. Another prefix has no mark of it."""
    PostgresRemote.open(with_bucket.setting, create=True).close()
    key, other = f"{with_bucket.prefix}/{MARK}", server.database()
    mark = with_bucket.bucket.call("GET", key)
    assert json.loads(mark)["format"] == 1
    try:
        with pytest.raises(
            RemoteError, match="belongs to another database, or another role of it: name its own"
        ) as failed:
            PostgresRemote.open(server.url(other, packs=f"s3://{BUCKET}/{with_bucket.prefix}"), create=True)
        assert failed.value.lasting
        with_bucket.bucket.call("PUT", "letters/one", b"x")
        with pytest.raises(RemoteError, match="not of a remote, and not empty: name another prefix"):
            PostgresRemote.open(server.url(other, packs=f"s3://{BUCKET}/letters"), create=True)
        assert with_bucket.bucket.keys("letters") == ["letters/one"]
    finally:
        server.empty(other)
    elsewhere = PostgresRemote.open(server.url(with_bucket.database, packs=f"s3://{BUCKET}/elsewhere"), create=False)
    elsewhere.publish([turn("t1")])
    assert elsewhere.packs is not None
    with pytest.raises(RemoteError, match="holds no packs of the remote any more"):
        elsewhere.packs.put([b"state"])
    elsewhere.close()
    assert with_bucket.bucket.keys("elsewhere") == []
    for wrong, said in ((b"x", "is not of a remote"), (b"[" * 4000, "is not of a remote"), (b" " * 5000, "not of a r")):
        with_bucket.bucket.call("PUT", key, wrong)
        with pytest.raises(RemoteError, match=said):
            PostgresRemote.open(with_bucket.setting, create=False)
    with_bucket.bucket.call("PUT", key, mark.replace(b": 1", b": 2"))
    with pytest.raises(RemoteError, match="is of format 2, and this version of ssmd knows 1"):
        PostgresRemote.open(with_bucket.setting, create=False)


def test_a_folder_moves_into_a_bucket(database: DatabasePlace, opened_bucket: BucketServer) -> None:
    """Its files are the bucket's objects, mark included."""
    remote = PostgresRemote.open(database.setting, create=True)
    assert remote.packs is not None
    name = remote.packs.put([b"a state"])
    remote.close()
    for file in database.packs.rglob("*"):
        if file.is_file():
            opened_bucket.call("PUT", f"moved/{file.relative_to(database.packs).as_posix()}", file.read_bytes())
    moved = PostgresRemote.open(database.server.url(database.database, packs=f"s3://{BUCKET}/moved"), create=False)
    assert moved.packs is not None
    assert moved.packs.get(name, 7) == b"a state"
    moved.close()


def test_an_address_names_a_bucket() -> None:
    url = "postgresql://db.example/ssmd?packs=s3://my-bucket/a/b.c/&keyfile=/etc/keys"
    assert read_address(url).packs == BucketAddress("my-bucket", "a/b.c", Path("/etc/keys"))
    assert read_address("postgresql://db.example/ssmd?packs=s3://my-bucket").packs == BucketAddress(
        "my-bucket", "", None
    )


def test_commands_show_no_key(with_bucket: BucketPlace, tmp_path: Path) -> None:
    """Also where the bucket refuses it, in an answer with both."""
    PostgresRemote.open(with_bucket.setting, create=True).close()
    door = Door(with_bucket.bucket.port)
    door.mode = "denied"
    environment = {**os.environ, "SSMD_DATA_DIR": str(tmp_path / "data")}
    environment |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{door.port}"}
    done = commands.ssmd("store", "check", "--remote", with_bucket.setting, env=environment)
    assert done.returncode == 1
    assert "s3://conversations/of/" in done.stderr
    assert "the secret key is not that of the access key" in done.stderr
    assert "Traceback" not in done.stderr
    assert KEY not in done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    door.close()
