"""The ASGI application of the web process; it streams, so there is no WSGI one.

/static/   files, before anything of Django's
/v1/       the gateway, without middleware
the rest   Django as usual
"""

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from django.core.asgi import get_asgi_application
from servestatic import ServeStaticASGI

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

_django = get_asgi_application()

# After Django is set up: these load models and settings.
from django.conf import settings  # noqa: E402

from controlplane import jobs  # noqa: E402
from controlplane.errors import ApiError  # noqa: E402
from controlplane.inference.asgi import GatewayHandler  # noqa: E402

Event = Mapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

_gateway = GatewayHandler()
_site = ServeStaticASGI(_django, root=str(settings.STATIC_ROOT), prefix=settings.STATIC_URL)


async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
    elif scope["type"] == "http" and scope["path"].startswith("/v1/"):
        await _gateway(scope, receive, send)
    else:
        await _site(scope, receive, send)


async def _lifespan(receive: Receive, send: Send) -> None:
    """Start the dispatcher with the server and stop it in the end."""
    while True:
        event = await receive()
        if event["type"] == "lifespan.startup":
            try:
                await jobs.dispatcher()
            except ApiError:
                pass  # without Redis the console still works, and the next request tries again
            await send({"type": "lifespan.startup.complete"})
        else:
            await jobs.close_dispatcher()
            await send({"type": "lifespan.shutdown.complete"})
            return
