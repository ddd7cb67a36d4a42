from django.apps import AppConfig


class QueueConfig(AppConfig):
    name = "controlplane.queue"
    label = "delivery"  # of its tables and migrations, which are older than the package's name

    def ready(self) -> None:
        from controlplane.infra import celery_metrics, metrics
        from controlplane.infra.liveness import watch_celery
        from controlplane.queue.readings import dead_letters, pool, task_queues

        watch_celery()
        celery_metrics.watch()
        metrics.READINGS |= {"pool": pool, "tasks": task_queues, "dead letters": dead_letters}
