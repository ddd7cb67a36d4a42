"""What is removed from a log line, and what stays."""

from __future__ import annotations

import pytest

from contract.process.log_secrets import MAX_CHARS, mask_secrets, masked

SECRET = "h2Kq9sWmXv7aB3"
HIDDEN = [
    f"lk_live_{SECRET}",
    f"lko_live_{SECRET}",
    f"Authorization: Bearer {SECRET}",
    f"Basic {SECRET}==",
    f"connect to redis://:{SECRET}@redis:6379/0 failed",
    f"postgresql://lorikeet_app:{SECRET}@db/lorikeet",
    f"PUT http://s3/b/k?X-Amz-Expires=60&X-Amz-Signature={SECRET}&x=1",
    f"?X-Amz-Credential={SECRET}/20261123/us-east-1",
    f"/console/account/password/reset/key/{SECRET}/",
    f"https://hub/x?a=1&access_token={SECRET}",
    f"hf_{SECRET}{SECRET}",
    f'new row violates a check\nDETAIL:  Failing row contains (7, "{SECRET}", null).',
    f"duplicate key\nDETAIL:  Key (email)=({SECRET}) already exists.",
    f"1 validation error for Row\n  bad type [input_value='{SECRET}', input_type=str]",
    f"x=%6ck_live_{SECRET}",
]
SHOWN = [
    "req_0190f2c8a7 of the dead worker-0: requeue",
    "adapter 91ab…: 12 % of 30 MiB in 0.2 s",
    "lk_live is how a key begins",
    "http://127.0.0.1:8333/lorikeet/t/7/a.safetensors?partNumber=3",
    "postgresql://lorikeet_app@db:5432/lorikeet",
    "basic authentication is not offered",
]


@pytest.mark.parametrize("text", HIDDEN)
def test_secrets_are_masked_wherever_they_are(text: str) -> None:
    event = {"event": text, "url": text, "exception": [{"exc_value": text}], "n": (1, text)}
    assert SECRET in str(event)
    assert SECRET not in str(mask_secrets(None, "", event))


@pytest.mark.parametrize("text", SHOWN)
def test_other_text_stays(text: str) -> None:
    assert masked(text) == text


def test_fields_of_what_people_said_are_never_written() -> None:
    event = {"event": "x", "prompt": "hello", "job": {"messages": ["hello"], "model": "m"}}
    assert mask_secrets(None, "", event) == {
        "event": "x",
        "prompt": "…",
        "job": {"messages": "…", "model": "m"},
    }


def test_a_line_is_bounded_and_is_one_line() -> None:
    deep: list[object] = []
    deep.append(deep)
    event = {
        "event": "a\nb\x1b[2J\u2028",
        "text_of": "c\x1b[2J\n",
        "long": "x" * 10 * MAX_CHARS,
        "many": [0] * 10_000,
        "deep": deep,
        "object": Exception("said"),
    }
    line = mask_secrets(None, "", event)
    assert line["event"] == "a\\nb\\x1b[2J\\u2028"
    assert line["text_of"] == "c\\x1b[2J\n"  # a value: quoted in both formats
    assert len(line["long"]) == MAX_CHARS + 1
    assert len(line["many"]) == 100
    assert line["object"] == "said"
    assert len(str(line)) < 2 * MAX_CHARS
