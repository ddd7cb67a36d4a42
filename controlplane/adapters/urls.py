from django.urls import path

from controlplane.adapters import api

urlpatterns = [
    path("base-models", api.BaseModelsView.as_view()),
    path("adapters", api.AdaptersView.as_view()),
    path("adapters/<str:name>", api.AdapterView.as_view()),
    path("adapters/<str:name>/versions", api.VersionsView.as_view()),
    path("adapters/<str:name>/versions/<int:number>", api.VersionView.as_view()),
    path("adapters/<str:name>/versions/<int:number>/complete", api.VersionCompleteView.as_view()),
]
