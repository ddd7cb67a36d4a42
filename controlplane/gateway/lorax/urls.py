from django.urls import path

from controlplane.gateway import tokenizing
from controlplane.gateway.lorax import views

urlpatterns = [
    path("", views.root),
    path("generate", views.generate),
    path("generate_stream", views.generate_stream),
    path("info", views.info),
    path("health", views.health),
    path("embed", views.embed),
    path("classify", views.classify),
    path("classify_batch", views.classify),
    # vLLM's, which has them here; LoRAX's own /tokenize has another body.
    path("tokenize", tokenizing.tokenize),
    path("detokenize", tokenizing.detokenize),
]
#: The gateway's, whatever else is served beside it; of the root only POST is.
PATHS = frozenset(f"/{pattern.pattern}" for pattern in urlpatterns) - {"/"}
