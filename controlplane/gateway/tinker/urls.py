from django.urls import path

from controlplane.gateway import views as gateway_views
from controlplane.gateway.tinker import views

urlpatterns = [
    path("client/config", views.config),
    path("client/dynamic_config", views.dynamic_config),
    path("telemetry", views.telemetry),
    path("get_server_capabilities", views.capabilities),
    path("create_session", views.create_session),
    path("session_heartbeat", views.session_heartbeat),
    path("sessions/<str:session_id>/finish", views.session_finish),
    path("create_model", views.create_model),
    path("get_info", views.get_info),
    path("forward_backward", views.forward_backward),
    path("optim_step", views.optim_step),
    path("save_weights", views.save_weights),
    path("save_weights_for_sampler", views.save_weights_for_sampler),
    path("load_weights", views.load_weights),
    path("create_sampling_session", views.create_sampling_session),
    path("samplers/<str:sampler_id>", views.sampler),
    path("asample", views.asample),
    path("retrieve_future", views.retrieve_future),
    path("<path:path>", gateway_views.unknown),
]
