"""The ASGI application of the web process; it streams, so there is no WSGI one.

/static/   files, before anything of Django's
/v1/       the gateway, without middleware, and LoRAX's and Tinker's addresses; files that come are
           streamed past Django
the rest   Django as usual
"""

import asyncio
import codecs
import contextlib
import os
from typing import Any

import django
from django.utils.http import parse_header_parameters
from servestatic import ServeStaticASGI

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

django.setup(set_prefix=False)

# After Django is set up: these load models and settings.
from django.conf import settings  # noqa: E402

from controlplane.errors import ApiError, UnsupportedMediaType  # noqa: E402
from controlplane.gateway import cross_origin, last_uses  # noqa: E402
from controlplane.gateway.asgi import MAX_BODY_BYTES, GatewayHandler  # noqa: E402
from controlplane.gateway.body_limit import BodyLimit, Receive, Send, send_error  # noqa: E402
from controlplane.gateway.door import TINKER, is_known  # noqa: E402
from controlplane.gateway.files import receiver  # noqa: E402
from controlplane.gateway.gzip_answers import GzipHandler  # noqa: E402
from controlplane.gateway.lorax.urls import PATHS as LORAX_PATHS  # noqa: E402
from controlplane.infra import metrics  # noqa: E402
from controlplane.queue.dispatcher import close_dispatcher, get_dispatcher  # noqa: E402
from controlplane.training.datasets.services import MAX_DIRECT_BYTES  # noqa: E402

#: Largest body: a dataset and the form that contains it.
MAX_SITE_BODY_BYTES = MAX_DIRECT_BYTES + 1024**2
#: Time for writing the keys' last uses when the server ends.
_LAST_NOTES_S = 2.0

_files = receiver.FileReceiver()
_gateway = BodyLimit(GatewayHandler(), max_bytes=MAX_BODY_BYTES, is_known=is_known)
_static = ServeStaticASGI(GzipHandler(), root=str(settings.STATIC_ROOT), prefix=settings.STATIC_URL)
_site = BodyLimit(_static, max_bytes=MAX_SITE_BODY_BYTES, is_known=is_known)


async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
    elif scope["type"] == "http":
        await _answer(_readable(scope), receive, metrics.watched(scope, send))


async def _answer(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    headers = dict(scope["headers"])
    is_files = receiver.is_ours(scope)
    is_gateways = is_files or _is_gateways(scope)
    if is_gateways and b"origin" in headers:
        if cross_origin.is_preflight(scope, headers):
            await cross_origin.answer_preflight(headers, send)
            return
        asked = cross_origin.CrossOrigin(headers)
        scope = {**scope, cross_origin.SCOPE_KEY: asked}
        send = asked.telling(send)
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        error = UnsupportedMediaType(
            "The body is compressed. Send it uncompressed, without Content-Encoding."
        )
        await send_error(send, error, (b"accept-encoding", b"identity"), (b"connection", b"close"))
    elif is_files:
        await _files(scope, receive, send)
    elif is_gateways:
        await _gateway(scope, receive, send)
    else:
        await _site(scope, receive, send)


def _readable(scope: dict[str, Any]) -> dict[str, Any]:
    """Remove a Content-Type that Django cannot parse, so that the request does not fail."""
    for name, value in scope["headers"]:
        if name == b"content-type" and b";" in value:
            try:
                _, found = parse_header_parameters(value.decode("latin-1"))
                codecs.lookup(found.get("charset", "utf-8"))
            except LookupError:
                continue  # Django ignores it
            except ValueError:
                headers = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
                return {**scope, "headers": headers}
    return scope


def _is_gateways(scope: dict[str, Any]) -> bool:
    path: str = scope["path"]
    if path == "/":
        return bool(scope["method"] == "POST")  # lorax-client's
    return path.startswith(("/v1/", TINKER)) or path in LORAX_PATHS


async def _lifespan(receive: Receive, send: Send) -> None:
    """Start the dispatcher with the server, and stop it at the end."""
    while True:
        event = await receive()
        if event["type"] == "lifespan.startup":
            try:
                await get_dispatcher()
            except ApiError:
                pass  # without Redis the console still works, and the next request tries again
            metrics.serve("database", "redis", "object store")
            await send({"type": "lifespan.startup.complete"})
        else:
            await close_dispatcher()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_NOTES_S):
                    await last_uses.write_all()
            await send({"type": "lifespan.shutdown.complete"})
            return
