"""The pages of the console, all under /console/."""

from django.urls import path, re_path

from controlplane.console.views import (
    accounts,
    adapters,
    audit,
    invites,
    keys,
    limits,
    members,
    overview,
    requests,
    security,
    session,
    settings,
    training,
    uploads,
    usage,
)

app_name = "console"

_ADAPTER = "adapters/<str:name>"
_ACCOUNT = "service-accounts/<uuid:account_id>"
_VERSION = "adapters/<str:name>/versions/<int:number>"

urlpatterns = [
    path("", overview.overview, name="overview"),
    path("security", security.security, name="security"),
    path("security/email", security.verify_email, name="verify_email"),
    path("tenant", session.switch_tenant, name="switch_tenant"),
    path("invites/<str:token>", invites.invite, name="invite"),
    path("keys", keys.keys, name="keys"),
    path("keys/new", keys.create_key, name="create_key"),
    path("keys/<str:public_id>/edit", keys.edit_key, name="edit_key"),
    path("keys/<str:public_id>/rotate", keys.rotate_key, name="rotate_key"),
    path("keys/<str:public_id>/revoke", keys.revoke_key, name="revoke_key"),
    path("members", members.members, name="members"),
    path("members/<uuid:member_id>/role", members.set_role, name="set_role"),
    path("members/<uuid:member_id>/remove", members.remove, name="remove_member"),
    path("members/invites", members.create_invite, name="create_invite"),
    path("members/invites/<uuid:invite_id>/revoke", members.revoke_invite, name="revoke_invite"),
    path("service-accounts", accounts.accounts, name="accounts"),
    path("service-accounts/new", accounts.create_account, name="create_account"),
    path(_ACCOUNT, accounts.account, name="account"),
    path(f"{_ACCOUNT}/delete", accounts.delete_account, name="delete_account"),
    path("limits", limits.limits, name="limits"),
    path("limits/now", limits.limits_now, name="limits_now"),
    path("limits/set", limits.set_limit, name="set_limit"),
    path("limits/<uuid:limit_id>/remove", limits.remove_limit, name="remove_limit"),
    path("budgets/set", limits.set_budget, name="set_budget"),
    path("budgets/<uuid:budget_id>/remove", limits.remove_budget, name="remove_budget"),
    path("usage", usage.usage, name="usage"),
    path("requests", requests.requests, name="requests"),
    path("requests/newest", requests.newest, name="requests_newest"),
    path("requests/<str:request_id>", requests.request, name="request"),
    path("audit", audit.audit, name="audit"),
    path("audit/verify", audit.verify_trail, name="verify_trail"),
    path("settings", settings.settings, name="settings"),
    path("settings/request-log", settings.set_log_policy, name="set_log_policy"),
    path("upload", uploads.upload, name="upload"),
    path("upload/start", uploads.start_upload, name="start_upload"),
    path("adapters", adapters.adapters, name="adapters"),
    path(_ADAPTER, adapters.adapter, name="adapter"),
    path(_VERSION, adapters.version, name="version"),
    path(f"{_VERSION}/status", adapters.version_status, name="version_status"),
    path(f"{_VERSION}/complete", uploads.complete_upload, name="complete_upload"),
    path(f"{_ADAPTER}/schedule", training.schedule, name="schedule"),
    path(f"{_ADAPTER}/schedule/delete", training.delete_schedule, name="delete_schedule"),
    path("training", training.training, name="training"),
    path("training/datasets", training.upload_dataset, name="upload_dataset"),
    path("training/runs", training.start_run, name="start_run"),
    path("training/runs/<uuid:run_id>", training.run, name="run"),
    path("training/runs/<uuid:run_id>/status", training.run_status, name="run_status"),
    path("training/runs/<uuid:run_id>/cancel", training.cancel_run, name="cancel_run"),
    re_path(r"^(?P<rest>.*)$", overview.not_found),
]
