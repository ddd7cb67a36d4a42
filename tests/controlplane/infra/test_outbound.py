"""Calls to addresses that a tenant names: against real servers, with resolvers that lie."""

from __future__ import annotations

import dataclasses
import gzip
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hypothesis
import pytest
from django.core.exceptions import ImproperlyConfigured
from hypothesis import strategies as st
from urllib3.util import parse_url

from controlplane.infra.outbound import outbound
from controlplane.infra.outbound.outbound import Bounds, CallFailed
from controlplane.infra.outbound.outbound_policy import OutboundPolicy, Refused, outbound_policy
from tests.receiver import Receiver, Tls, answer, make_tls, receiving

PLAIN = OutboundPolicy()
LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
NAME = "hooks.example.test"

#: All of these are refused, whatever a resolver says of their names.
BAD_FORMS = [
    # another scheme, or none
    *("http://example.com/", "ftp://example.com/", "file:///etc/passwd", "gopher://127.0.0.1:6379"),
    *("//example.com/", "example.com", "https:example.com", "https:/example.com", "https://", ""),
    *("javascript:alert(1)", "dict://127.0.0.1:11211/", "HTTP://example.com/"),
    # users, and what looks like one
    *("https://user@example.com/", "https://user:pass@example.com/", "https://@example.com/"),
    *("https://example.com@127.0.0.1/", "https://127.0.0.1@example.com/"),
    *("https://example.com:443@127.0.0.1/", "https://a:b@c:d@example.com/"),
    # backslashes, spaces, controls, fragments
    *(
        "https://example.com\\@127.0.0.1/",
        "https://127.0.0.1\\.example.com/",
        "https:\\\\10.0.0.1\\",
    ),
    *(
        "https://example.com/\r\nHost: 10.0.0.1",
        "https://example.com\r\n/",
        "https://exa mple.com/",
    ),
    *("https://example.com/\0", "https://example.com\t/", "\thttps://example.com/"),
    *(" https://example.com/", "https://example.com/ ", "https://example.com/\n"),
    *("https://example.com#@127.0.0.1/", "https://example.com/#x", "https://example.com/a b"),
    # ports
    *("https://example.com:22/", "https://example.com:80/", "https://example.com:0/"),
    *("https://example.com:65536/", "https://example.com:99999/", "https://example.com:/"),
    *("https://example.com:-1/", "https://example.com:443:443/", "https://example.com:４４３/"),
    *("https://example.com:6379/", "https://example.com:0x1bb/"),
    # IPv4 in every spelling that some resolver takes
    *("https://127.0.0.1/", "https://127.1/", "https://127.0.1/", "https://2130706433/"),
    *("https://0x7f000001/", "https://0x7f.0.0.1/", "https://0177.0.0.1/", "https://017700000001/"),
    *("https://127.0.0.01/", "https://127.0.0.1./", "https://0/", "https://0.0.0.0/"),
    *("https://00000000177.1/", "https://0x/", "https://1.2.3.4.5/", "https://256.256.256.256/"),
    *("https://127.0.0.1.0x/", "https://169.254.169.254/", "https://2852039166/"),
    *("https://0xa9fea9fe/", "https://0251.0376.0251.0376/", "https://169.254.43518/"),
    *(
        "https://10.0.0.1/",
        "https://172.16.0.1/",
        "https://172.31.255.255/",
        "https://192.168.1.1/",
    ),
    *("https://100.64.0.1/", "https://100.100.100.200/", "https://168.63.129.16/"),
    *("https://198.18.0.1/", "https://192.0.0.192/", "https://192.0.2.1/", "https://203.0.113.9/"),
    *(
        "https://224.0.0.1/",
        "https://240.0.0.1/",
        "https://255.255.255.255/",
        "https://192.88.99.1/",
    ),
    # IPv6, and IPv4 inside it
    *("https://[::1]/", "https://[::]/", "https://[0:0:0:0:0:0:0:1]/", "https://[fe80::1]/"),
    *("https://[fe80::1%25eth0]/", "https://[fe80::1%eth0]/", "https://[fc00::1]/"),
    *("https://[fd00:ec2::254]/", "https://[ff02::1]/", "https://[::ffff:127.0.0.1]/"),
    *("https://[::ffff:7f00:1]/", "https://[::ffff:8.8.8.8]/", "https://[::127.0.0.1]/"),
    *("https://[2002:7f00:1::]/", "https://[2002:a9fe:a9fe::1]/", "https://[64:ff9b::7f00:1]/"),
    *("https://[64:ff9b::169.254.169.254]/", "https://[64:ff9b:1::7f00:1]/"),
    *(
        "https://[2001:0:7f00:1::1]/",
        "https://[2001:db8::1]/",
        "https://[fec0::1]/",
        "https://[::1/",
    ),
    *("https://::1/", "https://[127.0.0.1]/", "https://[::1]x/", "https://[::g]/", "https://[]/"),
    *("https://[3fff::1]/", "https://[100::1]/", "https://[5f00::1]/"),
    # names that are not of the public internet, and letters that become other letters
    *("https://localhost/", "https://LOCALHOST/", "https://redis/", "https://postgres:443/"),
    *("https://localhost./", "https://example.com./", "https://.example.com/", "https://a..b/"),
    *(
        "https://１２７.0.0.1/",
        "https://127。0。0。1/",
        "https://ⓔxample.com/",
        "https://exämple.com/",
    ),
    *("https://①②⑦.0.0.1/", "https://127.0.0.1%2f@example.com/", "https://%31%32%37.0.0.1/"),
    *("https://-example.com/", "https://example-.com/", "https://exam*ple.com/"),
    *("https://example.com,10.0.0.1/", "https://example.com;10.0.0.1/", "https://ex&mple.com/"),
    f"https://{'a' * 64}.com/",
    f"https://example.com/{'a' * 2000}",
]

