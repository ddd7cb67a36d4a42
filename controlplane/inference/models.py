"""Where Django looks for this app's models: the log's row of a request keeps the app's label."""

from controlplane.requestlog.inference_request import InferenceRequest

__all__ = ["InferenceRequest"]
