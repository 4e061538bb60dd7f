from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.views import LogoutView
from django.urls import path

from dashboard import api
from dashboard.live import views
from dashboard.views import (
    account,
    alerts,
    auth,
    bulk,
    charts,
    checkpoints,
    compare,
    fleet,
    health,
    lifecycle,
    planner,
    pools,
    replica,
    run,
    runs,
    saved_views,
    spend,
    submit,
    sweeps,
    tokens,
    users,
)

admin.site.site_header = "Archipelago administration"
admin.site.site_title = "Archipelago"
admin.site.index_title = "Runs, replicas and users"

urlpatterns = [
    path("", runs.runs, name="runs"),
    path("runs.json", runs.runs_json, name="runs-json"),
    path("stream", views.runs_stream, name="runs-stream"),
    path("runs/facets", runs.runs_facets, name="runs-facets"),
    path("runs/totals", runs.runs_totals, name="runs-totals"),
    path("runs/bulk", bulk.bulk, name="runs-bulk"),
    path("views", saved_views.save, name="view-save"),
    path("views/<int:view_id>", saved_views.view, name="view"),
    path("runs/new", submit.new, name="run-new"),
    path("runs/estimate.json", submit.estimate, name="run-estimate"),
    path("runs/test.json", submit.test, name="run-test"),
    path("runs/<uuid:run_id>/", run.detail, name="run"),
    path("runs/<uuid:run_id>/stop", lifecycle.stop, name="run-stop"),
    path("runs/<uuid:run_id>/pause", lifecycle.pause, name="run-pause"),
    path("runs/<uuid:run_id>/resume", lifecycle.resume, name="run-resume"),
    path("runs/<uuid:run_id>/save", lifecycle.save, name="run-save"),
    path("runs/<uuid:run_id>/describe", lifecycle.describe, name="run-describe"),
    path("runs/<uuid:run_id>/archive", lifecycle.archive, name="run-archive"),
    path("runs/<uuid:run_id>/delete", lifecycle.delete, name="run-delete"),
    path("runs/<uuid:run_id>/snapshot.json", run.snapshot, name="run-snapshot"),
    path("runs/<uuid:run_id>/series.json", charts.series, name="run-series"),
    path("runs/<uuid:run_id>/rounds/<int:number>.json", charts.one_round, name="run-round"),
    path("runs/<uuid:run_id>/heatmap.json", charts.heatmap, name="run-heatmap"),
    path("runs/<uuid:run_id>/timeline.json", charts.bars, name="run-timeline"),
    path("runs/<uuid:run_id>/logs.json", run.logs, name="run-logs"),
    path("runs/<uuid:run_id>/stream", views.run_stream, name="run-stream"),
    path("runs/<uuid:run_id>/pools/add", pools.add, name="pool-add"),
    path("runs/<uuid:run_id>/pools/<int:pool_id>/scale", pools.scale, name="pool-scale"),
    path("runs/<uuid:run_id>/replicas/<int:number>/", replica.detail, name="replica"),
    path("runs/<uuid:run_id>/replicas/<int:number>/log.json", replica.log, name="replica-log"),
    path("runs/<uuid:run_id>/replicas/<int:number>/stop", replica.stop, name="replica-stop"),
    path(
        "runs/<uuid:run_id>/replicas/<int:number>/restart", replica.restart, name="replica-restart"
    ),
    path("runs/<uuid:run_id>/checkpoints", checkpoints.checkpoints, name="run-checkpoints"),
    path(
        "runs/<uuid:run_id>/checkpoints/<int:checkpoint_id>/weights",
        checkpoints.download,
        name="checkpoint-download",
    ),
    path(
        "runs/<uuid:run_id>/checkpoints/<int:checkpoint_id>/export",
        checkpoints.export,
        name="checkpoint-export",
    ),
    path("runs/<uuid:run_id>/alerts", alerts.alerts, name="run-alerts"),
    path(
        "runs/<uuid:run_id>/alerts/<int:alert_id>/acknowledge",
        alerts.acknowledge,
        name="alert-acknowledge",
    ),
    path("sweeps", sweeps.sweeps, name="sweeps"),
    path("sweeps/<uuid:sweep_id>", sweeps.sweep, name="sweep"),
    path("sweeps/<uuid:sweep_id>/stop", sweeps.stop, name="sweep-stop"),
    path("compare", compare.compare, name="compare"),
    path("compare.json", compare.compare_json, name="compare-json"),
    path("compare.csv", compare.compare_csv, name="compare-csv"),
    path("fleet", fleet.fleet, name="fleet"),
    path("spend", spend.spend, name="spend"),
    path("planner", planner.planner, name="planner"),
    path("planner.json", planner.planner_json, name="planner-json"),
    path("login", auth.LoginView.as_view(), name="login"),
    path("logout", LogoutView.as_view(), name="logout"),
    path("setup", auth.setup, name="setup"),
    path("admin/login/", auth.admin_login, name="admin-login"),
    path("account/password", account.password, name="password"),
    path(
        "account/choose/<uidb64>/<token>",
        account.ChoosePasswordView.as_view(),
        name="choose-password",
    ),
    path("users/", users.users, name="users"),
    path("users/<int:user_id>/role", users.role, name="user-role"),
    path("users/<int:user_id>/active", users.active, name="user-active"),
    path("users/<int:user_id>/reset", users.reset, name="user-reset"),
    path("account/tokens", tokens.tokens, name="tokens"),
    path("account/tokens/<int:token_id>/revoke", tokens.revoke, name="token-revoke"),
    path("api/", api.urlpatterns),
    path("healthz", health.healthz, name="healthz"),
    path("readyz", health.readyz, name="readyz"),
    path("metrics", health.metrics, name="metrics"),
    path("admin/", admin.site.urls),
]

handler500 = "dashboard.views.errors.internal_error"
