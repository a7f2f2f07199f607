"""Replies in a remote: a row an `Idempotency-Key`, with a lease for the machine that answers, and then its answer.

A row is taken in one statement, by the database's clock. Each later write compares token and fence, so that a machine
that slept past its lease writes nothing. The text of an answer stands in its turns: a row is of no use without them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from sqlalchemy import Connection, TextClause, text

from ssmd.sessions.remote.postgres.server import Server
from ssmd.sessions.remote.remote import MAX_BODY_BYTES, ReplyClaim, ReplyRow

_EXPIRE = text("""
    DELETE FROM ssmd.reply WHERE role = CURRENT_USER AND key IN (
        SELECT key FROM ssmd.reply WHERE role = CURRENT_USER AND expires < now() ORDER BY expires LIMIT 100
        FOR UPDATE SKIP LOCKED)""")
# `over` is the fence of a row whose answer cannot be read any more. A claim that is asked for again is its own.
_CLAIM = text("""
    INSERT INTO ssmd.reply AS held (key, request, token, fence, until, expires)
    VALUES (:key, :request, :token, 1, clock_timestamp() + make_interval(secs => :lease),
        clock_timestamp() + make_interval(secs => :lasts))
    ON CONFLICT (role, key) DO UPDATE
    SET request = excluded.request, token = excluded.token, fence = held.fence + 1, until = excluded.until,
        expires = excluded.expires, session = NULL, turns = NULL, answer = NULL, digest = NULL
    WHERE held.until < clock_timestamp() OR held.token = excluded.token OR held.expires < clock_timestamp()
        OR (held.answer IS NOT NULL AND held.fence = :over)
    RETURNING fence""")
_FOUND = text("""
    SELECT request, fence, session, turns, digest, CASE WHEN octet_length(answer) <= :most THEN answer END AS answer
    FROM ssmd.reply WHERE role = CURRENT_USER AND key = :key""")
_RENEW = text("""
    UPDATE ssmd.reply
    SET until = CASE WHEN answer IS NULL THEN clock_timestamp() + make_interval(secs => :lease) ELSE until END
    WHERE role = CURRENT_USER AND key = :key AND token = :token AND fence = :fence""")
_RECORD = text("""
    UPDATE ssmd.reply SET answer = :answer, digest = sha256(:answer), session = :session, turns = :turns,
        until = 'infinity'
    WHERE role = CURRENT_USER AND key = :key AND token = :token AND fence = :fence""")
_RELEASE = text("""
    DELETE FROM ssmd.reply
    WHERE role = CURRENT_USER AND key = :key AND token = :token AND fence = :fence AND answer IS NULL""")


class DatabaseReplies:
    """The replies of a remote in PostgreSQL. The remote's Replies."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def claim(
        self, key: bytes, request: bytes, token: str, *, lease_s: float, lasts_s: float, over: int = 0
    ) -> ReplyClaim | ReplyRow:
        """Take a key to answer its request; else return its row, which has an answer or is another machine's."""
        values = {"key": key, "request": request, "token": token, "lease": lease_s, "lasts": lasts_s, "over": over}

        def claim(connection: Connection) -> ReplyClaim | ReplyRow | None:
            connection.execute(_EXPIRE)
            fence = connection.scalar(_CLAIM, values)
            if fence is not None:
                return ReplyClaim(key, token, int(fence))
            row = connection.execute(_FOUND, {"key": key, "most": MAX_BODY_BYTES}).one_or_none()
            if row is None:
                return None
            answer = None if row.answer is None else bytes(row.answer)
            if answer is not None and (row.digest is None or hashlib.sha256(answer).digest() != bytes(row.digest)):
                answer = b""  # it was altered: no reader takes it
            return ReplyRow(bytes(row.request), int(row.fence), row.session or "", tuple(row.turns or ()), answer)

        found = None
        while found is None:  # it was released between the two statements
            found = self._server.write(claim)
        return found

    def renew(self, claim: ReplyClaim, lease_s: float) -> bool:
        """Prolong a claim. Returns False if another machine has the key by now."""
        return self._write(_RENEW, claim, lease=lease_s)

    def record(self, claim: ReplyClaim, session: str, turns: Sequence[str], answer: bytes) -> bool:
        """Keep the answer to a claimed key. Returns False if another machine has the key by now: nothing is kept."""
        return self._write(_RECORD, claim, session=session, turns=list(turns), answer=answer)

    def release(self, claim: ReplyClaim) -> None:
        """Give a key back without an answer, if it is still this machine's."""
        self._write(_RELEASE, claim)

    def _write(self, statement: TextClause, claim: ReplyClaim, **values: object) -> bool:
        named = {"key": claim.key, "token": claim.token, "fence": claim.fence, **values}
        return self._server.write(lambda connection: connection.execute(statement, named).rowcount > 0)
