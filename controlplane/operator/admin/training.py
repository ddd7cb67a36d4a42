"""Read-only pages for the tenants' datasets, training runs and schedules."""

from __future__ import annotations

import json

from django.contrib import admin
from django.utils.html import format_html

from controlplane.operator.admin.base import ReadOnlyAdmin
from controlplane.operator.admin.lists import TENANT
from controlplane.training.models import Dataset, Schedule, TrainingRun


@admin.register(Dataset)
class DatasetAdmin(ReadOnlyAdmin):
    list_display = ("name", "tenant", "num_rows", "num_bytes", "updated_at")
    list_filter = (TENANT,)
    search_name = "name"
    search_help_text = "A tenant, or tenant/dataset"
    list_select_related = ("tenant",)


@admin.register(TrainingRun)
class TrainingRunAdmin(ReadOnlyAdmin):
    list_display = ("id", "tenant", "adapter", "status", "created_at", "finished_at")
    list_filter = ("status", TENANT)
    search_name = "adapter__name"
    search_help_text = "A tenant, or tenant/adapter"
    list_select_related = ("tenant", "adapter")
    fields = (
        "tenant",
        "adapter",
        "dataset",
        "dataset_sha256",
        "status",
        "error",
        "last_progress",
        "hyperparameters",
        "version",
        "created_by",
        "created_at",
        "started_at",
        "finished_at",
    )

    @admin.display(description="Progress")
    def last_progress(self, run: TrainingRun) -> str:
        return format_html("<pre>{}</pre>", json.dumps(run.progress, indent=2))


@admin.register(Schedule)
class ScheduleAdmin(ReadOnlyAdmin):
    list_display = ("adapter", "tenant", "cron", "timezone", "is_paused", "next_run_at")
    list_filter = ("is_paused", TENANT)
    search_name = "adapter__name"
    search_help_text = "A tenant, or tenant/adapter"
    list_select_related = ("adapter", "tenant")
