"""Tables of the first release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "checkpoint",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("name", sa.String(length=50), server_default=sa.text("''"), nullable=False),
        sa.Column("version", sa.String(length=50), nullable=False),
        sa.Column("run_id", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("path", sa.String(length=255), nullable=False),
        sa.Column("source", sa.String(length=50), nullable=True),
        sa.Column("operator", sa.String(length=50), nullable=True),
        sa.Column("remark", sa.String(length=1024), nullable=True),
        sa.Column("config_yaml", sa.Text(), nullable=True),
        sa.Column("created_at", sa.TIMESTAMP(), server_default=sa.text("CURRENT_TIMESTAMP"), nullable=True),
        sa.Column("updated_at", sa.TIMESTAMP(), server_default=sa.text("CURRENT_TIMESTAMP"), nullable=True),
        sa.Column("deleted_at", sa.TIMESTAMP(), nullable=True),
        sa.Column("started_at", sa.TIMESTAMP(), nullable=True),
        sa.Column("finished_at", sa.TIMESTAMP(), nullable=True),
        sa.Column("training_step", sa.BigInteger(), nullable=True),
        sa.Column("weights_version", sa.BigInteger(), nullable=True),
        sa.Column("checksum", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_checkpoint_created_at", "checkpoint", ["created_at"], unique=False)
    op.create_index("ix_checkpoint_run_id_status", "checkpoint", ["run_id", "status"], unique=False)
    op.create_index("ix_checkpoint_source", "checkpoint", ["source"], unique=False)
    op.create_index("ix_checkpoint_status", "checkpoint", ["status"], unique=False)
    op.create_index("ix_checkpoint_updated_at", "checkpoint", ["updated_at"], unique=False)
    op.create_index("ix_checkpoint_version", "checkpoint", ["version"], unique=False)
    op.create_table(
        "evaluation",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=False),
        sa.Column("evaluation_id", sa.String(length=191), nullable=False),
        sa.Column("temperature", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.Column("episodes_per_task", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("total", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("opened_at", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "evaluation_id", name="uq_evaluation_run_id_evaluation_id"),
    )
    op.create_table(
        "event",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=False),
        sa.Column("kind", sa.String(length=191), nullable=False),
        sa.Column("subject", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("data", sa.JSON(), nullable=True),
        sa.Column("at", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_event_run_id_at", "event", ["run_id", "at"], unique=False)
    op.create_index("ix_event_run_id_kind_at", "event", ["run_id", "kind", "at"], unique=False)
    op.create_table(
        "family",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=False),
        sa.Column("family", sa.String(length=191), nullable=False),
        sa.Column("groups_opened", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("groups_closed", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("groups_trainable", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "family", name="uq_family_run_id_family"),
    )
    op.create_table(
        "group_member",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("membership_id", sa.String(length=191), nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=False),
        sa.Column("group_id", sa.String(length=191), nullable=False),
        sa.Column("slot", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("trajectory_id", sa.String(length=191), nullable=False),
        sa.Column("role", sa.String(length=191), nullable=False),
        sa.Column("fresh_trajectory", sa.String(length=191), nullable=True),
        sa.Column("state", sa.String(length=191), nullable=False),
        sa.Column("reason", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("score", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.Column("success", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("num_steps", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("oldest_version", sa.BigInteger(), nullable=True),
        sa.Column("claim_id", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("training_step", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("fresh_trajectory", name="uq_group_member_fresh_trajectory"),
        sa.UniqueConstraint("membership_id", name="uq_group_member_membership_id"),
    )
    op.create_index("ix_group_member_group_id", "group_member", ["group_id"], unique=False)
    op.create_index("ix_group_member_run_id_claim_id", "group_member", ["run_id", "claim_id"], unique=False)
    op.create_index("ix_group_member_run_id_state", "group_member", ["run_id", "state"], unique=False)
    op.create_table(
        "group_slot",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=False),
        sa.Column("group_id", sa.String(length=191), nullable=False),
        sa.Column("purpose", sa.String(length=191), nullable=False),
        sa.Column("evaluation_id", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("slot", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("state", sa.String(length=191), nullable=False),
        sa.Column("attempts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("failures", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("trajectory_id", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("group_id", "slot", name="uq_group_slot_group_id_slot"),
    )
    op.create_index("ix_group_slot_run_id_evaluation_id_state", "group_slot", ["run_id", "evaluation_id", "state"], unique=False)
    op.create_index("ix_group_slot_run_id_purpose_state", "group_slot", ["run_id", "purpose", "state"], unique=False)
    op.create_table(
        "lease",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("subject", sa.String(length=191), nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=False),
        sa.Column("kind", sa.String(length=191), nullable=False),
        sa.Column("state", sa.String(length=191), nullable=False),
        sa.Column("holder", sa.String(length=191), nullable=False),
        sa.Column("token", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("expires_at", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("subject", name="uq_lease_subject"),
    )
    op.create_index("ix_lease_run_id_kind_state", "lease", ["run_id", "kind", "state"], unique=False)
    op.create_table(
        "pool_entry",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=False),
        sa.Column("task_id", sa.String(length=191), nullable=False),
        sa.Column("trajectory_id", sa.String(length=191), nullable=False),
        sa.Column("provenance", sa.String(length=191), nullable=False),
        sa.Column("logprob_source", sa.String(length=191), nullable=False),
        sa.Column("scored_version", sa.BigInteger(), nullable=True),
        sa.Column("oldest_version", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_steps", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("score", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.Column("replays", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "trajectory_id", name="uq_pool_entry_run_id_trajectory_id"),
    )
    op.create_index("ix_pool_entry_run_id_task_id", "pool_entry", ["run_id", "task_id"], unique=False)
    op.create_table(
        "rollout_group",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("group_id", sa.String(length=191), nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=False),
        sa.Column("task_id", sa.String(length=191), nullable=False),
        sa.Column("family", sa.String(length=191), nullable=False),
        sa.Column("purpose", sa.String(length=191), nullable=False),
        sa.Column("evaluation_id", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("state", sa.String(length=191), nullable=False),
        sa.Column("reason", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("num_slots", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_done", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_scored", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_successes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("oldest_version", sa.BigInteger(), nullable=True),
        sa.Column("opened_version", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("opened_at", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("claim_id", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("training_step", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("group_id", name="uq_rollout_group_group_id"),
    )
    op.create_index("ix_rollout_group_run_id_claim_id", "rollout_group", ["run_id", "claim_id"], unique=False)
    op.create_index("ix_rollout_group_run_id_purpose_state", "rollout_group", ["run_id", "purpose", "state"], unique=False)
    op.create_table(
        "rollout_run",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=True),
        sa.Column("trajectory_id", sa.String(length=191), nullable=True),
        sa.Column("task_id", sa.String(length=191), nullable=True),
        sa.Column("trace_id", sa.String(length=191), nullable=True),
        sa.Column("split_dir", sa.String(length=512), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("num_chunks", sa.BigInteger(), nullable=True),
        sa.Column("used", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("model_version", sa.String(length=191), nullable=True),
        sa.Column("instruction", sa.String(length=1024), nullable=True),
        sa.Column("create_at", sa.TIMESTAMP(), server_default=sa.text("CURRENT_TIMESTAMP"), nullable=True),
        sa.Column("family", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("purpose", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("evaluation_id", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("group_id", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("slot", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("state", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("reason", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("detail", sa.String(length=1024), server_default=sa.text("''"), nullable=False),
        sa.Column("success", sa.Boolean(), nullable=True),
        sa.Column("raw", sa.Double(), nullable=True),
        sa.Column("arrays", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("oldest_version", sa.BigInteger(), nullable=True),
        sa.Column("newest_version", sa.BigInteger(), nullable=True),
        sa.Column("holder", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("environment", sa.JSON(), nullable=True),
        sa.Column("full_instruction", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("trajectory_id", "run_id", name="uq_rollout_run_trajectory_id_run_id"),
    )
    op.create_index("ix_rollout_run_run_id_ended_at", "rollout_run", ["run_id", "ended_at"], unique=False)
    op.create_index(
        "ix_rollout_run_run_id_evaluation_id_family_state_success",
        "rollout_run",
        ["run_id", "evaluation_id", "family", "state", "success"],
        unique=False,
    )
    op.create_index("ix_rollout_run_run_id_purpose_family", "rollout_run", ["run_id", "purpose", "family"], unique=False)
    op.create_index("ix_rollout_run_run_id_state", "rollout_run", ["run_id", "state"], unique=False)
    op.create_index("ix_rollout_run_task_id", "rollout_run", ["task_id"], unique=False)
    op.create_index("ix_rollout_run_used", "rollout_run", ["used"], unique=False)
    op.create_table(
        "run",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=False),
        sa.Column("seed", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("config", sa.JSON(), nullable=True),
        sa.Column("versions", sa.JSON(), nullable=True),
        sa.Column("phase", sa.String(length=191), nullable=False),
        sa.Column("tasks_checksum", sa.String(length=191), nullable=False),
        sa.Column("groups_opened", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("claims_made", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_version", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("breaker_reason", sa.String(length=1024), server_default=sa.text("''"), nullable=False),
        sa.Column("breaker_until", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.Column("breaker_floor", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("admission", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("created_at", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", name="uq_run_run_id"),
    )
    op.create_table(
        "step",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=False),
        sa.Column("trajectory_id", sa.String(length=191), nullable=False),
        sa.Column("step_index", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("screenshot", sa.String(length=191), nullable=True),
        sa.Column("width", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("height", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("observation_text", sa.Text(), nullable=True),
        sa.Column("reply", sa.Text(), nullable=True),
        sa.Column("actions", sa.JSON(), nullable=True),
        sa.Column("parse_error", sa.JSON(), nullable=True),
        sa.Column("image_hashes", sa.JSON(), nullable=True),
        sa.Column("image_grids", sa.JSON(), nullable=True),
        sa.Column("banned_ids", sa.JSON(), nullable=True),
        sa.Column("num_prompt_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_reply_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("has_entropies", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("mean_entropy", sa.Double(), nullable=True),
        sa.Column("finish_reason", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("fingerprint", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("temperature", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.Column("compute_dtype", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("weights_version", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("worker", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("request_id", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("generation_seconds", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.Column("environment_seconds", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.Column("started_at", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("trajectory_id", "step_index", name="uq_step_trajectory_id_step_index"),
    )
    op.create_index("ix_step_run_id", "step", ["run_id"], unique=False)
    op.create_table(
        "task",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=False),
        sa.Column("task_id", sa.String(length=191), nullable=False),
        sa.Column("family", sa.String(length=191), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("split", sa.String(length=191), nullable=False),
        sa.Column("instruction", sa.Text(), nullable=True),
        sa.Column("spec", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "task_id", name="uq_task_run_id_task_id"),
    )
    op.create_index("ix_task_run_id_split", "task", ["run_id", "split"], unique=False)
    op.create_table(
        "training_step",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=False),
        sa.Column("step_index", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("claim_id", sa.String(length=191), nullable=False),
        sa.Column("state", sa.String(length=191), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=True),
        sa.Column("rejected", sa.JSON(), nullable=True),
        sa.Column("weights_version", sa.BigInteger(), nullable=True),
        sa.Column("trainer", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("token", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("created_at", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "claim_id", name="uq_training_step_run_id_claim_id"),
    )
    op.create_index("ix_training_step_run_id_state", "training_step", ["run_id", "state"], unique=False)
    op.create_table(
        "weights_version",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=False),
        sa.Column("version", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("state", sa.String(length=191), nullable=False),
        sa.Column("path", sa.String(length=1024), server_default=sa.text("''"), nullable=False),
        sa.Column("checksum", sa.String(length=191), server_default=sa.text("''"), nullable=False),
        sa.Column("training_step", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("parent", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "version", name="uq_weights_version_run_id_version"),
    )
    op.create_index("ix_weights_version_run_id_state", "weights_version", ["run_id", "state"], unique=False)
    op.create_table(
        "worker",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=191), nullable=False),
        sa.Column("worker", sa.String(length=191), nullable=False),
        sa.Column("version", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("updated_at", sa.Double(), server_default=sa.text("0.0"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "worker", name="uq_worker_run_id_worker"),
    )


def downgrade() -> None:
    for table in (
        "checkpoint",
        "evaluation",
        "event",
        "family",
        "group_member",
        "group_slot",
        "lease",
        "pool_entry",
        "rollout_group",
        "rollout_run",
        "run",
        "step",
        "task",
        "training_step",
        "weights_version",
        "worker",
    ):
        op.drop_table(table)
