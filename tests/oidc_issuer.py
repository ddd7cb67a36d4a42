"""A small OpenID Connect issuer on 127.0.0.1: real HTTP, real keys, really signed tokens."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

CLIENT_ID, CLIENT_SECRET = "lorikeet", "the client's secret"
Claims = dict[str, Any]


@dataclasses.dataclass
class _Grant:
    """What a code stands for until it is exchanged, once."""

    claims: Claims
    challenge: str
    redirect_uri: str


class Issuer:
    """Signs in whoever `person` is, without asking; a test may tamper with what it sends."""

    def __init__(self, port: int = 0) -> None:
        self.person: Claims = {"sub": "1", "email": "one@example.com", "email_verified": True}
        #: Changes an ID token's claims, or the whole token, before it is sent.
        self.change_claims: Callable[[Claims], Claims] = lambda claims: claims
        self.change_token: Callable[[str], str] = lambda token: token
        #: What /userinfo says; None: the person.
        self.userinfo: Claims | None = None
        self.is_down = False
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._grants: dict[str, _Grant] = {}
        self._tokens: dict[str, Claims] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def sign(self, claims: Claims, key: Any = None, algorithm: str = "RS256") -> str:
        return jwt.encode(claims, key or self.key, algorithm=algorithm, headers={"kid": "one"})

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                self._reply(issuer._get(parts.path, query, self.headers))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = {name: values[0] for name, values in parse_qs(body).items()}
                self._reply(issuer._exchange(form) if self.path == "/token" else (404, {}))

            def _reply(self, answer: tuple[int, Any]) -> None:
                status, body = (503, {}) if issuer.is_down else answer
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", body)
                    body = {}
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *args: Any) -> None:
                pass

        return Handler

    def _get(self, path: str, query: dict[str, str], headers: Any) -> tuple[int, Any]:
        if path == "/.well-known/openid-configuration":
            return 200, {
                "issuer": self.url,
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "userinfo_endpoint": f"{self.url}/userinfo",
                "jwks_uri": f"{self.url}/jwks",
                "token_endpoint_auth_methods_supported": ["client_secret_post"],
            }
        if path == "/jwks":
            public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
            return 200, {"keys": [{**public, "kid": "one", "use": "sig", "alg": "RS256"}]}
        if path == "/authorize":
            return self._authorize(query)
        if path == "/userinfo":
            claims = self._tokens.get(headers.get("Authorization", "").removeprefix("Bearer "))
            return (401, {}) if claims is None else (200, self.userinfo or claims)
        return 404, {}

    def _authorize(self, query: dict[str, str]) -> tuple[int, Any]:
        assert query["client_id"] == CLIENT_ID
        assert query["code_challenge_method"] == "S256"
        assert "openid" in query["scope"].split()
        code = secrets.token_urlsafe()
        claims = {**self.person, "nonce": query["nonce"]}
        self._grants[code] = _Grant(claims, query["code_challenge"], query["redirect_uri"])
        back = urlencode({"code": code, "state": query["state"]})
        return 302, f"{query['redirect_uri']}?{back}"

    def _exchange(self, form: dict[str, str]) -> tuple[int, Any]:
        grant = self._grants.pop(form.get("code", ""), None)
        is_client = (form.get("client_id"), form.get("client_secret")) == (CLIENT_ID, CLIENT_SECRET)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        if grant is None or not is_client or grant.challenge != challenge:
            return 400, {"error": "invalid_grant"}
        if grant.redirect_uri != form.get("redirect_uri"):
            return 400, {"error": "invalid_grant"}
        now = int(time.time())
        claims = {**grant.claims, "iss": self.url, "aud": CLIENT_ID, "iat": now, "exp": now + 60}
        access_token = secrets.token_urlsafe()
        self._tokens[access_token] = self.person
        return 200, {
            "access_token": access_token,
            "token_type": "Bearer",
            "id_token": self.change_token(self.sign(self.change_claims(claims))),
        }
