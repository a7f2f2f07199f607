"""Alembic's entry: runs the revisions on the connection that ssmd.sessions.rows.opening hands over."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from ssmd.sessions.rows.schema import metadata

connection: Connection | None = context.config.attributes.get("connection")
if connection is None:
    raise SystemExit("run through ssmd: opening the store makes its tables")
# render_as_batch: SQLite changes a table by copying it. One transaction for all: it is the caller's.
context.configure(
    connection=connection, target_metadata=metadata, render_as_batch=True, transactional_ddl=True, compare_type=True
)
with context.begin_transaction():
    context.run_migrations()
