from django.apps import AppConfig


class TrainingConfig(AppConfig):
    name = "controlplane.training"

    def ready(self) -> None:
        from controlplane.infra import metrics
        from controlplane.training.datasets import contents
        from controlplane.training.runs import picking, readings
        from controlplane.training.runs import services as run_services
        from controlplane.training.runs.kept import saved_states
        from controlplane.usage.limits import quotas

        quotas.USES["training_runs"].connect(run_services.runs_active)
        quotas.USES["training_device_seconds"].connect(picking.device_seconds_used)
        quotas.USES["storage_bytes"].connect(contents.num_bytes)
        quotas.USES["storage_bytes"].connect(saved_states.storage_used)
        metrics.READINGS["training"] = readings.training
