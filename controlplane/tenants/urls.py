from django.urls import path

from controlplane.tenants import api, people_api

urlpatterns = [
    path("tenant", people_api.TenantView.as_view()),
    path("members", people_api.MembersView.as_view()),
    path("members/<uuid:member_id>", people_api.MemberView.as_view()),
    path("invites", people_api.InvitesView.as_view()),
    path("invites/<uuid:invite_id>", people_api.InviteView.as_view()),
    path("invites/<uuid:invite_id>/revoke", people_api.InviteRevokeView.as_view()),
    path("service-accounts", people_api.ServiceAccountsView.as_view()),
    path("service-accounts/<uuid:account_id>", people_api.ServiceAccountView.as_view()),
    path("keys", api.ApiKeysView.as_view()),
    path("keys/<str:public_id>", api.ApiKeyView.as_view()),
    path("keys/<str:public_id>/rotate", api.ApiKeyRotateView.as_view()),
    path("keys/<str:public_id>/revoke", api.ApiKeyRevokeView.as_view()),
]
