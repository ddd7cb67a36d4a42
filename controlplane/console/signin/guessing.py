"""Limit how often a password may be tried, without locking its owner out.

A wrong password counts for the client's address, for the account from that address, and for the
account from all addresses. A stranger elsewhere cannot use up the first two. The third limits
guessing from many addresses at once. That would lock the owner out, too; so browsers in which they
have signed in before have a cookie, and their own count instead of all three. During such an attack
a new browser can sign in with a passkey, through the issuer, or after a password reset.
"""

from __future__ import annotations

import secrets

from allauth.core.internal import ratelimit
from django.conf import settings
from django.core import signing
from django.http import HttpRequest, HttpResponse
from django.utils.crypto import constant_time_compare, salted_hmac

from controlplane.tenants.models import User

#: Limits of wrong passwords, in allauth's format. The last two are for a pair and for a browser.
_ADDRESS = "10/m/ip"
_ACCOUNT = "100/3600s/key"
_PAIR = "5/300s/key,15/3600s/key"

COOKIE = "lorikeet_browser"
_COOKIE_S = 180 * 24 * 3600
_COOKIE_PATH = "/console/"
#: Signs cookies that browsers already have: it must not change, even if this module moves.
_SALT = "controlplane.signin.browser"
#: The most people per browser: each makes the cookie longer.
_MAX_PEOPLE = 5
_MAX_COOKIE_LENGTH = 2000
_APP = "controlplane.console.signin"


def try_consume(request: HttpRequest, email: str) -> ratelimit.RateLimitUsage | None:
    """Count an attempt before its password is checked; None when there were too many.

    After a success, call `rollback` of the result.
    """
    email = email.strip().lower()
    if browser := _known_browser(request, email):
        return _consume(request, "known_browser", _PAIR, f"{browser} {email}")
    pair = f"{ratelimit.get_ip(request)} {email}"
    usages = []
    # The widest limit comes last, so that an attempt refused by an earlier one does not count.
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
    """Reset the counts of an account whose owner has confirmed it by mail."""
    email = email.strip().lower()
    pair = f"{ratelimit.get_ip(request)} {email}"
    for action, rates, key in (("pair", _PAIR, pair), ("account", _ACCOUNT, email)):
        config = {action: rates}
        ratelimit.clear(request, app=_APP, action=action, config=config, key=key)


def remember_browser(request: HttpRequest, response: HttpResponse, user: User) -> None:
    """Set the cookie that shows that this person has signed in in this browser."""
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
    """Return the browser's id if the person with this address has signed in in it, else ""."""
    browser, people = _read(request)
    if not people:
        return ""
    user = User.objects.filter(email=email).first()
    mark = people.get(str(user.pk)) if user is not None else None
    is_theirs = user is not None and mark is not None and constant_time_compare(mark, _mark(user))
    return browser if is_theirs else ""


def _read(request: HttpRequest) -> tuple[str, dict[str, str]]:
    """Return the cookie's browser id and its marks by person; both empty without a cookie."""
    text = request.COOKIES.get(COOKIE, "")
    if not text or len(text) > _MAX_COOKIE_LENGTH:
        return "", {}
    try:
        browser, people = signing.loads(text, salt=_SALT, max_age=_COOKIE_S)
    except signing.BadSignature:
        return "", {}
    return browser, people


def _mark(user: User) -> str:
    """Return a mark that changes with the password: a new password makes old cookies invalid."""
    return salted_hmac(_SALT, f"{user.pk} {user.password}", algorithm="sha256").hexdigest()[:32]


def _consume(
    request: HttpRequest, action: str, rates: str, key: str | None
) -> ratelimit.RateLimitUsage | None:
    found: ratelimit.RateLimitUsage | None = ratelimit.consume(
        request, app=_APP, action=action, config={action: rates}, key=key
    )
    return found
