"""The hosts, ports and addresses that `outbound` may call: public ones, and the operator's."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

#: Ports of https; other ports, and http, only for hosts that the operator lists.
HTTPS_PORTS = frozenset({443, 8443})
MAX_URL_CHARS = 2000

#: IANA's special-purpose IPv4 networks, multicast, the reserved rest, and 6to4's relays.
_NOT_PUBLIC = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
        "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16",
        "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
    )
)  # fmt: skip
#: The networks of hosts, without those for protocols (Teredo, ORCHID), documentation, 6to4.
_PUBLIC_6 = IPv6Network("2000::/3")
_NOT_PUBLIC_6 = tuple(
    IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)
#: Prefix of addresses that contain an IPv4 address (NAT64), which is checked instead.
_NAT64 = IPv6Network("64:ff9b::/96")
#: Addresses of clouds' credentials, never allowed; Azure's is a public one.
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254", "169.254.170.2", "169.254.170.23", "168.63.129.16",
        "100.100.100.200", "192.0.0.192",
        "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fe80::a9fe:a9fe",
    )
)  # fmt: skip

#: The only parser of a URL; text of another form is refused. No user, no zone, no percent sign in
#: the host, no backslash, space, control or non-ASCII character, no fragment.
_URL = re.compile(
    r"(?P<scheme>https?)://"
    r"(?:\[(?P<six>[0-9a-f:.]{2,45})\]|(?P<name>[a-z0-9_.-]{1,253}))"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>[/?][!-\"$-\[\]-~]*)?",
    re.IGNORECASE | re.ASCII,
)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
#: Text that resolvers read as a number, and so as part of an IPv4 address.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_USUAL_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "postgres": 5432}
_USUAL_PORTS |= {"redis": 6379, "rediss": 6379}


class Refused(ValueError):
    """The address may not be called; the message is for the tenant."""


@dataclasses.dataclass(frozen=True, slots=True)
class Destination:
    """A URL that was parsed and that may be called if its host's addresses may."""

    scheme: str
    #: In lower case; an IPv6 address without brackets.
    host: str
    port: int
    #: Path and query, as they are sent.
    target: str
    #: The host's address if the URL has one instead of a name.
    address: Address | None

    @property
    def authority(self) -> str:
        """Return the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _USUAL_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutboundPolicy:
    """The operator's rules beside those that always apply."""

    #: "host" or "host:port": may be called by http and, if a port is given, on that one.
    hosts: frozenset[str] = frozenset()
    #: Allowed networks that are not public.
    allowed: tuple[Network, ...] = ()
    #: Denied networks that are public.
    denied: tuple[Network, ...] = ()
    #: (host, port) of our own services.
    own: frozenset[tuple[str, int]] = frozenset()
    #: A file with certificates of authorities; empty: the usual ones.
    ca_file: str = ""

    def destination(self, url: str, *, max_chars: int = MAX_URL_CHARS) -> Destination:
        """Parse a URL, without resolving its host. Raises Refused."""
        if len(url) > max_chars:
            raise Refused(f"A URL can have at most {max_chars} characters.")
        match = _URL.fullmatch(url)
        if match is None:
            raise Refused(
                "Use a URL as https://host/path: no user, no fragment, only ASCII characters."
            )
        scheme, target = match["scheme"].lower(), match["target"] or "/"
        host, address = _literal_6(match["six"]) if match["six"] else _name(match["name"].lower())
        port = int(match["port"] or _USUAL_PORTS[scheme])
        if not self._is_listed(host, port):
            self._check_usual(scheme, host, port, is_name=address is None)
        if not 1 <= port <= 65535:
            raise Refused("A port is a number from 1 to 65535.")
        if (host, port) in self.own:
            raise Refused("This is an address of the platform itself: use another one.")
        if address is not None:
            self.check_address(address, port)
        path = target if target.startswith("/") else f"/{target}"
        return Destination(scheme, host, port, path, address)

    def _is_listed(self, host: str, port: int) -> bool:
        return host in self.hosts or f"{host}:{port}" in self.hosts

    @staticmethod
    def _check_usual(scheme: str, host: str, port: int, *, is_name: bool) -> None:
        if scheme != "https":
            raise Refused("Use https.")
        if port not in HTTPS_PORTS:
            ports = " or ".join(map(str, sorted(HTTPS_PORTS)))
            raise Refused(f"Use port {ports}.")
        if is_name and "." not in host:
            raise Refused("Use the full name of a public host.")

    def check_address(self, address: Address, port: int) -> None:
        """Raise Refused for an address that may not be called."""
        if isinstance(address, IPv6Address) and address in _NAT64:
            self.check_address(IPv4Address(int(address) & 0xFFFFFFFF), port)
            return
        is_denied = any(address in network for network in self.denied)
        is_allowed = any(address in network for network in self.allowed) or is_public(address)
        is_own = (str(address), port) in self.own
        is_metadata = _without_scope(address) in _METADATA
        # An address that embeds one of the other kind would bypass the lists of networks.
        is_mapped = isinstance(address, IPv6Address) and address.ipv4_mapped is not None
        if is_metadata or is_mapped or is_denied or is_own or not is_allowed:
            # The same words as for a name without an address: others would show which names exist
            # inside.
            raise Refused("The host has no public address.")


