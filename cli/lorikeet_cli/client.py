"""The HTTP client: bounded answers, retries that cannot repeat a change, errors as one line."""

from __future__ import annotations

import json
import math
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import httpx

from lorikeet_cli import __version__
from lorikeet_cli.config import Account
from lorikeet_cli.errors import ApiError, Forbidden, Unreachable
from lorikeet_cli.output import say, shown

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
MAX_ATTEMPTS = 5
#: Longest sum of all waits between attempts, and longest single wait, in seconds.
MAX_WAITS_S, MAX_WAIT_S = 60.0, 30.0
MAX_ANSWER_BYTES = 32 << 20
MAX_PAGE = 100
#: Statuses of a busy server or proxy: the request has had no effect.
RETRIED = (429, 502, 503, 504)
USER_AGENT = f"lorikeet-cli/{__version__}"

Content = Callable[[], Iterator[bytes]]


class Client:
    """The server's API with one account's key. Raises ApiError, Forbidden and Unreachable."""

    def __init__(self, account: Account, *, attempts: int = MAX_ATTEMPTS) -> None:
        self.account = account
        self._attempts = attempts
        self._http = httpx.Client(
            headers={
                "Authorization": f"Bearer {account.key}",
                "User-Agent": USER_AGENT,
                "Accept": "application/json",
            },
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        )

    def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        content: Content | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Send a request and return its answer's JSON; None when it is empty.

        path     after the server's address: /api/v1/adapters
        content  makes the body again for each attempt, so that it is never in memory as a whole;
                 such a write replaces what has its name, so it may be done twice
        timeout_s  of the answer; None: the usual one

        Other writes have an Idempotency-Key, the same in each attempt: the server does them once.
        """
        sent = dict(headers or {})
        if method != "GET" and content is None:
            sent["Idempotency-Key"] = str(uuid.uuid4())
        waited = 0.0
        for attempt in range(1, self._attempts + 1):
            is_last = attempt == self._attempts
            options: dict[str, Any] = {"json": body} if body is not None else {}
            if content is not None:
                options["content"] = content()
            if timeout_s is not None:
                options["timeout"] = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
            try:
                response, data = self._send(
                    method, path, params=_given(params), headers=sent, **options
                )
            except httpx.TransportError as error:
                # A server that is down usually stays down for a while: report it within seconds.
                if attempt >= min(3, self._attempts) or isinstance(error, httpx.TimeoutException):
                    raise Unreachable(why_unreachable(self.account.url, error)) from error
                wait, why = _pause(attempt), "does not answer"
            else:
                if response.status_code not in RETRIED or is_last or _is_final(response):
                    return self._answer(method, path, response, data)
                wait = _retry_after(response) or _pause(attempt)
                why = f"is busy ({response.status_code})"
                if wait > MAX_WAIT_S or waited + wait > MAX_WAITS_S:
                    return self._answer(method, path, response, data)
            waited += wait
            say(f"{self.account.url} {why}; trying again in {wait:.0f} s.")
            time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def pages(
        self, path: str, *, params: Mapping[str, Any] | None = None, limit: int
    ) -> dict[str, Any]:
        """Return a list of up to `limit` items, read page by page, and whether there are more."""
        found: list[dict[str, Any]] = []
        after, has_more = None, True
        while has_more and len(found) < limit:
            wanted = {"limit": min(MAX_PAGE, limit - len(found)), "after": after, **(params or {})}
            page = self.call("GET", path, params=wanted)
            found += page["data"]
            after, has_more = page["last_id"], page["has_more"] and bool(page["data"])
        return {"object": "list", "data": found, "has_more": has_more}

    def close(self) -> None:
        self._http.close()

    def _send(self, method: str, path: str, **options: Any) -> tuple[httpx.Response, bytes]:
        with self._http.stream(method, self.account.url + path, **options) as response:
            data = bytearray()
            for piece in response.iter_bytes():
                data += piece
                if len(data) > MAX_ANSWER_BYTES:
                    raise Unreachable(
                        f"{self.account.url} sent more than {MAX_ANSWER_BYTES >> 20} MiB: "
                        "is that Lorikeet? Check the address."
                    )
        return response, bytes(data)

    def _answer(self, method: str, path: str, response: httpx.Response, data: bytes) -> Any:
        status = response.status_code
        if response.is_redirect:
            raise Unreachable(
                f"{self.account.url} redirects to {shown(response.headers.get('location'))}: "
                "sign in with that server's address."
            )
        if response.is_success and not data:
            return None
        document = _parsed(data)
        if response.is_success and isinstance(document, dict):
            return document
        error = document.get("error") if isinstance(document, dict) else None
        if response.is_success or not isinstance(error, dict) or "message" not in error:
            if status >= 500:
                raise Unreachable(
                    f"{self.account.url} answers {status}: its server is down. Try again later."
                )
            raise Unreachable(
                f"{self.account.url} answers, but not as Lorikeet does ({status} to {method} "
                f"{path}). Check the address."
            )
        self._refuse(path, response, error)

    def _refuse(self, path: str, response: httpx.Response, error: dict[str, Any]) -> NoReturn:
        status, code, param = response.status_code, error.get("code"), error.get("param")
        message = shown(error["message"])
        if status == 401:
            message = f"{self.account.url} refuses the key: {message} Run `lorikeet login`."
        elif code == "unknown_url":
            message = (
                f"The server at {self.account.url} has no {path}: it is older than this "
                "command line. Upgrade the server, or install the command line of its version."
            )
        elif param:
            message = f"{shown(param)}: {message}"
        if status >= 500 and (request_id := response.headers.get("x-request-id")):
            message += f" (request {shown(request_id)})"
        kind = Forbidden if status in (401, 403) else ApiError
        raise kind(message, status=status, code=code, param=param)


def why_unreachable(url: str, error: httpx.TransportError) -> str:
    """Say in one line why nobody answers at `url`, and what to do."""
    reason = shown(str(error) or type(error).__name__)
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return (
            f"The certificate of {url} is not trusted. If it is your own, name the file of its "
            "authority in SSL_CERT_FILE."
        )
    if isinstance(error, httpx.ConnectTimeout):
        reason = f"no connection within {CONNECT_TIMEOUT_S:.0f} s"
    elif isinstance(error, httpx.TimeoutException):
        reason = "it took too long"
    return f"{url} does not answer ({reason}). Check the address, the network and the server."


def _given(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (params or {}).items() if value is not None}


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _is_final(response: httpx.Response) -> bool:
    return bool(response.headers.get("x-should-retry") == "false")


def _retry_after(response: httpx.Response) -> float | None:
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None


def _pause(attempt: int) -> float:
    return float(2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
