from django.apps import AppConfig


class WebhooksConfig(AppConfig):
    name = "controlplane.webhooks"

    def ready(self) -> None:
        from controlplane.events.outbox import services as outbox
        from controlplane.infra import metrics
        from controlplane.webhooks import readings, tasks

        outbox.event_stored.connect(tasks.wake)
        metrics.READINGS["webhooks"] = readings.webhooks
