"""The kinds of remote, as tests make, damage and take them away: a folder, a database with a folder or a bucket."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from pathlib import Path
from typing import Any, Protocol

from buckets import BUCKET, BucketServer
from cluster import Cluster

from ssmd.sessions.remote.folder import MARK, FolderRemote
from ssmd.sessions.remote.packs import digest_of
from ssmd.sessions.remote.postgres.postgres import PostgresRemote
from ssmd.sessions.remote.remote import Remote, RemoteTurn, TurnPlace
from ssmd.sessions.remote.signing import MachineKey, SignedRow


class Place(Protocol):
    """A place that is a remote. setting: that of --remote."""

    setting: str

    def open(self, *, create: bool = False) -> Remote:
        """Open it, as another daemon does."""

    def alter(self, place: TurnPlace, part: str) -> None:
        """Damage a turn: its digest or its body."""

    def replace(self, place: TurnPlace, body: bytes) -> None:
        """Give a turn another body, and the digest that belongs to it."""

    def remove(self, place: TurnPlace) -> None:
        """Remove a turn by hand."""

    def make_newer(self, place: TurnPlace) -> None:
        """Let a turn be one of the next version."""

    def rows(self) -> set[str]:
        """Return a name for each turn, state and pack that is kept, with the names of session and turn in it."""

    def alter_pack(self, name: str) -> None:
        """Damage a pack."""

    def lose_pack(self, name: str) -> None:
        """Remove a pack, as a user or a disk does."""

    def go_away(self) -> None:
        """Let it be out of reach."""

    def come_back(self) -> None:
        """Let it be in reach again."""


def _alter_pack(root: Path, name: str) -> None:
    [file] = root.glob(f"packs/*/{name}")
    file.write_bytes(altered(file.read_bytes()))


def _lose_pack(root: Path, name: str) -> None:
    [file] = root.glob(f"packs/*/{name}")
    file.unlink()


def altered(data: bytes) -> bytes:
    """Return bytes of which the last one is another."""
    return data[:-1] + bytes([data[-1] ^ 1])


class FolderPlace:
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(mode=0o700)
        self.setting = str(root)

    def open(self, *, create: bool = False) -> Remote:
        return FolderRemote.open(self.root, create=create)

    def _file(self, place: TurnPlace) -> Path:
        [file] = self.root.glob(f"sessions/*/{place.session}/{place.turn}")
        return file

    def alter(self, place: TurnPlace, part: str) -> None:
        file = self._file(place)
        raw = bytearray(file.read_bytes())
        raw[-1 if part == "body" else 20] ^= 1
        file.write_bytes(raw)

    def replace(self, place: TurnPlace, body: bytes) -> None:
        file = self._file(place)
        head = json.loads(file.read_bytes().partition(b"\n")[0]) | {"blake2b": digest_of(body)}
        file.write_bytes(json.dumps(head).encode() + b"\n" + body)

    def remove(self, place: TurnPlace) -> None:
        self._file(place).unlink()

    def make_newer(self, place: TurnPlace) -> None:
        file = self._file(place)
        head, _, body = file.read_bytes().partition(b"\n")
        file.write_bytes(json.dumps(json.loads(head) | {"format": 2}).encode() + b"\n" + body)

    def rows(self) -> set[str]:
        files = {str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_file()}
        return {name for name in files if name != MARK and not name.startswith("buried/")}

    def alter_pack(self, name: str) -> None:
        _alter_pack(self.root, name)

    def lose_pack(self, name: str) -> None:
        _lose_pack(self.root, name)

    def go_away(self) -> None:
        self.root.rename(self.root.with_name("away"))

    def come_back(self) -> None:
        self.root.with_name("away").rename(self.root)


class DatabasePlace:
    """A role's remote in a database. role: of the server, whose rows are looked at."""

    def __init__(self, server: Cluster, packs: Path, database: str = "", role: str = "ssmd") -> None:
        self.server, self.packs, self.role = server, packs, role
        packs.mkdir(mode=0o700)
        self.database = database or server.database()
        self.setting = server.url(self.database, user=role, packs=str(packs))

    def open(self, *, create: bool = False) -> Remote:
        return PostgresRemote.open(self.setting, create=create)

    def sql(self, statement: str) -> list[tuple[object, ...]]:
        return self.server.admin(statement, self.database)

    def _where(self, place: TurnPlace) -> str:
        return f"WHERE role = '{self.role}' AND session = '{place.session}' AND turn = '{place.turn}'"

    def alter(self, place: TurnPlace, part: str) -> None:
        altered = f"set_byte({part}, 0, get_byte({part}, 0) # 1)"
        self.sql(f"UPDATE ssmd.turn SET {part} = {altered} {self._where(place)}")

    def replace(self, place: TurnPlace, body: bytes) -> None:
        data = f"decode('{body.hex()}', 'hex')"
        self.sql(f"UPDATE ssmd.turn SET body = {data}, digest = sha256({data}) {self._where(place)}")

    def remove(self, place: TurnPlace) -> None:
        self.sql(f"DELETE FROM ssmd.turn {self._where(place)}")

    def make_newer(self, place: TurnPlace) -> None:
        self.sql(f"UPDATE ssmd.turn SET format = 2 {self._where(place)}")

    def rows(self) -> set[str]:
        found = {
            f"{table}/{s}/{t}"
            for table in ("turn", "ending")
            for s, t in self.sql(f"SELECT session, turn FROM ssmd.{table} WHERE role = '{self.role}'")
        }
        return found | self.pack_rows()

    def pack_rows(self) -> set[str]:
        return {f"packs/{p.name}" for p in self.packs.glob("packs/*/*")}

    def alter_pack(self, name: str) -> None:
        _alter_pack(self.packs, name)

    def lose_pack(self, name: str) -> None:
        _lose_pack(self.packs, name)

    def save_packs(self, at: Path) -> None:
        """Copy the place for bytes, as for a backup."""
        shutil.copytree(self.packs, at)

    def restore_packs(self, at: Path) -> None:
        """Put the place for bytes back from a copy."""
        shutil.rmtree(self.packs)
        shutil.copytree(at, self.packs)

    def go_away(self) -> None:
        self.server.admin(f"ALTER DATABASE {self.database} ALLOW_CONNECTIONS false")
        self.server.cut_off(self.database)

    def come_back(self) -> None:
        self.server.admin(f"ALTER DATABASE {self.database} ALLOW_CONNECTIONS true")


