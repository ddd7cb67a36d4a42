from django.apps import AppConfig


class QueueConfig(AppConfig):
    name = "controlplane.queue"
    label = "delivery"  # its tables and migrations are older than the package's name

    def ready(self) -> None:
        from controlplane.adapters import promotion
        from controlplane.aliases import ramps
        from controlplane.infra import celery_metrics, metrics
        from controlplane.infra.health.liveness import watch_celery
        from controlplane.queue.placement.prefix_warmth import kept_prefixes
        from controlplane.queue.placement.residency import on_ramp_step, on_switch
        from controlplane.queue.placement.warmth import kept_warm
        from controlplane.queue.readings import dead_letters, pool, task_queues

        promotion.became_live.connect(on_switch)
        ramps.step_taken.connect(on_ramp_step)
        watch_celery()
        celery_metrics.watch()
        metrics.READINGS |= {"pool": pool, "tasks": task_queues, "dead letters": dead_letters}
        metrics.READINGS |= {"kept warm": kept_warm, "kept prefixes": kept_prefixes}
