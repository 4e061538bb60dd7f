"""The schema of the first release: it replaces 25 unreleased migrations.

A database with all of them counts as migrated. A database with only some of them is refused
(``runs.schema``).
"""

import uuid

import django.db.models.deletion
import django.db.models.functions.text
from django.conf import settings
from django.contrib.auth.management import create_permissions
from django.db import migrations, models

from runs import audit_triggers

REPLACED = """
0001_initial
0002_groups
0003_pools_and_credentials
0004_tokens
0005_billed_seconds
0006_run_life
0007_round_strips
0008_alerts
0009_webhooks
0010_orders_of_the_list
0011_saved_views
0012_order_by_start
0013_notify_and_max_price
0014_prices_and_alerts
0015_healing_lateness_usage
0016_cosine_and_sample
0017_names_of_tables
0018_blocks_as_they_are
0019_orders_with_unknown_last
0020_control_and_ingest
0021_canonical_rendezvous
0022_security
0023_pending_attempts
0024_audit_replace
0025_waits_and_earlier_costs
""".split()

ROLES = ("viewer", "operator", "admin")
# A role can view these models; may_operate in runs.permissions decides per run about changes.
VIEWED = (
    "checkpoint", "contribution", "event", "logline", "metricblock", "replica",
    "replicaattempt", "replicapool", "round", "run", "telemetrycursor",
)
# A descending index of PostgreSQL puts NULL first, but the list of runs puts it last.
NULLS_LAST_INDEXES = (
    ("run_by_eval_loss_falling", "eval_loss DESC NULLS LAST, id"),
    ("run_by_train_loss_falling", "train_loss DESC NULLS LAST, id"),
    ("run_by_start_unknown_last", "started_at DESC NULLS LAST, id DESC"),
)


def create_roles(apps, schema_editor):
    # Django creates permissions after the last migration; the roles need them now.
    config = apps.get_app_config("runs")
    config.models_module = True
    create_permissions(config, apps=apps, verbosity=0, using=schema_editor.connection.alias)
    config.models_module = None
    permissions = apps.get_model("auth", "Permission").objects.filter(
        content_type__app_label="runs", codename__in=[f"view_{model}" for model in VIEWED]
    )
    for role in ROLES:
        group, _ = apps.get_model("auth", "Group").objects.get_or_create(name=role)
        group.permissions.add(*permissions)


def tune_postgresql(apps, schema_editor):
    if schema_editor.connection.vendor != "postgresql":
        return
    # A live tick rewrites blocks every second: compressing them took most of its time, and saves
    # only a quarter to a third of the space.
    schema_editor.execute(
        "ALTER TABLE runs_metricblock ALTER COLUMN data SET STORAGE EXTERNAL", params=None
    )
    for name, columns in NULLS_LAST_INDEXES:
        schema_editor.execute(
            f"CREATE INDEX {name} ON runs_run ({columns}) WHERE archived_at IS NULL", params=None
        )


def install_audit_triggers(apps, schema_editor):
    audit_triggers.install(schema_editor.connection)


