from django.urls import path

from controlplane.limits import api

urlpatterns = [
    path("limits", api.LimitsView.as_view()),
    path("limits/<uuid:limit_id>", api.LimitView.as_view()),
    path("quota", api.QuotaView.as_view()),
    path("budgets", api.BudgetsView.as_view()),
    path("budgets/<uuid:budget_id>", api.BudgetView.as_view()),
]
