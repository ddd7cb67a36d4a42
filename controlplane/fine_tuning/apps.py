from django.apps import AppConfig


class FineTuningConfig(AppConfig):
    name = "controlplane.fine_tuning"

    def ready(self) -> None:
        from controlplane.fine_tuning.results import result_file_make
        from controlplane.training.execution import BEFORE_SUCCESS

        BEFORE_SUCCESS.append(result_file_make)
