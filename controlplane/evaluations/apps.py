from django.apps import AppConfig


class EvaluationsConfig(AppConfig):
    name = "controlplane.evaluations"

    def ready(self) -> None:
        from controlplane.adapters.promotion import awaits_gate
        from controlplane.evaluations import gate
        from controlplane.evaluations.batch_scores import GateJudge
        from controlplane.evaluations.rewards.grading import RunGrader
        from controlplane.training.runs.judging import judges
        from controlplane.training.runs.rewards.grading import graders

        awaits_gate.connect(gate.version_ready)
        judges.connect(GateJudge)
        graders.connect(RunGrader)
