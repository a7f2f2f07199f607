"""The address of a remote in PostgreSQL: no password, and TLS beyond this computer, to a server that is checked."""

from __future__ import annotations

import os
from pathlib import Path

import commands
import pytest
from cluster import HOST, PASSWORD, Cluster
from remotes import DatabasePlace, turn

from ssmd.config import Settings, SettingsError
from ssmd.sessions.remote.postgres.address import read_address, with_tls
from ssmd.sessions.remote.postgres.postgres import PostgresRemote
from ssmd.sessions.remote.remote import RemoteError

SECRET = "do-not-show"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"postgresql://ann:{SECRET}@db.example/ssmd", "has a password"),
        (f"postgresql://db.example/ssmd?password={SECRET}", "has a password"),
        ("postgresql://db.example", "names no database"),
        ("postgresql://db.example:port/ssmd", "port is not a number"),
        ("postgresql://db.example/ssmd?options=-csearch_path%3Dother", "'options' is not known"),
        ("postgresql://db.example/ssmd?packs=here", "name a folder from the root on"),
        ("postgresql://db.example/ssmd?packs=/mnt/a#b", "has a `#`"),
        (f"postgresql://db.example/ssmd?packs=s3://key:{SECRET}@bucket/prefix", "is not a bucket such as s3://"),
        (f"postgresql://db.example/ssmd?packs=s3:/key:{SECRET}@bucket", "is not a bucket such as s3://"),
        (f"postgresql://db.example/ssmd?packs=https://key:{SECRET}@s3.example/b", "is not a bucket such as s3://"),
        (f"postgresql://db.example/ssmd?packs=minio://key:{SECRET}@s3.example/b", "is not a bucket such as s3://"),
        (f"postgresql://db.example/ssmd?packs=%20s3://key:{SECRET}@bucket/prefix", "is not a bucket such as s3://"),
        ("postgresql://db.example/ssmd?packs=s3://", "is not a bucket such as s3://"),
        ("postgresql://db.example/ssmd?packs=s3://Bucket/../up", "is not a bucket such as s3://"),
        ("postgresql://db.example/ssmd?packs=s3://bucket/../up", "is not a bucket such as s3://"),
        ("postgresql://db.example/ssmd?packs=s3://bucket/a//b", "is not a bucket such as s3://"),
        ("postgresql://db.example/ssmd?packs=s3://bucket/%0Aa", "is not a bucket such as s3://"),
        (f"postgresql://db.example/ssmd?packs=s3://bucket?secret={SECRET}", "is not a bucket such as s3://"),
        ("postgresql://db.example/ssmd?packs=s3://bucket&keyfile=keys", "name a file from the root on"),
        ("postgresql://db.example/ssmd?packs=/mnt/a&keyfile=/etc/keys", "`keyfile` is for a bucket"),
        ("postgresql://db.example/ssmd?connect_timeout=soon", "`connect_timeout` is 'soon', which is not a number"),
        ("postgresql://db.example/ssmd?port=", "`port` is '', which is not a number"),
    ],
)
def test_a_bad_address_is_refused(url: str, said: str) -> None:
    with pytest.raises(RemoteError, match=said) as failed:
        read_address(url)
    assert SECRET not in str(failed.value)
    assert failed.value.lasting


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://ann:{SECRET}@db.example/ssmd",
        f"postgresql:/ann:{SECRET}@db.example/ssmd",
        f"host=db.example user=ann password={SECRET}",
        "mysql://db.example/ssmd",
    ],
)
def test_a_setting_that_is_refused_is_not_shown(url: str) -> None:
    with pytest.raises(SettingsError, match=r"--remote: ") as failed:
        Settings(remote=url)
    assert SECRET not in str(failed.value)


def test_a_setting_is_a_url_or_a_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://ann@db.example/ssmd?packs=/mnt/packs"
    monkeypatch.chdir(tmp_path)
    assert Settings(remote=url).remote == url
    assert Settings(remote="here").remote == str(tmp_path / "here")