GOOD_FORMS = {
    "https://example.com": ("example.com", 443, "/"),
    "https://Example.COM:8443/Path?q=1&r=%20": ("example.com", 8443, "/Path?q=1&r=%20"),
    "https://example.com?q": ("example.com", 443, "/?q"),
    "https://8.8.8.8/": ("8.8.8.8", 443, "/"),
    "https://[2606:4700:4700::1111]/x": ("2606:4700:4700::1111", 443, "/x"),
    "https://xn--exmple-cua.com/": ("xn--exmple-cua.com", 443, "/"),
    "https://1.example.com/@user": ("1.example.com", 443, "/@user"),
    "https://[64:ff9b::808:808]/": ("64:ff9b::808:808", 443, "/"),
}

#: Addresses that a name may have and that are refused.
INSIDE = [
    *("127.0.0.1", "10.1.2.3", "172.20.0.1", "192.168.0.1", "169.254.169.254", "100.64.1.1"),
    *("0.0.0.0", "224.0.0.251", "168.63.129.16", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00::1"),
    *("fd00:ec2::254", "::ffff:10.0.0.1", "::ffff:93.184.216.34", "2002:a00:1::", "ff02::1"),
    *("64:ff9b::a00:1", "2001:0:1::1", "not an address"),
]


def test_the_table_has_at_least_sixty() -> None:
    assert len(set(BAD_FORMS)) == len(BAD_FORMS) >= 120


@pytest.mark.parametrize("url", BAD_FORMS)
def test_what_is_no_public_https_address_is_refused(url: str, settings: Any) -> None:
    settings.OUTBOUND = PLAIN
    with pytest.raises(Refused):
        PLAIN.destination(url)
    with pytest.raises(Refused), outbound.call("POST", url, resolver=lambda *_: ["8.8.8.8"]):
        pytest.fail("it was called")


@pytest.mark.parametrize(("url", "parts"), GOOD_FORMS.items())
def test_public_addresses_are_accepted(url: str, parts: tuple[str, int, str]) -> None:
    found = PLAIN.destination(url)
    assert (found.host, found.port, found.target) == parts
    assert PLAIN.destination(found.url) == found


_PIECES = st.sampled_from(
    [
        *("https://", "http://", "example.com", "127.0.0.1", "[::1]", "[2606:4700::1]", "10.0.0.1"),
        *(
            "@",
            ":",
            "/",
            "\\",
            "#",
            "?",
            "%",
            "%40",
            "%2f",
            ".",
            ";",
            "&",
            "=",
            ",",
            " ",
            "\t",
            "\n",
        ),
        *(
            "443",
            "8443",
            "0",
            "a",
            "-",
            "_",
            "[",
            "]",
            "xn--",
            "。",
            "１",
            "é",
            "\0",
            "\u202e",
            "0x7f",
        ),
    ]
)


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(st.lists(_PIECES, max_size=9).map("".join))
@hypothesis.example("https://example.com/@127.0.0.1")
def test_what_is_accepted_other_parsers_read_in_the_same_way(rest: str) -> None:
    """An address that two parsers read differently leads past the check of one of them."""
    for url in (rest, f"https://{rest}", f"https://example.com{rest}"):
        try:
            found = PLAIN.destination(url)
        except Refused:
            continue
        split, parsed = urlsplit(url), parse_url(url)
        assert split.hostname == found.host == (parsed.host or "").strip("[]")
        assert (split.port or 443) == found.port == (parsed.port or 443)
        assert split.username is parsed.auth is None and split.fragment == ""
        assert "@" not in split.netloc and url.isascii() and url.isprintable()


@pytest.mark.parametrize("address", INSIDE)
def test_a_name_with_any_address_inside_is_refused(address: str, settings: Any) -> None:
    settings.OUTBOUND = PLAIN
    for found in ([address], ["93.184.216.34", address]):
        with pytest.raises(Refused, match="no public address"):
            outbound.check(f"https://{NAME}/", resolver=lambda *_, found=found: found)


def test_a_name_that_cannot_be_resolved_is_refused_in_the_same_words(settings: Any) -> None:
    """GitLab's first bypass: a failed resolution skipped the check."""
    settings.OUTBOUND = PLAIN

    def fails(*_: Any) -> list[str]:
        raise socket.gaierror("no such name")

    for resolver in (fails, lambda *_: []):
        with pytest.raises(Refused, match="The host has no public address"):
            outbound.check(f"https://{NAME}/", resolver=resolver)


def test_our_own_services_are_refused_and_the_operator_has_a_say() -> None:
    policy = outbound_policy(
        "Hooks.internal:8080, partner",
        "10.1.0.0/16,169.254.0.0/16,0.0.0.0/0",
        "10.1.2.0/24, 8.8.8.0/24",
        "",
        *("https://lorikeet.example.com", "redis://:x@10.1.0.9:6379/0", "https://10.1.0.8/", ""),
    )
    for url in ("http://hooks.internal:8080/a", "https://partner:9000/", "https://10.1.0.1/"):
        policy.destination(url)
    for url in (
        *("http://hooks.internal/", "http://other.internal:8080/", "https://lorikeet.example.com/"),
        *("https://10.1.0.8/", "https://10.1.2.3/", "https://8.8.8.8/", "https://169.254.169.254/"),
    ):
        with pytest.raises(Refused):
            policy.destination(url)
    with pytest.raises(Refused):  # by another name
        policy.check_address(ipaddress.ip_address("10.1.0.8"), 443)
    with pytest.raises(ImproperlyConfigured, match="OUTBOUND"):
        outbound_policy("", "", "10.0.0.1/8", "")


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254", "169.254.170.23", "168.63.129.16", "100.100.100.200", "192.0.0.192"),
        *("::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "fd00:ec2::254", "fd20:ce::254"),
        *("fe80::a9fe:a9fe", "fe80::a9fe:a9fe%eth0"),
    ],
)
def test_no_setting_allows_where_clouds_keep_credentials(address: str) -> None:
    policy = outbound_policy("", "0.0.0.0/0, ::/0", "", "")
    policy.check_address(ipaddress.ip_address("10.1.2.3"), 443)
    policy.check_address(ipaddress.ip_address("fd00::1"), 443)
    with pytest.raises(Refused):
        policy.check_address(ipaddress.ip_address(address), 443)


