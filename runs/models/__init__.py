"""Tables of the control plane.

The tables cache the buckets. Only users, their saved views, boards and tokens, sweeps, credentials,
budgets, prices, and the spending of deleted runs exist in the database alone.

Models hold fields, constraints and cheap properties. Transitions are in :mod:`runs.transitions` and
:mod:`runs.actions`, queries in :mod:`runs.queries`.
"""

from __future__ import annotations

from runs.models.alert import Alert, AlertsRead
from runs.models.archive import Archive
from runs.models.audit import AuditEntry
from runs.models.board import Board
from runs.models.budget import Budget
from runs.models.credential import Credential
from runs.models.evaluation import Evaluation, EvaluationAttempt, EvaluationPlan
from runs.models.event import Event
from runs.models.ingest import IngestState, QuarantinedRecord
from runs.models.journal import Journal
from runs.models.orphan import OrphanJob
from runs.models.price import PriceOverride, TrafficPrice
from runs.models.rounds import Checkpoint, Contribution, Round
from runs.models.run import Replica, ReplicaAttempt, ReplicaPool, Run
from runs.models.run_view import RunView
from runs.models.saved_view import SavedView
from runs.models.spending import RetainedSpend, TagPeriod
from runs.models.sweep import Sweep
from runs.models.telemetry import LogLine, MetricBlock, TelemetryCursor
from runs.models.token import ApiToken
from runs.models.tracker import ExperimentTracker, RunMirror
from runs.models.webhook import Webhook, WebhookDelivery

__all__ = [
    "Alert",
    "AlertsRead",
    "ApiToken",
    "Archive",
    "AuditEntry",
    "Board",
    "Budget",
    "Checkpoint",
    "Contribution",
    "Credential",
    "Evaluation",
    "EvaluationAttempt",
    "EvaluationPlan",
    "Event",
    "ExperimentTracker",
    "IngestState",
    "Journal",
    "LogLine",
    "MetricBlock",
    "OrphanJob",
    "PriceOverride",
    "QuarantinedRecord",
    "Replica",
    "ReplicaAttempt",
    "ReplicaPool",
    "RetainedSpend",
    "Round",
    "Run",
    "RunMirror",
    "RunView",
    "SavedView",
    "Sweep",
    "TagPeriod",
    "TelemetryCursor",
    "TrafficPrice",
    "Webhook",
    "WebhookDelivery",
]