@pytest.mark.parametrize(
    ("parameters", "defaults", "mode"),
    [
        ({"host": "db.example"}, {}, "verify-full"),
        ({"host": "10.0.0.1", "sslmode": "verify-full"}, {}, "verify-full"),
        ({"host": "localhost,db.example"}, {}, "verify-full"),
        ({"host": "localhost"}, {"hostaddr": "10.0.0.1"}, "verify-full"),  # PGHOSTADDR
        ({}, {"host": "db.example"}, "verify-full"),  # PGHOST, or a service file
        ({"host": "db.example"}, {"sslmode": "disable"}, "verify-full"),  # PGSSLMODE
        ({"host": "localhost"}, {}, None),
        ({"host": "::1"}, {}, None),
        ({"host": "127.0.0.1"}, {}, None),
        ({"host": "/run/postgresql"}, {}, None),
        ({}, {}, None),
        ({"host": "localhost.example"}, {}, "verify-full"),
    ],
)
def test_tls_is_asked_for_beyond_this_computer(
    parameters: dict[str, str], defaults: dict[str, str], mode: str | None
) -> None:
    assert with_tls(parameters, defaults).get("sslmode") == mode


@pytest.mark.parametrize("mode", ["disable", "prefer", "require", "verify-ca"])
def test_a_server_that_is_not_checked_is_refused(mode: str) -> None:
    with pytest.raises(RemoteError, match=f"sslmode={mode} does not check"):
        with_tls({"host": "db.example", "sslmode": mode}, {})


def test_a_server_s_certificate_is_checked(
    server: Cluster, database: DatabasePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP, by the name that the address has."""
    monkeypatch.setenv("PGPASSWORD", PASSWORD)

    def opened(host: str, **parameters: str) -> PostgresRemote:
        with monkeypatch.context() as patch:
            patch.setenv("PGHOSTADDR", "127.0.0.1")
            return PostgresRemote.open(server.url(database.database, host=host, **parameters), create=True)

    remote = opened(HOST, sslrootcert=str(server.certificate))
    remote.publish([turn("t1")])
    encrypted = "SELECT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = 'ssmd'"
    assert set(server.admin(encrypted)) == {(True,)}
    remote.close()
    with pytest.raises(RemoteError, match="certificate"):
        opened(HOST)  # of an authority that the system does not know
    with pytest.raises(RemoteError, match=r"other\.example"):
        opened("other.example", sslrootcert=str(server.certificate))


def test_a_password_comes_from_a_file_or_the_environment(
    server: Cluster, database: DatabasePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no message, and not in the server's log."""
    file = tmp_path / "password"
    file.write_text(f"127.0.0.1:*:*:ssmd:{PASSWORD}\n")
    file.chmod(0o600)
    url = server.url(database.database, host="127.0.0.1")
    for wrong, said in ((None, "no password supplied"), (SECRET, "password authentication failed")):
        if wrong is not None:
            monkeypatch.setenv("PGPASSWORD", wrong)
        with pytest.raises(RemoteError, match=said) as failed:
            PostgresRemote.open(url, create=True)
        assert failed.value.lasting
        assert SECRET not in str(failed.value)
    monkeypatch.delenv("PGPASSWORD")
    PostgresRemote.open(f"{url}&passfile={file}", create=True).close()
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    PostgresRemote.open(url, create=False).close()
    environment = {**os.environ, "SSMD_DATA_DIR": str(tmp_path / "data")}
    done = commands.ssmd("session", "push", "--all", "--dry-run", "--remote", url, env=environment)
    assert done.returncode == 0, done.stderr
    log = server.log()
    assert "CREATE TABLE ssmd.turn" in log
    for text in (done.stdout, done.stderr, log):
        assert SECRET not in text
    assert PASSWORD not in done.stdout + done.stderr + log.replace(f"PASSWORD '{PASSWORD}'", "")
