"""The models that Django finds for this app: a request's row in the log keeps its label."""

from controlplane.requestlog.inference_request import InferenceRequest

__all__ = ["InferenceRequest"]
