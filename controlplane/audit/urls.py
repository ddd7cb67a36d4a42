from django.urls import path

from controlplane.audit import api

urlpatterns = [
    path("audit-events", api.AuditEventsView.as_view()),
    path("audit-events/<uuid:event_id>", api.AuditEventView.as_view()),
]