@dataclasses.dataclass
class Listener:
    """A server that has the name NAME, and the policy under which it may be called."""

    receiver: Receiver
    scheme: str

    @property
    def url(self) -> str:
        return f"{self.scheme}://{NAME}:{self.receiver.port}/hook"


@pytest.fixture
def plain(settings: Any) -> Iterator[Listener]:
    with receiving() as receiver:
        settings.OUTBOUND = OutboundPolicy(
            hosts=frozenset({f"{NAME}:{receiver.port}"}), allowed=LOOPBACK
        )
        yield Listener(receiver, "http")


def local(*_: Any) -> list[str]:
    return ["127.0.0.1"]


def get(url: str, **options: Any) -> bytes:
    with outbound.call("GET", url, **{"resolver": local, **options}) as got:
        return got.read()


class TestCall:
    def test_the_body_goes_out_and_the_answer_comes_back(self, plain: Listener) -> None:
        plain.receiver.behave = answer(202, b"thanks", {"X-Seen": "yes"})
        headers = {"Content-Type": "application/json"}
        with outbound.call("POST", plain.url, body=b"{}", headers=headers, resolver=local) as got:
            assert (got.status, got.headers["x-seen"], got.read()) == (202, "yes", b"thanks")
        (sent,) = plain.receiver.received
        assert (sent.method, sent.path, sent.body) == ("POST", "/hook", b"{}")
        assert sent.headers["host"] == f"{NAME}:{plain.receiver.port}"
        assert sent.headers["accept-encoding"] == "identity"

    def test_no_proxy_and_no_netrc_of_the_environment_is_used(
        self, plain: Listener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "netrc").write_text(f"machine {NAME} login me password secret\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        assert get(plain.url) == b""
        assert "authorization" not in plain.receiver.received[0].headers

    def test_a_second_address_is_tried(self, plain: Listener) -> None:
        # Nothing listens on 127.0.0.2.
        assert get(plain.url, resolver=lambda *_: ["127.0.0.2", "127.0.0.1"]) == b""

    def test_nobody_listens(self, plain: Listener) -> None:
        plain.receiver.close()
        with pytest.raises(CallFailed, match="The connection failed"):
            get(plain.url)


class TestRebinding:
    def test_the_name_is_resolved_once_for_a_call(self, plain: Listener) -> None:
        """A checked address first, then one inside: only the first is ever asked for."""
        with receiving(address="127.0.0.3", port=plain.receiver.port) as inside:
            answers = iter([["127.0.0.1"], ["127.0.0.3"], ["127.0.0.3"]])
            for _ in range(1):
                assert get(plain.url, resolver=lambda *_: next(answers)) == b""
            assert next(answers) == ["127.0.0.3"]  # one was asked for
            assert (len(plain.receiver.received), inside.received) == (1, [])

    def test_a_change_after_the_check_is_refused_at_the_call(
        self, plain: Listener, settings: Any
    ) -> None:
        """GitLab's second bypass: an allowed host was not checked again."""
        only = (ipaddress.ip_network("127.0.0.1/32"),)
        settings.OUTBOUND = dataclasses.replace(settings.OUTBOUND, allowed=only)
        with receiving(address="127.0.0.3", port=plain.receiver.port) as inside:
            answers = iter([["127.0.0.1"], ["127.0.0.3"], ["127.0.0.1", "127.0.0.3"]])

            def rebinds(*_: Any) -> list[str]:
                return next(answers)

            outbound.check(plain.url, resolver=rebinds)
            for _ in range(2):
                with pytest.raises(Refused):
                    get(plain.url, resolver=rebinds)
            assert plain.receiver.received == inside.received == []


class TestRedirects:
    def test_none_is_followed_unless_asked(self, plain: Listener) -> None:
        plain.receiver.behave = answer(302, b"", {"Location": "/elsewhere"})
        with outbound.call("GET", plain.url, resolver=local) as got:
            assert got.status == 302
        with outbound.call("POST", plain.url, body=b"", redirects=3, resolver=local) as got:
            assert got.status == 302
        assert [sent.path for sent in plain.receiver.received] == ["/hook", "/hook"]

    @pytest.mark.parametrize(
        "location",
        [
            *("http://127.0.0.1:{port}/", "http://169.254.169.254/latest/", "https://127.1/"),
            *("//127.0.0.1:{port}/", "file:///etc/passwd", "http://[::1]:{port}/"),
            *("https://user@{name}/", "http://{name}:1/", "gopher://{name}/", "\\\\127.0.0.1/"),
            *("http://[", "https://[::1", "https://[v1.x]/"),
            *("http://[", "https://[::1", "https://[v1.x]/"),
        ],
    )
    def test_one_to_the_inside_is_refused(self, plain: Listener, location: str) -> None:
        to = location.format(port=plain.receiver.port, name=NAME)
        plain.receiver.behave = answer(302, b"", {"Location": to})
        with pytest.raises((Refused, CallFailed)):
            # As a path, the last one is one of the same host; that redirects again and again.
            with outbound.call("GET", plain.url, redirects=3, resolver=local) as got:
                assert got.status != 302
        assert {sent.headers["host"] for sent in plain.receiver.received} == {
            f"{NAME}:{plain.receiver.port}"
        }

    def test_three_are_followed(self, plain: Listener) -> None:
        def count(handler: Any) -> None:
            number = int(handler.path.rpartition("/")[2] or 0) if handler.path != "/hook" else 0
            answer(307, b"", {"Location": f"/{number + 1}"})(handler)

        plain.receiver.behave = count
        with outbound.call("GET", plain.url, redirects=9, resolver=local) as got:
            assert got.status == 307
        assert [sent.path for sent in plain.receiver.received] == ["/hook", "/1", "/2", "/3"]

    def test_another_site_does_not_get_the_token(self, plain: Listener, settings: Any) -> None:
        with receiving() as other:
            hosts = settings.OUTBOUND.hosts | {f"cdn.example.test:{other.port}"}
            settings.OUTBOUND = dataclasses.replace(settings.OUTBOUND, hosts=hosts)
            to = f"http://cdn.example.test:{other.port}/file"
            plain.receiver.behave = answer(302, b"", {"Location": to})
            other.behave = answer(200, b"bytes")
            headers = {"Authorization": "Bearer secret"}
            assert get(plain.url, redirects=1, headers=headers) == b"bytes"
            assert plain.receiver.received[0].headers["authorization"] == "Bearer secret"
            assert "authorization" not in other.received[0].headers


def drip_header(handler: Any) -> None:
    for _ in range(200):
        handler.wfile.write(b"H")
        handler.wfile.flush()
        time.sleep(0.05)


def drip_body(handler: Any) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    drip_header(handler)


def giant_header(handler: Any) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"a" * 40_000 + b"\r\n\r\n")


