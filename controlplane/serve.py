"""The web server: `python -m controlplane.serve [APPLICATION] [uvicorn's options]`.

This is the only way to start it. Whatever the options say, `controlplane.gateway.bounded_http`
bounds requests before other code reads them, and X-Forwarded-For is trusted only from the proxies
in FORWARDED_ALLOW_IPS.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

from uvicorn.main import main as start

from controlplane import settings

_APPLICATION = "controlplane.asgi:application"
#: Files that the process may open; each connection counts.
_MAX_FILES = 65_536


def arguments(argv: Sequence[str]) -> list[str]:
    """Return uvicorn's command line; our options come last, because the last value counts."""
    application, options = _APPLICATION, list(argv)
    if options and not options[0].startswith("-"):
        application = options.pop(0)
    proxies = f"--forwarded-allow-ips={settings.FORWARDED_ALLOW_IPS}"
    bounded = ["--http=controlplane.gateway.bounded_http:BoundedHttp", "--ws=none"]
    if settings.BASE_URL.startswith("https://"):
        bounded.append(f"--header=strict-transport-security:max-age={settings.HSTS_S}")
    return [application, proxies, *options, *bounded]


def main() -> None:
    if not (settings.SECRET_KEY and hasattr(settings, "API_KEY_PEPPER")):
        sys.exit("the web server needs LORIKEET_SECRET_KEY and LORIKEET_KEY_PEPPER")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    start(arguments(sys.argv[1:]))


if __name__ == "__main__":
    main()
