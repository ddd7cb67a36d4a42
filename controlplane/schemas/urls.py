"""/api/v1/schemas/…"""

from __future__ import annotations

from django.urls import path

from controlplane.schemas.api import LintView

urlpatterns = [path("schemas/lint", LintView.as_view())]
