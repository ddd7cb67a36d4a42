"""The ASGI application of the web process; it streams, so there is no WSGI one."""

import os

from django.core.asgi import get_asgi_application
from servestatic import ServeStaticASGI

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

_django = get_asgi_application()

from django.conf import settings  # noqa: E402  (settings load with the application)

#: Static files are answered before Django's middleware.
application = ServeStaticASGI(_django, root=str(settings.STATIC_ROOT), prefix=settings.STATIC_URL)