def many_headers(handler: Any) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"X-Many: headers\r\n" * 99_000 + b"\r\n")


def endless_continue(handler: Any) -> None:
    for _ in range(99_000):
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def not_http(handler: Any) -> None:
    handler.wfile.write(b"-ERR unknown command\r\n")


def endless_chunks(handler: Any) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(99_000):
        handler.wfile.write(b"10\r\n" + b"a" * 16 + b"\r\n")


class TestHostileAnswers:
    @pytest.mark.parametrize("behaviour", [drip_header, drip_body, lambda _: time.sleep(2)])
    def test_slow_ones_end_in_time(self, plain: Listener, behaviour: Callable[..., None]) -> None:
        plain.receiver.behave = behaviour
        began_at = time.monotonic()
        with pytest.raises(CallFailed, match="in time"):
            get(plain.url, bounds=Bounds(total_s=0.4))
        assert time.monotonic() - began_at < 2  # the drip alone takes ten

    @pytest.mark.parametrize(
        "behaviour", [giant_header, many_headers, endless_continue, not_http, endless_chunks]
    )
    def test_large_and_broken_ones_end(
        self, plain: Listener, behaviour: Callable[..., None]
    ) -> None:
        plain.receiver.behave = behaviour
        with pytest.raises(CallFailed):
            get(plain.url)

    def test_a_broken_header_puts_no_url_into_the_log(
        self, plain: Listener, caplog: pytest.LogCaptureFixture
    ) -> None:
        def no_colon(handler: Any) -> None:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nno colon\r\nContent-Length: 0\r\n\r\n")

        plain.receiver.behave = no_colon
        assert get(f"{plain.url}?token=a-secret") == b""
        assert len(plain.receiver.received) == 1
        assert "a-secret" not in caplog.text

    def test_a_long_body_ends_where_it_is_too_long(self, plain: Listener) -> None:
        plain.receiver.behave = answer(200, b"a" * 100_000)
        with pytest.raises(CallFailed, match="longer than 1000 bytes"):
            get(plain.url, bounds=Bounds(max_bytes=1000))
        assert len(get(plain.url, bounds=Bounds(max_bytes=100_000))) == 100_000

    def test_a_compressed_body_is_never_unpacked(self, plain: Listener) -> None:
        bomb = gzip.compress(b"\0" * 10_000_000)
        plain.receiver.behave = answer(200, bomb, {"Content-Encoding": "gzip"})
        with pytest.raises(CallFailed, match="compressed"):
            get(plain.url)

    def test_a_resolver_that_hangs_is_given_up(self, plain: Listener) -> None:
        with pytest.raises(CallFailed):
            get(plain.url, resolver=lambda *_: time.sleep(3) or [], bounds=Bounds(connect_s=0.2))


