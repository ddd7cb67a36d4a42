"""Profiles in ~/.config/lorikeet/config.toml, and the environment: which server to use, as whom.

The file is written whole, by rename, and only its owner can read it. The environment is read here
and nowhere else.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

from lorikeet_cli.errors import CliError, NotSignedIn, UsageError

URL_VARIABLE = "LORIKEET_URL"
KEY_VARIABLE = "LORIKEET_API_KEY"
DEFAULT_PROFILE = "default"
#: Operators' keys begin with this; they act for every tenant.
OPERATOR_PREFIX = "lk_ops_"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_BAD_ADDRESS = "This is not a server's address. Write it as https://lorikeet.example."
#: Endings of addresses that other clients expect, as in OPENAI_BASE_URL.
_API_PATHS = ("/api/v1", "/ops/v1", "/v1", "/api")


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """A server and a key for it. Its repr shows no secret."""

    url: str
    key: str = dataclasses.field(repr=False)
    #: The profile that the account is from; None: the environment.
    profile: str | None = None

    @property
    def is_operator(self) -> bool:
        return self.key.startswith(OPERATOR_PREFIX)

    @property
    def key_hint(self) -> str:
        """The key's beginning, which is no secret."""
        return f"{self.key[:12]}…"


@dataclasses.dataclass(slots=True)
class Profiles:
    """The configuration file."""

    accounts: dict[str, Account] = dataclasses.field(default_factory=dict)
    current: str = DEFAULT_PROFILE

    @classmethod
    def load(cls) -> Profiles:
        """Read the file; without one there are no profiles. Raises CliError."""
        path = config_path()
        try:
            text = path.read_text(encoding="utf-8")
            mode = path.stat().st_mode
        except FileNotFoundError:
            return cls()
        except (OSError, UnicodeDecodeError) as error:
            raise CliError(f"Cannot read {path}: {_reason(error)}.") from error
        if stat.S_IMODE(mode) & 0o077:
            print(f"Others can read {path}: run `chmod 600 {path}`.", file=sys.stderr)
        return cls._parsed(text, path)

    @classmethod
    def _parsed(cls, text: str, path: Path) -> Profiles:
        advice = "Correct it, or delete it and run `lorikeet login`."
        try:
            document = tomllib.loads(text)
            rows = document.get("profiles", {})
            accounts = {
                check_name(name): Account(clean_url(row["url"]), clean_key(row["key"]), name)
                for name, row in rows.items()
            }
            return cls(accounts, str(document.get("current", DEFAULT_PROFILE)))
        except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError, CliError) as error:
            raise CliError(f"{path} is damaged: {_reason(error)}. {advice}") from error

    def save(self) -> Path:
        """Write the file so that it is there whole or not at all, for its owner only."""
        lines = [f"current = {json.dumps(self.current)}", ""]
        for name, account in sorted(self.accounts.items()):
            lines.append(f"[profiles.{json.dumps(name)}]")
            lines.append(f"url = {json.dumps(account.url)}")
            lines.append(f"key = {json.dumps(account.key)}")
            lines.append("")
        path = config_path()
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            with os.fdopen(
                os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w"
            ) as f:
                f.write("\n".join(lines))
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise CliError(f"Cannot write {path}: {_reason(error)}.") from error
        return path


def config_path() -> Path:
    """Return the configuration file's path, whether or not it exists."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "lorikeet" / "config.toml"


def state_folder() -> Path:
    """Return the folder for resumable uploads, whether or not it exists."""
    folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(folder) / "lorikeet"


def find_account(profile: str | None) -> Account:
    """Return the server and the key to use.

    A profile that is named comes first, then the environment, then the current profile. A profile's
    key is sent to its own server only. Raises NotSignedIn.
    """
    if profile is not None:
        return _profile(Profiles.load(), profile)
    url, key = os.environ.get(URL_VARIABLE), os.environ.get(KEY_VARIABLE)
    if url and key:
        return Account(clean_url(url), clean_key(key))
    profiles = Profiles.load()
    if key:
        return Account(_profile(profiles, profiles.current).url, clean_key(key))
    if url:
        wanted = clean_url(url)
        own = [each for each in profiles.accounts.values() if each.url == wanted]
        own.sort(key=lambda each: each.profile != profiles.current)
        if own:
            return own[0]
        raise NotSignedIn(f"No key for {wanted}: set {KEY_VARIABLE}, or run `lorikeet login`.")
    return _profile(profiles, profiles.current)


def _profile(profiles: Profiles, name: str) -> Account:
    account = profiles.accounts.get(name)
    if account is None and not profiles.accounts:
        raise NotSignedIn(
            f"Not signed in. Run `lorikeet login`, or set {URL_VARIABLE} and {KEY_VARIABLE}."
        )
    if account is None:
        known = ", ".join(sorted(profiles.accounts))
        raise NotSignedIn(
            f"There is no profile {name!r} (there are: {known}). "
            "Run `lorikeet login --profile NAME`, or `lorikeet profiles use NAME`."
        )
    return account


def secret_of(variable: str) -> str:
    """Return the value of an environment variable. Raises CliError if it is empty."""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise CliError(f"The environment variable {variable} is empty.")
    return value


def check_name(name: str) -> str:
    """Return a profile's name. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError("A profile's name has letters, digits, - and _, at most 63.")
    return name


def clean_url(text: str) -> str:
    """Return a server's address in its one form: scheme, host, port. Raises UsageError."""
    text = text.strip()
    if "://" not in text:
        host = text.partition("/")[0].rpartition(":")[0] or text.partition("/")[0]
        text = f"{'http' if host in _LOCAL_HOSTS else 'https'}://{text}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{text} is not an address: {error}.") from error
    is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
    path = parts.path.rstrip("/")
    for end in _API_PATHS:
        path = path.removesuffix(end)
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
        raise UsageError(_BAD_ADDRESS)
    if not (text.isascii() and text.isprintable()) or " " in text or (port or 1) < 1:
        raise UsageError(_BAD_ADDRESS)
    return f"{parts.scheme}://{parts.netloc.lower()}{path.rstrip('/')}"


def is_in_the_clear(url: str) -> bool:
    """Return whether others on the network can read a key that is sent there."""
    parts = urlsplit(url)
    return parts.scheme == "http" and parts.hostname not in _LOCAL_HOSTS


def clean_key(text: str) -> str:
    """Return the key without blanks around it. Raises UsageError."""
    key = text.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            "This is not an API key. Keys are one word, such as lk_live_… or lk_ops_…."
        )
    return key


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    return str(error).rstrip(".") or type(error).__name__
