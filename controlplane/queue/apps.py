from django.apps import AppConfig


class QueueConfig(AppConfig):
    name = "controlplane.queue"
    label = "delivery"  # of its tables and migrations, which are older than the package's name

    def ready(self) -> None:
        from controlplane.infra.liveness import watch_celery

        watch_celery()