class Migration(migrations.Migration):

    initial = True

    replaces = [("runs", name) for name in REPLACED]

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
        ("auth", "0012_alter_user_first_name_max_length"),
        ("contenttypes", "0002_remove_content_type_name"),
    ]

    operations = [
        migrations.CreateModel(
            name='Archive',
            fields=[
                ('sha256', models.CharField(max_length=64, primary_key=True, serialize=False)),
                ('data', models.BinaryField()),
                ('created_at', models.DateTimeField()),
            ],
        ),
        migrations.CreateModel(
            name='AuditEntry',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField()),
                ('actor', models.CharField(blank=True, max_length=150)),
                ('address', models.CharField(blank=True, max_length=64)),
                ('action', models.CharField(max_length=64)),
                ('target', models.CharField(blank=True, max_length=200)),
                ('detail', models.TextField(blank=True)),
                ('previous_hash', models.CharField(max_length=64)),
                ('hash', models.CharField(max_length=64, unique=True)),
            ],
            options={
                'verbose_name_plural': 'audit log',
                'ordering': ('-id',),
            },
        ),
        migrations.CreateModel(
            name='Run',
            fields=[
                ('id', models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ('name', models.CharField(max_length=80)),
                ('state', models.CharField(choices=[('draft', 'Draft'), ('queued', 'Queued'), ('provisioning', 'Provisioning'), ('running', 'Running'), ('degraded', 'Degraded'), ('stalled', 'Stalled'), ('pausing', 'Pausing'), ('paused', 'Paused'), ('stopping', 'Stopping'), ('succeeded', 'Succeeded'), ('failed', 'Failed'), ('cancelled', 'Cancelled')], default='draft', max_length=16)),
                ('state_reason', models.TextField(blank=True)),
                ('state_since', models.DateTimeField()),
                ('rendezvous', models.CharField(help_text="URI of the run's own prefix", max_length=500)),
                ('group_settings', models.JSONField(help_text='Editable until launch; read-only after')),
                ('workload', models.JSONField()),
                ('group_fingerprint', models.CharField(blank=True, max_length=64)),
                ('code_sha256', models.CharField(blank=True, max_length=64)),
                ('model_hash', models.CharField(blank=True, help_text='From the manifest of checkpoint 0; empty until it exists', max_length=128)),
                ('submit_key', models.CharField(help_text='A form that is submitted twice has one key and creates one run', max_length=64, unique=True)),
                ('time_limit_s', models.PositiveIntegerField(default=0, help_text='0 means no limit')),
                ('budget_usd', models.FloatField(default=0, help_text='0 means no limit')),
                ('cost_usd', models.FloatField(default=0, help_text='Total of all attempts with a known price')),
                ('start_timeout_s', models.PositiveIntegerField(default=0, help_text='The run is cancelled if training has not started by then; 0: never')),
                ('max_restarts', models.PositiveIntegerField(default=3, help_text='Automatic relaunches of one replica after consecutive failures')),
                ('notify', models.JSONField(blank=True, help_text='IDs of the webhooks that get its alerts; null: all', null=True)),
                ('notes', models.TextField(blank=True)),
                ('tags', models.JSONField(blank=True, default=list)),
                ('archived_at', models.DateTimeField(blank=True, help_text='Hidden from lists since', null=True)),
                ('forked_from', models.UUIDField(blank=True, help_text='The run whose checkpoint this run started from', null=True)),
                ('fork_round', models.PositiveIntegerField(default=0, help_text='Round of that checkpoint')),
                ('fork_outer', models.BooleanField(default=True, help_text='Whether the fork includes the state of the outer optimizer')),
                ('created_at', models.DateTimeField()),
                ('started_at', models.DateTimeField(blank=True, null=True)),
                ('first_step_at', models.DateTimeField(blank=True, null=True)),
                ('ended_at', models.DateTimeField(blank=True, null=True)),
                ('stop_requested_at', models.DateTimeField(blank=True, null=True)),
                ('cancel_at', models.DateTimeField(blank=True, help_text='When its jobs are ended, if it is stopped by force', null=True)),
                ('resumed_at', models.DateTimeField(blank=True, help_text='When it was last resumed after a pause or an end', null=True)),
                ('idle_s', models.FloatField(default=0, help_text='Seconds it was paused or ended; they count towards no limit')),
                ('save_requested_at', models.DateTimeField(blank=True, null=True)),
                ('delete_requested_at', models.DateTimeField(blank=True, null=True)),
                ('delete_objects', models.BooleanField(default=False, help_text='Whether the objects of its rendezvous are deleted with it')),
                ('last_seen_at', models.DateTimeField(blank=True, help_text='Newest telemetry', null=True)),
                ('committed_rounds', models.PositiveIntegerField(default=0)),
                ('tokens', models.PositiveBigIntegerField(default=0)),
                ('train_loss', models.FloatField(blank=True, null=True)),
                ('eval_loss', models.FloatField(blank=True, null=True)),
                ('tokens_per_s', models.FloatField(blank=True, null=True)),
                ('eval_round', models.PositiveIntegerField(default=0, help_text='Round of eval_loss')),
                ('round_s', models.FloatField(blank=True, help_text='Smoothed duration of a round', null=True)),
                ('bytes_up', models.PositiveBigIntegerField(default=0)),
                ('bytes_down', models.PositiveBigIntegerField(default=0)),
                ('phase_s', models.JSONField(default=dict, help_text='Phase name -> seconds, of all replicas')),
                ('refused_records', models.PositiveIntegerField(default=0, help_text='Skipped as unreadable')),
                ('next_round', models.PositiveIntegerField(default=1, help_text='Next commit to read')),
                ('committed_at', models.DateTimeField(blank=True, help_text='When ingest last read a new commit', null=True)),
                ('next_command', models.PositiveIntegerField(default=1)),
                ('stop_sent_at', models.DateTimeField(blank=True, null=True)),
                ('save_sent_at', models.DateTimeField(blank=True, null=True)),
                ('published_event_id', models.PositiveBigIntegerField(default=0)),
                ('end_due', models.BooleanField(default=False, help_text='It has ended, and the alert about that is not stored yet')),
                ('watched_round', models.PositiveIntegerField(default=0, help_text='The newest committed round that alert rules were evaluated for')),
                ('archive', models.ForeignKey(blank=True, help_text="The user's code", null=True, on_delete=django.db.models.deletion.PROTECT, to='runs.archive')),
                ('owner', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='runs', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('-created_at', '-id'),
                'permissions': (('use_local_backend', 'Can run replicas on the server itself'), ('run_custom_code_locally', 'Can run custom code on the server itself')),
            },
        ),
        migrations.CreateModel(
            name='ApiToken',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=80)),
                ('hint', models.CharField(editable=False, max_length=16)),
                ('digest', models.CharField(editable=False, max_length=64, unique=True)),
                ('scopes', models.JSONField(default=list)),
                ('created_at', models.DateTimeField(editable=False)),
                ('expires_at', models.DateTimeField(blank=True, help_text='Null: never', null=True)),
                ('last_used_at', models.DateTimeField(blank=True, editable=False, null=True)),
                ('revoked_at', models.DateTimeField(blank=True, null=True)),
                ('owner', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='api_tokens', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'verbose_name': 'API token',
                'ordering': ('-id',),
            },
        ),
        migrations.CreateModel(
            name='Credential',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=80, unique=True)),
                ('kind', models.CharField(max_length=32)),
                ('sealed', models.TextField(editable=False)),
                ('fields', models.JSONField(default=list, editable=False)),
                ('options', models.JSONField(blank=True, default=dict)),
                ('allowed_pool_options', models.JSONField(blank=True, default=dict)),
                ('created_at', models.DateTimeField(editable=False)),
                ('changed_at', models.DateTimeField(editable=False)),
                ('tested_at', models.DateTimeField(blank=True, editable=False, null=True)),
                ('test_ok', models.BooleanField(editable=False, null=True)),
                ('test_message', models.TextField(blank=True, editable=False)),
                ('created_by', models.ForeignKey(editable=False, null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('kind', 'name'),
            },
        ),
        migrations.CreateModel(
            name='IngestState',
            fields=[
                ('run', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='ingest', serialize=False, to='runs.run')),
                ('begun_pass', models.PositiveBigIntegerField(default=0, help_text='The newest pass')),
                ('complete_pass', models.PositiveBigIntegerField(default=0, help_text='The newest pass that read leases, rounds and the final manifest')),
                ('wanted_pass', models.PositiveBigIntegerField(default=0, help_text='Control decides about an ended job after this pass')),
                ('wanted_at', models.DateTimeField(blank=True, null=True)),
                ('reading', models.BooleanField(default=False, help_text='A pass is running; if set when a pass begins, the previous one was killed')),
                ('careful', models.BooleanField(default=False, help_text='Passes read one record at a time and store its key first')),
                ('backlog', models.BooleanField(default=False, help_text='The last pass left telemetry unread')),
                ('begun_at', models.DateTimeField(blank=True, null=True)),
                ('complete_at', models.DateTimeField(blank=True, null=True)),
                ('caught_up_at', models.DateTimeField(blank=True, help_text='When a pass last read all telemetry', null=True)),
                ('trouble', models.CharField(blank=True, choices=[('', 'None'), ('away', 'Away'), ('denied', 'Denied'), ('failed', 'Failed')], default='', max_length=8)),
                ('trouble_since', models.DateTimeField(blank=True, null=True)),
                ('message', models.TextField(blank=True, help_text='Details of the trouble')),
                ('observed_s', models.FloatField(default=0, help_text="Seconds during which leases were read; measures a replica's silence")),
                ('observed_at', models.DateTimeField(blank=True, help_text='When leases were read', null=True)),
                ('progress_s', models.FloatField(default=0, help_text='observed_s when a round last closed')),
                ('every_round', models.BooleanField(default=True, help_text='The last pass read every existing commit')),
                ('final_reason', models.CharField(blank=True, help_text='From the final manifest', max_length=32)),
                ('final_round', models.PositiveIntegerField(default=0)),
                ('quarantined', models.PositiveIntegerField(default=0, help_text='Number of skipped records')),
                ('nonfinite', models.BooleanField(default=False, help_text='A replica process reported a loss that is NaN or infinite')),
            ],
        ),
        migrations.AddField(
            model_name='run',
            name='store_credential',
            field=models.ForeignKey(blank=True, help_text="Opens the rendezvous; null: the server's own environment", null=True, on_delete=django.db.models.deletion.PROTECT, related_name='runs_stored', to='runs.credential'),
        ),
        migrations.CreateModel(
            name='Checkpoint',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('round', models.PositiveIntegerField()),
                ('final', models.BooleanField(default=False)),
                ('key', models.CharField(max_length=200)),
                ('size_bytes', models.PositiveBigIntegerField()),
                ('digest', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
                ('sample', models.JSONField(blank=True, help_text='Text generated with the final weights of a language model', null=True)),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='checkpoints', to='runs.run')),
            ],
            options={
                'ordering': ('round', 'final'),
            },
        ),
        migrations.CreateModel(
            name='Replica',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('state', models.CharField(choices=[('pending', 'Pending'), ('provisioning', 'Provisioning'), ('syncing', 'Syncing'), ('computing', 'Computing'), ('uploading', 'Uploading'), ('waiting', 'Waiting'), ('applying', 'Applying'), ('suspect', 'Suspect'), ('lost', 'Lost'), ('restarting', 'Restarting'), ('draining', 'Draining'), ('evicted', 'Evicted'), ('done', 'Done'), ('failed', 'Failed')], default='pending', max_length=16)),
                ('state_reason', models.TextField(blank=True)),
                ('state_since', models.DateTimeField()),
                ('backend_state', models.CharField(blank=True, help_text='State of the job as the backend reports it', max_length=64)),
                ('pending_cause', models.CharField(blank=True, help_text='Why its job has not started yet', max_length=16)),
                ('pending_since', models.DateTimeField(blank=True, null=True)),
                ('waiting_since', models.DateTimeField(blank=True, help_text='Since when it has waited outside a queue, for any cause', null=True)),
                ('incarnation', models.CharField(blank=True, max_length=16)),
                ('beat_count', models.PositiveBigIntegerField(default=0)),
                ('beat_at', models.DateTimeField(blank=True, help_text='When the heartbeat last changed', null=True)),
                ('beat_interval_s', models.FloatField(default=0)),
                ('beat_state', models.CharField(blank=True, help_text='State reported by the heartbeat', max_length=16)),
                ('beat_message', models.TextField(blank=True)),
                ('beat_observed_s', models.FloatField(default=0, help_text='observed_s of ingest when the heartbeat last changed')),
                ('beat_judged', models.CharField(blank=True, help_text='The heartbeat that control evaluated last', max_length=40)),
                ('round', models.PositiveIntegerField(default=0)),
                ('step', models.PositiveBigIntegerField(default=0)),
                ('tokens', models.PositiveBigIntegerField(default=0)),
                ('loss', models.FloatField(blank=True, null=True)),
                ('tokens_per_s', models.FloatField(blank=True, null=True)),
                ('wait_fraction', models.FloatField(blank=True, null=True)),
                ('gpu_busy', models.FloatField(blank=True, help_text='0 to 1', null=True)),
                ('gpu_memory_bytes', models.FloatField(blank=True, null=True)),
                ('up_bytes_per_s', models.FloatField(blank=True, null=True)),
                ('down_bytes_per_s', models.FloatField(blank=True, null=True)),
                ('device', models.CharField(blank=True, max_length=80)),
                ('host', models.CharField(blank=True, max_length=120)),
                ('pid', models.PositiveIntegerField(default=0)),
                ('restarts', models.PositiveIntegerField(default=0)),
                ('relaunch_at', models.DateTimeField(blank=True, help_text='Restarting: when the next attempt can start', null=True)),
                ('drain_sent_at', models.DateTimeField(blank=True, help_text='When the drain command was sent to the current attempt', null=True)),
                ('cancel_at', models.DateTimeField(blank=True, help_text='Draining: when its job is ended if it still runs', null=True)),
                ('worked_since', models.DateTimeField(blank=True, help_text='When the current attempt was first seen training', null=True)),
                ('fell_at', models.DateTimeField(blank=True, help_text='When its job was lost or failed; null once it trains again', null=True)),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='replicas', to='runs.run')),
            ],
            options={
                'ordering': ('number',),
            },
        ),
        migrations.CreateModel(
            name='QuarantinedRecord',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('incarnation', models.CharField(blank=True, max_length=16)),
                ('key', models.CharField(max_length=300)),
                ('size_bytes', models.PositiveBigIntegerField(blank=True, null=True)),
                ('reason', models.TextField(blank=True)),
                ('failures', models.PositiveIntegerField(default=0)),
                ('first_at', models.DateTimeField()),
                ('last_at', models.DateTimeField()),
                ('quarantined_at', models.DateTimeField(blank=True, null=True)),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='quarantined', to='runs.run')),
                ('replica', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='quarantined', to='runs.replica')),
            ],
            options={
                'ordering': ('-last_at', '-id'),
            },
        ),
        migrations.CreateModel(
            name='MetricBlock',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('series', models.CharField(max_length=32)),
                ('level', models.PositiveSmallIntegerField(default=0)),
                ('index', models.PositiveIntegerField()),
                ('count', models.PositiveIntegerField(default=0)),
                ('data', models.BinaryField()),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='metric_blocks', to='runs.run')),
                ('replica', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='metric_blocks', to='runs.replica')),
            ],
        ),
        migrations.CreateModel(
            name='LogLine',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('incarnation', models.CharField(max_length=16)),
                ('at', models.DateTimeField()),
                ('level', models.CharField(max_length=8)),
                ('message', models.TextField()),
                ('replica', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='log_lines', to='runs.replica')),
            ],
            options={
                'ordering': ('id',),
            },
        ),
        migrations.CreateModel(
            name='Event',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField()),
                ('level', models.CharField(choices=[('info', 'Info'), ('warning', 'Warning'), ('error', 'Error')], default='info', max_length=8)),
                ('kind', models.CharField(max_length=32)),
                ('from_state', models.CharField(blank=True, max_length=16)),
                ('to_state', models.CharField(blank=True, max_length=16)),
                ('message', models.TextField(blank=True)),
                ('actor', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL)),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='events', to='runs.run')),
                ('replica', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='events', to='runs.replica')),
            ],
            options={
                'ordering': ('-id',),
            },
        ),
        migrations.CreateModel(
            name='Alert',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(max_length=24)),
                ('subject', models.CharField(blank=True, help_text='Distinguishes alerts of one kind', max_length=40)),
                ('level', models.CharField(max_length=8)),
                ('message', models.TextField()),
                ('first_at', models.DateTimeField()),
                ('opened_at', models.DateTimeField()),
                ('closed_at', models.DateTimeField(blank=True, help_text='Null: open', null=True)),
                ('times', models.PositiveIntegerField(default=1)),
                ('told_at', models.DateTimeField(blank=True, help_text='When webhooks were last notified', null=True)),
                ('acknowledged_at', models.DateTimeField(blank=True, null=True)),
                ('acknowledged_by', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='alerts', to='runs.run')),
                ('replica', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='alerts', to='runs.replica')),
            ],
            options={
                'ordering': ('-opened_at', '-id'),
            },
        ),
        migrations.CreateModel(
            name='ReplicaAttempt',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('launch_key', models.CharField(max_length=80, unique=True)),
                ('handle', models.JSONField(blank=True, null=True)),
                ('cause', models.CharField(blank=True, max_length=16)),
                ('exit_code', models.IntegerField(blank=True, null=True)),
                ('message', models.TextField(blank=True)),
                ('created_at', models.DateTimeField()),
                ('launched_at', models.DateTimeField(blank=True, help_text='When the backend had created everything that the job needs', null=True)),
                ('started_at', models.DateTimeField(blank=True, help_text='When the job started, as the backend reports it', null=True)),
                ('deadline_at', models.DateTimeField(blank=True, help_text='When the backend will end it', null=True)),
                ('expires_at', models.DateTimeField(blank=True, help_text='When its credentials expire', null=True)),
                ('ended_at', models.DateTimeField(blank=True, null=True)),
                ('price_usd_h', models.FloatField(blank=True, null=True)),
                ('billed_s', models.FloatField(blank=True, help_text='Billed seconds as the backend reports them, once it has ended', null=True)),
                ('cost_usd', models.FloatField(blank=True, help_text='Null: the price is unknown', null=True)),
                ('earlier_cost_usd', models.FloatField(default=0.0, help_text='Cost of the job before its queue suspended it')),
                ('replica', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='attempts', to='runs.replica')),
            ],
            options={
                'ordering': ('number',),
            },
        ),
        migrations.CreateModel(
            name='ReplicaPool',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('backend', models.CharField(max_length=32)),
                ('hardware', models.CharField(default='cpu', max_length=64)),
                ('count', models.PositiveIntegerField()),
                ('region', models.CharField(blank=True, max_length=64)),
                ('spot', models.BooleanField(default=False)),
                ('image', models.CharField(blank=True, max_length=300)),
                ('timeout_s', models.PositiveIntegerField(default=0, help_text="Time limit of one attempt; 0 means the backend's longest")),
                ('options', models.JSONField(blank=True, default=dict, help_text='Backend-specific options')),
                ('price_usd_h', models.FloatField(blank=True, help_text='Latest known price of one replica; null: unknown', null=True)),
                ('price_given', models.BooleanField(default=False, help_text='A user entered the price; it overrides the catalogue')),
                ('max_price_usd_h', models.FloatField(blank=True, help_text='A replica that costs more is not launched; null: no limit', null=True)),
                ('held', models.TextField(blank=True, help_text='Why the price prevents launches; empty: it does not')),
                ('failures', models.PositiveIntegerField(default=0, help_text='Consecutive failures')),
                ('closed_until', models.DateTimeField(blank=True, null=True)),
                ('needs_person', models.BooleanField(default=False)),
                ('trouble', models.TextField(blank=True, help_text='Latest error of the backend')),
                ('added_by', models.ForeignKey(blank=True, help_text="The user whose permissions apply; null: the run's owner", null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('credential', models.ForeignKey(blank=True, help_text="Null: the server's own environment", null=True, on_delete=django.db.models.deletion.PROTECT, related_name='pools', to='runs.credential')),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='pools', to='runs.run')),
            ],
        ),
        migrations.AddField(
            model_name='replica',
            name='pool',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='replicas', to='runs.replicapool'),
        ),
        migrations.CreateModel(
            name='Round',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('fragment', models.PositiveIntegerField(default=0)),
                ('state', models.CharField(choices=[('collecting', 'Collecting'), ('planned', 'Planned'), ('committed', 'Committed'), ('void', 'Void'), ('timed_out', 'timed out')], default='collecting', max_length=16)),
                ('reason', models.TextField(blank=True)),
                ('mode', models.CharField(blank=True, max_length=16)),
                ('contributors', models.PositiveIntegerField(default=0)),
                ('tokens_total', models.PositiveBigIntegerField(default=0)),
                ('loss', models.FloatField(blank=True, null=True)),
                ('eval_loss', models.FloatField(blank=True, null=True)),
                ('weights_digest', models.CharField(blank=True, max_length=64)),
                ('digest_mismatch', models.BooleanField(default=False, help_text='Replicas disagree about the weights after this round')),
                ('planned_at', models.DateTimeField(blank=True, null=True)),
                ('committed_at', models.DateTimeField(blank=True, null=True)),
                ('outcomes', models.BinaryField(default=b'', help_text='One byte per replica')),
                ('timings', models.BinaryField(default=b'', help_text='Start and phase durations, per replica')),
                ('lateness', models.BinaryField(default=b'', help_text='Seconds, per late replica')),
                ('cosines', models.BinaryField(default=b'', help_text='Cosine to the mean, per replica')),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='rounds', to='runs.run')),
            ],
            options={
                'ordering': ('number',),
            },
        ),
        migrations.CreateModel(
            name='Contribution',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('incarnation', models.CharField(max_length=16)),
                ('state', models.CharField(choices=[('uploaded', 'Uploaded'), ('included', 'Included'), ('late', 'Late'), ('refused', 'Refused')], default='uploaded', max_length=16)),
                ('reason', models.TextField(blank=True)),
                ('base_round', models.PositiveIntegerField(default=0)),
                ('tokens', models.PositiveBigIntegerField(default=0)),
                ('steps', models.PositiveIntegerField(default=0)),
                ('weight', models.FloatField(default=0)),
                ('loss', models.FloatField(blank=True, null=True)),
                ('norm', models.FloatField(blank=True, null=True)),
                ('update_norm', models.FloatField(blank=True, null=True)),
                ('cosine', models.FloatField(blank=True, help_text='To the mean of the round', null=True)),
                ('size_bytes', models.PositiveBigIntegerField(default=0)),
                ('bytes_up', models.PositiveBigIntegerField(default=0)),
                ('bytes_down', models.PositiveBigIntegerField(default=0)),
                ('requests', models.PositiveIntegerField(default=0)),
                ('phases', models.JSONField(default=dict, help_text='Phase name -> seconds')),
                ('started_at', models.DateTimeField(blank=True, null=True)),
                ('uploaded_at', models.DateTimeField(blank=True, null=True)),
                ('committed_at', models.DateTimeField(blank=True, null=True)),
                ('weights_digest', models.CharField(blank=True, max_length=64)),
                ('replica', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='contributions', to='runs.replica')),
                ('round', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='contributions', to='runs.round')),
            ],
        ),
        migrations.CreateModel(
            name='SavedView',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=80)),
                ('query', models.CharField(blank=True, max_length=500)),
                ('sort', models.CharField(help_text='As in the URL, e.g. -created', max_length=32)),
                ('columns', models.JSONField(blank=True, default=list, help_text='Empty: the default columns')),
                ('differing', models.BooleanField(default=False, help_text='Whether the settings that differ between runs are columns')),
                ('shared', models.BooleanField(default=False, help_text='Whether every user with a role sees it')),
                ('changed_at', models.DateTimeField()),
                ('owner', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='saved_views', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('name', 'id'),
            },
        ),
        migrations.CreateModel(
            name='TelemetryCursor',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('incarnation', models.CharField(max_length=16)),
                ('next_n', models.PositiveIntegerField(default=1)),
                ('ended', models.BooleanField(default=False)),
                ('moved_at', models.DateTimeField(help_text='When it last advanced')),
                ('refused', models.PositiveIntegerField(default=0, help_text='Unreadable segments')),
                ('nonfinite', models.BooleanField(default=False, help_text='A loss was NaN or infinite')),
                ('replica', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='cursors', to='runs.replica')),
            ],
        ),
        migrations.CreateModel(
            name='Webhook',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=80, unique=True)),
                ('url', models.URLField(max_length=500)),
                ('kinds', models.JSONField(default=list)),
                ('enabled', models.BooleanField(default=True)),
                ('sealed', models.TextField(editable=False)),
                ('created_at', models.DateTimeField(editable=False)),
                ('created_by', models.ForeignKey(editable=False, null=True, on_delete=django.db.models.deletion.SET_NULL, to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('name',),
            },
        ),
        migrations.CreateModel(
            name='WebhookDelivery',
            fields=[
                ('id', models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ('kind', models.CharField(max_length=24)),
                ('body', models.TextField()),
                ('once', models.CharField(blank=True, help_text='Deduplication key: a webhook gets one message per key', max_length=80, null=True)),
                ('state', models.CharField(choices=[('waiting', 'Waiting'), ('delivered', 'Delivered'), ('failed', 'Failed')], default='waiting', max_length=16)),
                ('attempts', models.PositiveIntegerField(default=0)),
                ('created_at', models.DateTimeField()),
                ('next_at', models.DateTimeField(help_text='Waiting: time of the next attempt')),
                ('tried_at', models.DateTimeField(blank=True, null=True)),
                ('status', models.PositiveIntegerField(blank=True, help_text='HTTP status, if any', null=True)),
                ('message', models.TextField(blank=True, help_text='Result of the latest attempt')),
                ('run', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='runs.run')),
                ('webhook', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='deliveries', to='runs.webhook')),
            ],
            options={
                'verbose_name_plural': 'webhook deliveries',
                'ordering': ('-created_at', '-id'),
            },
        ),
        migrations.CreateModel(
            name='Journal',
            fields=[
                ('run', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='journal', serialize=False, to='runs.run')),
                ('next_n', models.PositiveIntegerField(default=1)),
                ('event_id', models.PositiveBigIntegerField(default=0)),
                ('seen', models.JSONField(default=dict)),
                ('due', models.BooleanField(default=False)),
                ('marks', models.PositiveBigIntegerField(default=0, help_text='Times it was marked due; a mark during a write keeps it due')),
                ('failures', models.PositiveIntegerField(default=0, help_text='Consecutive failed writes')),
                ('retry_at', models.DateTimeField(blank=True, help_text='After a failed write: when to retry', null=True)),
            ],
            options={
                'indexes': [models.Index(condition=models.Q(('due', True)), fields=['run'], name='journal_due')],
            },
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(fields=['-created_at', '-id'], name='run_newest'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(condition=models.Q(('state__in', ['degraded', 'pausing', 'provisioning', 'queued', 'running', 'stalled', 'stopping'])), fields=['state'], name='run_active'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(condition=models.Q(('archived_at__isnull', True)), fields=['name', '-id'], name='run_by_name'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(condition=models.Q(('archived_at__isnull', True)), fields=['eval_loss', '-id'], name='run_by_eval_loss'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(condition=models.Q(('archived_at__isnull', True)), fields=['train_loss', '-id'], name='run_by_train_loss'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(condition=models.Q(('archived_at__isnull', True)), fields=['-tokens', '-id'], name='run_by_tokens'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(condition=models.Q(('archived_at__isnull', True)), fields=['-cost_usd', '-id'], name='run_by_cost_usd'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(condition=models.Q(('archived_at__isnull', True)), fields=['-committed_rounds', '-id'], name='run_by_committed_rounds'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(condition=models.Q(('archived_at__isnull', True)), fields=['-started_at', '-id'], name='run_by_started_at'),
        ),
        migrations.AddConstraint(
            model_name='run',
            constraint=models.CheckConstraint(condition=models.Q(('state__in', ['draft', 'queued', 'provisioning', 'running', 'degraded', 'stalled', 'pausing', 'paused', 'stopping', 'succeeded', 'failed', 'cancelled'])), name='run_state_is_known'),
        ),
        migrations.AddConstraint(
            model_name='checkpoint',
            constraint=models.UniqueConstraint(fields=('run', 'round', 'final'), name='one_checkpoint_per_round'),
        ),
        migrations.AddIndex(
            model_name='quarantinedrecord',
            index=models.Index(condition=models.Q(('quarantined_at__isnull', False)), fields=['run'], name='record_quarantined'),
        ),
        migrations.AddConstraint(
            model_name='quarantinedrecord',
            constraint=models.UniqueConstraint(fields=('run', 'key'), name='quarantined_record_is_unique'),
        ),
        migrations.AddConstraint(
            model_name='metricblock',
            constraint=models.UniqueConstraint(fields=('run', 'replica', 'series', 'level', 'index'), name='metric_block_of_replica_is_unique'),
        ),
        migrations.AddConstraint(
            model_name='metricblock',
            constraint=models.UniqueConstraint(condition=models.Q(('replica__isnull', True)), fields=('run', 'series', 'level', 'index'), name='metric_block_of_run_is_unique'),
        ),
        migrations.AddIndex(
            model_name='event',
            index=models.Index(fields=['run', '-id'], name='event_newest'),
        ),
        migrations.AddIndex(
            model_name='alert',
            index=models.Index(condition=models.Q(('acknowledged_at__isnull', True), ('closed_at__isnull', True)), fields=['run'], name='alert_waits'),
        ),
        migrations.AddConstraint(
            model_name='alert',
            constraint=models.UniqueConstraint(fields=('run', 'kind', 'subject'), name='alert_is_kept_once'),
        ),
        migrations.AddIndex(
            model_name='replicaattempt',
            index=models.Index(condition=models.Q(('ended_at__isnull', True)), fields=['replica'], name='attempt_open'),
        ),
        migrations.AddConstraint(
            model_name='replicaattempt',
            constraint=models.UniqueConstraint(fields=('replica', 'number'), name='attempt_number_is_unique'),
        ),
        migrations.AddConstraint(
            model_name='replica',
            constraint=models.UniqueConstraint(fields=('run', 'number'), name='replica_number_is_unique'),
        ),
        migrations.AddConstraint(
            model_name='replica',
            constraint=models.CheckConstraint(condition=models.Q(('state__in', ['pending', 'provisioning', 'syncing', 'computing', 'uploading', 'waiting', 'applying', 'suspect', 'lost', 'restarting', 'draining', 'evicted', 'done', 'failed'])), name='replica_state_is_known'),
        ),
        migrations.AddConstraint(
            model_name='round',
            constraint=models.UniqueConstraint(fields=('run', 'number'), name='round_number_is_unique'),
        ),
        migrations.AddConstraint(
            model_name='contribution',
            constraint=models.UniqueConstraint(fields=('round', 'replica'), name='one_contribution_per_replica_and_round'),
        ),
        migrations.AddConstraint(
            model_name='savedview',
            constraint=models.UniqueConstraint(models.F('owner'), django.db.models.functions.text.Lower('name'), name='saved_view_name_is_unique'),
        ),
        migrations.AddIndex(
            model_name='telemetrycursor',
            index=models.Index(condition=models.Q(('ended', False)), fields=['replica'], name='cursor_open'),
        ),
        migrations.AddConstraint(
            model_name='telemetrycursor',
            constraint=models.UniqueConstraint(fields=('replica', 'incarnation'), name='one_cursor_per_incarnation'),
        ),
        migrations.AddIndex(
            model_name='webhookdelivery',
            index=models.Index(condition=models.Q(('state', 'waiting')), fields=['next_at'], name='delivery_waiting'),
        ),
        migrations.AddIndex(
            model_name='webhookdelivery',
            index=models.Index(fields=['-created_at', '-id'], name='delivery_newest'),
        ),
        migrations.AddConstraint(
            model_name='webhookdelivery',
            constraint=models.CheckConstraint(condition=models.Q(('state__in', ['waiting', 'delivered', 'failed'])), name='delivery_state_is_known'),
        ),
        migrations.AddConstraint(
            model_name='webhookdelivery',
            constraint=models.UniqueConstraint(fields=('webhook', 'once'), name='delivery_is_made_once'),
        ),
        migrations.RunPython(tune_postgresql, migrations.RunPython.noop),
        migrations.RunPython(install_audit_triggers, migrations.RunPython.noop),
        migrations.RunPython(create_roles, migrations.RunPython.noop),
    ]
