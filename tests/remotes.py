"""The two kinds of remote, as tests make, damage and take them away: a folder, and a database of a real server."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

from cluster import Cluster

from ssmd.sessions.remote.folder import MARK, FolderRemote
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

    def make_newer(self, place: TurnPlace) -> None:
        """Let a turn be one of the next version."""

    def rows(self) -> set[str]:
        """Return a name for each turn, state and pack that is kept, with the names of session and turn in it."""

    def go_away(self) -> None:
        """Let it be out of reach."""

    def come_back(self) -> None:
        """Let it be in reach again."""


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

    def make_newer(self, place: TurnPlace) -> None:
        file = self._file(place)
        head, _, body = file.read_bytes().partition(b"\n")
        file.write_bytes(json.dumps(json.loads(head) | {"format": 2}).encode() + b"\n" + body)

    def rows(self) -> set[str]:
        files = {str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_file()}
        return {name for name in files if name != MARK and not name.startswith("buried/")}

    def go_away(self) -> None:
        self.root.rename(self.root.with_name("away"))

    def come_back(self) -> None:
        self.root.with_name("away").rename(self.root)


class DatabasePlace:
    def __init__(self, server: Cluster, packs: Path) -> None:
        self.server, self.packs = server, packs
        packs.mkdir(mode=0o700)
        self.database = server.database()
        self.setting = server.url(self.database, packs=str(packs))

    def open(self, *, create: bool = False) -> Remote:
        return PostgresRemote.open(self.setting, create=create)

    def sql(self, statement: str) -> list[tuple[object, ...]]:
        return self.server.admin(statement, self.database)

    def alter(self, place: TurnPlace, part: str) -> None:
        self.sql(
            f"UPDATE ssmd.turn SET {part} = set_byte({part}, 0, get_byte({part}, 0) # 1) "
            f"WHERE session = '{place.session}' AND turn = '{place.turn}'"
        )

    def make_newer(self, place: TurnPlace) -> None:
        self.sql(f"UPDATE ssmd.turn SET format = 2 WHERE session = '{place.session}' AND turn = '{place.turn}'")

    def rows(self) -> set[str]:
        found = {
            f"{table}/{s}/{t}"
            for table in ("turn", "ending")
            for s, t in self.sql(f"SELECT session, turn FROM ssmd.{table}")
        }
        return found | {f"packs/{p.name}" for p in self.packs.glob("packs/*/*")}

    def go_away(self) -> None:
        self.server.admin(f"ALTER DATABASE {self.database} ALLOW_CONNECTIONS false")
        self.server.cut_off(self.database)

    def come_back(self) -> None:
        self.server.admin(f"ALTER DATABASE {self.database} ALLOW_CONNECTIONS true")


def turn(name: str, session: str = "ses_1", *, chain: bytes | None = None, owner: str = "") -> RemoteTurn:
    """Make a turn, whose chain follows from its name."""
    chain = hashlib.sha256(name.encode()).digest() if chain is None else chain
    return RemoteTurn(TurnPlace(session, name), owner, chain, f"the body of {name}".encode())


def signed(row: dict[str, Any], key: MachineKey, kind: type[SignedRow]) -> bytes:
    """Sign a row again that was changed, as a machine can that lies."""
    bare = {name: value for name, value in row.items() if name not in ("key", "signature")}
    return key.sign(json.dumps(bare).encode(), kind.kind_signed)
