"""The rules of a key: its scopes, the models it may use, the addresses it may be used from."""

from __future__ import annotations

import dataclasses
import datetime as dt
import ipaddress
import re
from collections.abc import Iterable

from controlplane.errors import InvalidRequest
from controlplane.tenancy.model_scope import allows_model
from controlplane.tenants.permissions import DEFAULT_SCOPES, Permission

#: Largest number of allowed models, and of allowed addresses.
MAX_ALLOWED = 100
_MODEL = re.compile(r"\A[a-z0-9][a-z0-9._-]{0,62}(?:@[1-9][0-9]{0,8})?\Z")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyRules:
    """The rules of a key. An empty list of models or networks allows all of them."""

    scopes: tuple[str, ...] = DEFAULT_SCOPES
    allowed_models: tuple[str, ...] = ()
    allowed_ips: tuple[str, ...] = ()

    def checked(self) -> KeyRules:
        """Return the rules in normal form: without repeats, addresses as networks.

        Raises InvalidRequest that names the field.
        """
        return KeyRules(
            scopes=_scopes(self.scopes),
            allowed_models=_models(self.allowed_models),
            allowed_ips=_networks(self.allowed_ips),
        )


def allows_address(allowed: Iterable[str], address: str) -> bool:
    """Return whether a list of networks contains an address. An invalid address is in none."""
    networks = tuple(allowed)
    if not networks:
        return True
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is not None:
        number = number.ipv4_mapped
    return any(number in ipaddress.ip_network(network) for network in networks)


def covers_models(allowed: Iterable[str], wanted: Iterable[str]) -> bool:
    """Return whether `allowed` allows every model that `wanted` allows."""
    allowed, wanted = tuple(allowed), tuple(wanted)
    return not allowed or (bool(wanted) and all(allows_model(allowed, name) for name in wanted))


def covers_addresses(allowed: Iterable[str], wanted: Iterable[str]) -> bool:
    """Return whether `allowed` contains every address of the `wanted` networks."""
    outer = [ipaddress.ip_network(network) for network in allowed]
    inner = [ipaddress.ip_network(network) for network in wanted]
    if not outer:
        return True
    # Two adjacent halves together contain the whole network.
    four = list(ipaddress.collapse_addresses(n for n in outer if n.version == 4))
    six = list(ipaddress.collapse_addresses(n for n in outer if n.version == 6))
    return bool(inner) and all(
        any(network.subnet_of(one) for one in four)
        if isinstance(network, ipaddress.IPv4Network)
        else any(network.subnet_of(one) for one in six)
        for network in inner
    )


def covers_expiry(expires_at: dt.datetime | None, wanted: dt.datetime | None) -> bool:
    """Return whether `wanted` (None: never) is not later than `expires_at`."""
    return expires_at is None or (wanted is not None and wanted <= expires_at)


def _scopes(scopes: Iterable[str]) -> tuple[str, ...]:
    wanted = set(scopes)
    if unknown := sorted(wanted - set(Permission)):
        raise InvalidRequest(f"There is no scope {unknown[0][:100]}.", param="scopes")
    if not wanted:
        raise InvalidRequest("Name at least one scope.", param="scopes")
    return tuple(permission.value for permission in Permission if permission in wanted)


def _models(names: Iterable[str]) -> tuple[str, ...]:
    found = _bounded(names, "allowed_models")
    for name in found:
        if not _MODEL.match(name):
            raise InvalidRequest(
                f"{name[:100]} is not a model's name, such as invoices or invoices@3.",
                param="allowed_models",
            )
    return found


def _networks(texts: Iterable[str]) -> tuple[str, ...]:
    found = []
    for text in _bounded(texts, "allowed_ips"):
        try:
            found.append(str(ipaddress.ip_network(text)))
        except ValueError as error:
            raise InvalidRequest(
                f"{text[:100]} is not an address or network, such as 192.0.2.7 or 192.0.2.0/24.",
                param="allowed_ips",
            ) from error
    return tuple(found)


def _bounded(items: Iterable[str], field: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(items))
    if len(found) > MAX_ALLOWED:
        raise InvalidRequest(f"{field} can have at most {MAX_ALLOWED} entries.", param=field)
    return found
