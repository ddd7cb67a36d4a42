"""Make Django's mail settings from one URL.

smtp://user:password@host:25       not encrypted, for a relay on the same host
smtp+tls://user:password@host:587  STARTTLS
smtps://user:password@host:465     TLS from the first byte
console:                           to standard output: anybody who reads the log can open the links
file:///var/mail                   one file for each mail; only the files' owner may read them
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

_FILES = "controlplane.infra.mail_files.EmailBackend"
_BACKEND = "django.core.mail.backends.{}.EmailBackend"
#: By URL scheme: the usual port, and the settings to switch on.
_SMTP: dict[str, tuple[int, dict[str, bool]]] = {
    "smtp": (25, {}),
    "smtp+tls": (587, {"EMAIL_USE_TLS": True}),
    "smtps": (465, {"EMAIL_USE_SSL": True}),
}


def email_settings(url: str) -> dict[str, Any]:
    """Return Django's settings. Raises ImproperlyConfigured for a URL of another form."""
    parts = urlsplit(url)
    if parts.scheme == "console":
        return {"EMAIL_BACKEND": _BACKEND.format("console")}
    if parts.scheme == "file" and parts.path.startswith("/"):
        return {"EMAIL_BACKEND": _FILES, "EMAIL_FILE_PATH": parts.path}
    if parts.scheme in _SMTP and parts.hostname:
        port, switches = _SMTP[parts.scheme]
        return {
            "EMAIL_BACKEND": _BACKEND.format("smtp"),
            "EMAIL_HOST": parts.hostname,
            "EMAIL_PORT": parts.port or port,
            "EMAIL_HOST_USER": unquote(parts.username or ""),
            "EMAIL_HOST_PASSWORD": unquote(parts.password or ""),
            **switches,
        }
    raise ImproperlyConfigured("EMAIL_URL is smtp://…, smtp+tls://…, smtps://…, console: or file:")
