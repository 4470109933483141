"""Run by alembic: migrates over the connection that `migrate` hands in."""

from __future__ import annotations

from alembic import context

from dartrl.data.sql_tables import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, transactional_ddl=False)
context.run_migrations()