class BucketPlace(DatabasePlace):
    """A database, and a prefix of its own in a bucket. The environment has the bucket's keys."""

    def __init__(self, server: Cluster, bucket: BucketServer, unused: Path) -> None:
        super().__init__(server, unused)
        self.bucket, self.prefix = bucket, f"of/{self.database}-{secrets.token_hex(4)}"
        self.setting = server.url(self.database, packs=f"s3://{BUCKET}/{self.prefix}")

    def key(self, name: str) -> str:
        return f"{self.prefix}/packs/{name[:2]}/{name}"

    def pack_rows(self) -> set[str]:
        return {f"packs/{key.rpartition('/')[2]}" for key in self.bucket.keys(f"{self.prefix}/packs/")}

    def alter_pack(self, name: str) -> None:
        self.bucket.call("PUT", self.key(name), altered(self.bucket.call("GET", self.key(name))))

    def lose_pack(self, name: str) -> None:
        self.bucket.call("DELETE", self.key(name))

    def save_packs(self, at: Path) -> None:
        for key in self.bucket.keys(self.prefix + "/"):
            (at / key).parent.mkdir(parents=True, exist_ok=True)
            (at / key).write_bytes(self.bucket.call("GET", key))

    def restore_packs(self, at: Path) -> None:
        for key in self.bucket.keys(self.prefix + "/"):
            self.bucket.call("DELETE", key)
        for file in at.rglob("*"):
            if file.is_file():
                self.bucket.call("PUT", str(file.relative_to(at)), file.read_bytes())


def turn(name: str, session: str = "ses_1", *, chain: bytes | None = None, owner: str = "") -> RemoteTurn:
    """Make a turn, whose chain follows from its name."""
    chain = hashlib.sha256(name.encode()).digest() if chain is None else chain
    return RemoteTurn(TurnPlace(session, name), owner, chain, f"the body of {name}".encode())


def signed(row: dict[str, Any], key: MachineKey, kind: type[SignedRow]) -> bytes:
    """Sign a row again that was changed, as a machine can that lies."""
    bare = {name: value for name, value in row.items() if name not in ("key", "signature")}
    return key.sign(json.dumps(bare).encode(), kind.kind_signed)
