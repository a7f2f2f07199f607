"""The key of this machine, and the signatures by which machines know each other's rows in a remote.

A signed row is JSON whose last members are the public key and the signature, in hex. The signature is Ed25519 over the
kind of the row and all bytes before it. So it holds for one session and turn, which the row names.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import Field

from ssmd.machine.privatefile import read_secret
from ssmd.model.strict import Strict
from ssmd.sessions.files.document import Hex
from ssmd.sessions.remote.remote import InvalidTurn, RemoteError
from ssmd.sessions.store import Store

FILE = "machine.key"  # in the data directory
FORMATS = (1, 2)  # of a row: 1 has no signature
FORMAT: Literal[2] = 2
_MAX_FILE = 4096  # bytes
_NEW = f"{FILE}.new"
_TAIL = re.compile(rb',"key":"([0-9a-f]{64})","signature":"([0-9a-f]{128})"\}')
_TAIL_BYTES = len(b',"key":"","signature":""}') + 64 + 128
_SIGNATURE_BYTES = len(b',"signature":""}') + 128


class KeyRefused(RemoteError):
    """The file of this machine's key cannot be used: nothing is sent until a user mends that."""

    reason = "key_refused"

    def __init__(self, message: str) -> None:
        super().__init__(message, lasting=True, refused=True)


class SignedRow(Strict):
    """A row of a remote that its machine signed; in format 1 it is not signed.

    kind_signed: the kind of row that a signature is good for. key, signature: None until it is signed.
    """

    kind_signed: ClassVar[bytes]
    format: Literal[1, 2]
    key: Hex | None = None
    signature: Annotated[str, Field(pattern="^[0-9a-f]{128}$")] | None = None

    def signed_by(self, key: MachineKey) -> bytes:
        """Return a row of format 2 as signed JSON."""
        return key.sign(self.model_dump_json(exclude={"key", "signature"}).encode(), self.kind_signed)


class MachineKey:
    """A machine's private key. public: its public key in hex, by which other machines know it."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw().hex()

    def sign(self, raw: bytes, kind: bytes) -> bytes:
        """Return a row's JSON with key and signature at its end. kind: of the row."""
        before = raw[:-1] + f',"key":"{self.public}"'.encode()
        return before + f',"signature":"{self._private.sign(kind + before).hex()}"}}'.encode()


def check_signature(raw: bytes, kind: bytes, what: str) -> None:
    """Check the signature at the end of a row. Raises InvalidTurn, which names the row as `what`."""
    found = _TAIL.fullmatch(raw[-_TAIL_BYTES:])
    if found is None:
        raise InvalidTurn(f"{what} does not end with a key and a signature")
    key, signature = (bytes.fromhex(one.decode()) for one in found.groups())
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, kind + raw[:-_SIGNATURE_BYTES])
    except (InvalidSignature, ValueError) as err:
        raise InvalidTurn(f"{what} is not what its signature says: it was altered") from err


def own_key(store: Store) -> MachineKey:
    """Return this machine's key. Make one first if it has no file. Raises KeyRefused, StoreError."""
    folder = store.file.parent
    found = read_key(folder)
    if found is None:
        with store.writing():  # in one process at a time
            found = read_key(folder) or _make(folder)
    return found


def new_key(store: Store) -> MachineKey:
    """Make another key in place of this machine's, whatever its file is. Raises KeyRefused, StoreError."""
    with store.writing():
        return _make(store.file.parent)


def read_key(folder: Path) -> MachineKey | None:
    """Read this machine's key from its data directory; None without a file. Raises KeyRefused."""
    file = folder / FILE
    advice = "put the right file in its place, or make another key with `ssmd store key --new`"
    try:
        raw = read_secret(file, _MAX_FILE + 1)
    except FileNotFoundError:
        return None
    except OSError as err:
        raise KeyRefused(
            f"this machine's key is not used: {err}; set mode 0600 if no other user has read it, else {advice}"
        ) from err
    try:
        fields: Any = json.loads(raw if len(raw) <= _MAX_FILE else b"")
        made = MachineKey(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(fields["secret"])))
        if made.public != fields["key"]:
            raise ValueError("the two keys do not belong together")
    except (ValueError, TypeError, KeyError, RecursionError) as err:
        raise KeyRefused(f"this machine's key {file} is damaged: {advice}") from err
    return made


def _make(folder: Path) -> MachineKey:
    private = Ed25519PrivateKey.generate()
    made = MachineKey(private)
    fields = {"format": 1, "key": made.public, "secret": private.private_bytes_raw().hex()}
    new = folder / _NEW
    try:
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(json.dumps(fields).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / FILE)
        if os.name == "posix":
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as err:
        raise KeyRefused(f"this machine's key cannot be written to {folder}: {err.strerror or err}") from err
    return made
