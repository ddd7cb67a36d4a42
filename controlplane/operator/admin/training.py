"""Read-only pages for the tenants' datasets, training runs and schedules."""

from __future__ import annotations

from django.contrib import admin

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
    list_display = ("created_at", "tenant", "adapter", "status", "finished_at")
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
        "progress",
        "hyperparameters",
        "version",
        "created_by",
        "created_at",
        "started_at",
        "finished_at",
    )


@admin.register(Schedule)
class ScheduleAdmin(ReadOnlyAdmin):
    list_display = ("adapter", "tenant", "cron", "timezone", "is_paused", "next_run_at")
    list_filter = ("is_paused", TENANT)
    search_name = "adapter__name"
    search_help_text = "A tenant, or tenant/adapter"
    list_select_related = ("adapter", "tenant")