def _without_scope(address: Address) -> Address:
    return address if isinstance(address, IPv4Address) else IPv6Address(int(address))


def is_public(address: Address) -> bool:
    """Return whether the address belongs to a host of the public internet."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC)
    if address.scope_id is not None or address not in _PUBLIC_6:
        return False
    return not any(address in network for network in _NOT_PUBLIC_6)


def outbound_policy(
    hosts: str, allowed: str, denied: str, ca_file: str, *own: str
) -> OutboundPolicy:
    """Return the policy of the settings; lists are separated by commas.

    own  URLs of our own services
    Raises ImproperlyConfigured.
    """
    try:
        return OutboundPolicy(
            hosts=frozenset(_items(hosts.lower())),
            allowed=_networks(allowed),
            denied=_networks(denied),
            own=frozenset(filter(None, map(_host_and_port, own))),
            ca_file=ca_file,
        )
    except ValueError as error:
        raise ImproperlyConfigured(f"LORIKEET_OUTBOUND_…: {error}") from error


def hub_endpoint(policy: OutboundPolicy, url: str | None) -> str:
    """Return the Hub's address without a slash at its end; None: the usual one; empty: none.

    Raises ImproperlyConfigured.
    """
    url = "https://huggingface.co" if url is None else url.strip().rstrip("/")
    try:
        return url and policy.destination(url).url.rstrip("/")
    except Refused as error:
        raise ImproperlyConfigured(f"LORIKEET_HUB_ENDPOINT: {error}") from error


def _networks(text: str) -> tuple[Network, ...]:
    return tuple(map(ipaddress.ip_network, _items(text)))


def _literal_6(text: str) -> tuple[str, Address]:
    try:
        address = IPv6Address(text)
    except ValueError as error:
        raise Refused("This is not an IPv6 address.") from error
    return str(address), address


def _name(host: str) -> tuple[str, Address | None]:
    """Return a host's name, and its address if it is one, written in the one usual way."""
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            address = IPv4Address(host)  # no octal, hexadecimal or short forms
        except ValueError as error:
            raise Refused("Write an IPv4 address as four decimal numbers.") from error
        return host, address
    if not all(map(_LABEL.fullmatch, labels)):
        raise Refused("This is not a host name. Write a name with other letters as xn--….")
    return host, None


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _host_and_port(url: str) -> tuple[str, int] | None:
    parts = urlsplit(url)
    if not parts.hostname:
        return None
    return parts.hostname, parts.port or _USUAL_PORTS.get(parts.scheme, 0)
