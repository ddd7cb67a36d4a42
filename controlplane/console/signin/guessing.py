"""How often a password may be tried: slow for someone who guesses, open for its owner.

A wrong password counts for the address that it comes from, for the account from that address, and
for the account from all of them. No stranger can use up the first two for somebody elsewhere. The
third holds against guessing from many addresses at once; that would shut the person out, too, but
for the browsers in which they have signed in before: those carry a cookie, and have a count of
their own instead of all three. While the account is under such an attack a new browser gets in by
a passkey, by the issuer, or by setting a new password.
"""

from __future__ import annotations

import secrets

from allauth.core.internal import ratelimit
from django.conf import settings
from django.core import signing
from django.http import HttpRequest, HttpResponse
from django.utils.crypto import constant_time_compare, salted_hmac

from controlplane.tenants.models import User

#: Wrong passwords, as allauth writes rates. The last two rates are of a pair or a browser.
_ADDRESS = "10/m/ip"
_ACCOUNT = "100/3600s/key"
_PAIR = "5/300s/key,15/3600s/key"

COOKIE = "lorikeet_browser"
_COOKIE_S = 180 * 24 * 3600
_COOKIE_PATH = "/console/"
#: In cookies that browsers have: it stays, wherever this module goes.
_SALT = "controlplane.signin.browser"
#: Of one browser: each of them makes the cookie longer.
_MAX_PEOPLE = 5
_MAX_COOKIE_LENGTH = 2000
_APP = "controlplane.console.signin"


def try_consume(request: HttpRequest, email: str) -> ratelimit.RateLimitUsage | None:
    """Count an attempt before its password is looked at; None when there were too many.

    A success takes its own count back by the answer's `rollback`.
    """
    email = email.strip().lower()
    if browser := _known_browser(request, email):
        return _consume(request, "known_browser", _PAIR, f"{browser} {email}")
    pair = f"{ratelimit.get_ip(request)} {email}"
    usages = []
    # The widest last: who is refused for less does not use it up.
    for action, rates, key in (
        ("address", _ADDRESS, None),
        ("pair", _PAIR, pair),
        ("account", _ACCOUNT, email),
    ):
        usage = _consume(request, action, rates, key)
        if usage is None:
            return None
        usages.extend(usage.usage)
    return ratelimit.RateLimitUsage(usage=usages)


def forget(request: HttpRequest, email: str) -> None:
    """Begin again for an account whose person has proven, by mail, that it is theirs."""
    email = email.strip().lower()
    pair = f"{ratelimit.get_ip(request)} {email}"
    for action, rates, key in (("pair", _PAIR, pair), ("account", _ACCOUNT, email)):
        config = {action: rates}
        ratelimit.clear(request, app=_APP, action=action, config=config, key=key)


def remember_browser(request: HttpRequest, response: HttpResponse, user: User) -> None:
    """Let the browser show from now on that this person has signed in in it."""
    browser, people = _read(request)
    others = {pk: mark for pk, mark in people.items() if pk != str(user.pk)}
    kept = dict([*others.items(), (str(user.pk), _mark(user))][-_MAX_PEOPLE:])
    response.set_cookie(
        COOKIE,
        signing.dumps([browser or secrets.token_urlsafe(12), kept], salt=_SALT),
        max_age=_COOKIE_S,
        path=_COOKIE_PATH,
        secure=settings.SESSION_COOKIE_SECURE,
        httponly=True,
        samesite="Lax",
    )


def _known_browser(request: HttpRequest, email: str) -> str:
    """The browser's name, if the person with this address has signed in in it; else empty."""
    browser, people = _read(request)
    if not people:
        return ""
    user = User.objects.filter(email=email).first()
    mark = people.get(str(user.pk)) if user is not None else None
    is_theirs = user is not None and mark is not None and constant_time_compare(mark, _mark(user))
    return browser if is_theirs else ""


def _read(request: HttpRequest) -> tuple[str, dict[str, str]]:
    """The browser's name, and by the ids of its people their marks; both empty without any."""
    text = request.COOKIES.get(COOKIE, "")
    if not text or len(text) > _MAX_COOKIE_LENGTH:
        return "", {}
    try:
        browser, people = signing.loads(text, salt=_SALT, max_age=_COOKIE_S)
    except signing.BadSignature:
        return "", {}
    return browser, people


def _mark(user: User) -> str:
    """Another one after each change of the password: who knew the old one is a stranger."""
    return salted_hmac(_SALT, f"{user.pk} {user.password}", algorithm="sha256").hexdigest()[:32]


def _consume(
    request: HttpRequest, action: str, rates: str, key: str | None
) -> ratelimit.RateLimitUsage | None:
    found: ratelimit.RateLimitUsage | None = ratelimit.consume(
        request, app=_APP, action=action, config={action: rates}, key=key
    )
    return found
