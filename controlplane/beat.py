"""The tasks that Celery's beat starts, and their intervals."""

from __future__ import annotations

from typing import Any

_HOUR_S = 3600.0


def beat_schedule(
    *, schedule_tick_s: float, files_sweep_s: float, warmth_turn_s: float
) -> dict[str, dict[str, Any]]:
    """Return Celery's setting: name -> task and seconds between its starts."""
    every = {
        "fire due schedules": ("training.tasks.schedules_fire", schedule_tick_s),
        "remove replaced datasets": ("training.tasks.datasets_sweep", 900.0),
        "take up lost uploads": ("adapters.tasks.adapter_versions_sweep", 300.0),
        "keep adapters warm": ("queue.tasks.warmth_keep", warmth_turn_s),
        "watch canaries": ("aliases.tasks.canaries_watch", 5.0),
        "deliver events": ("webhooks.tasks.webhooks_deliver", 10.0),
        "forget old events": ("webhooks.tasks.events_forget", _HOUR_S),
        "check budgets": ("usage.limits.tasks.budgets_check", 60.0),
        "forget the prompts of dead letters": (
            "queue.tasks.dead_letter_prompts_forget",
            _HOUR_S,
        ),
        "sweep evaluations": ("evaluations.tasks.evaluations_sweep", 20.0),
        "sweep inspections": ("evaluations.inspections.tasks.inspections_sweep", 20.0),
        "tell what changed last night": ("evaluations.morning.tasks.mornings_tell", 60.0),
        "forget old requests": ("requestlog.tasks.requests_forget", _HOUR_S),
        "forget old usage": ("usage.tasks.usage_forget", _HOUR_S),
        "delete tenants": ("deletion.tasks.tenants_delete", 60.0),
        "remove old files and uploads": ("files.tasks.files_sweep", files_sweep_s),
        "forget sessions that are over": ("console.signin.tasks.sessions_forget", 24 * _HOUR_S),
        "forget idempotency keys": ("tenants.tasks.idempotency_records_expire", _HOUR_S),
    }
    return {
        name: {"task": f"controlplane.{task}", "schedule": seconds}
        for name, (task, seconds) in every.items()
    }
