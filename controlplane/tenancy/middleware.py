"""What the project's middlewares share."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponseBase


class Middleware:
    """Answers each request, sync or async; what surrounds the answer, and is done to it, is a
    subclass's to say."""

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
        """What surrounds the answer to `request`."""
        return contextlib.nullcontext()

    def finished(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        """The answer as it goes out."""
        return response