class TestTls:
    @pytest.fixture
    def tls(self, tmp_path: Path) -> Tls:
        return make_tls(tmp_path, NAME)

    @pytest.fixture
    def secure(self, tls: Tls, settings: Any) -> Iterator[Listener]:
        with receiving(tls=tls) as receiver:
            settings.OUTBOUND = OutboundPolicy(
                hosts=frozenset({f"{NAME}:{receiver.port}", f"wrong.test:{receiver.port}"}),
                allowed=LOOPBACK,
                ca_file=str(tls.certificate),
            )
            yield Listener(receiver, "https")

    def test_the_name_is_sent_and_its_certificate_verified(self, secure: Listener) -> None:
        secure.receiver.behave = answer(200, b"safe")
        assert get(secure.url) == b"safe"
        assert secure.receiver.server_names == [NAME]
        assert secure.receiver.received[0].headers["host"] == f"{NAME}:{secure.receiver.port}"

    def test_a_certificate_for_another_name_is_refused(self, secure: Listener) -> None:
        with pytest.raises(CallFailed, match="certificate"):
            get(secure.url.replace(NAME, "wrong.test"))
        assert secure.receiver.received == []

    def test_a_certificate_of_an_unknown_authority_is_refused(
        self, secure: Listener, settings: Any
    ) -> None:
        settings.OUTBOUND = dataclasses.replace(settings.OUTBOUND, ca_file="")
        with pytest.raises(CallFailed, match="certificate"):
            get(secure.url)
        assert secure.receiver.received == []

    def test_a_slow_body_ends_in_time(self, secure: Listener) -> None:
        secure.receiver.behave = drip_body
        with pytest.raises(CallFailed, match="in time"):
            get(secure.url, bounds=Bounds(total_s=0.5))

    def test_a_server_that_does_not_shake_hands_is_given_up(
        self, secure: Listener, settings: Any
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            hosts = frozenset({f"{NAME}:{port}"})
            settings.OUTBOUND = dataclasses.replace(settings.OUTBOUND, hosts=hosts)
            with pytest.raises(CallFailed, match="in time"):
                get(f"https://{NAME}:{port}/", bounds=Bounds(connect_s=0.3))
