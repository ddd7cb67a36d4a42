"""The base class of the project's middlewares."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponseBase


class Middleware:
    """A middleware for sync and async requests; subclasses override `context` and `finished`."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response
        self.is_async = iscoroutinefunction(get_response)
        if self.is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        if self.is_async:
            return self._acall(request)
        with self.context(request):
            response: HttpResponseBase = self.get_response(request)
        return self.finished(request, response)

    async def _acall(self, request: HttpRequest) -> HttpResponseBase:
        with self.context(request):
            response: HttpResponseBase = await self.get_response(request)
        return self.finished(request, response)

    def context(self, request: HttpRequest) -> contextlib.AbstractContextManager[None]:
        """Return the context in which `request` is answered."""
        return contextlib.nullcontext()

    def finished(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        """Return the response to send."""
        return response
