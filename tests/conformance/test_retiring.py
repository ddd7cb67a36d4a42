"""The end of a version, as a client over HTTP sees it: headers, the list, the last day."""

from __future__ import annotations

import datetime as dt
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.conftest import Served, say

MODEL = "letters"


def manage(served: Served, action: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = httpx.post(
        f"{served.url}/api/v1/adapters/{MODEL}/versions/1/{action}",
        headers={"authorization": f"Bearer {served.key()}"},
        json=body or {},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ask(served: Served, model: str = MODEL, **fields: Any) -> Any:
    raw = served.client(max_retries=5).chat.completions.with_raw_response
    return raw.create(model=model, messages=say("x"), **fields)


def wait_for(served: Served, header: str, value: str | None) -> None:
    """Until the gateway knows of the change: half a second, and more on a busy machine."""
    end = dt.datetime.now() + dt.timedelta(seconds=20)
    while (seen := ask(served).headers.get(header)) != value:
        assert dt.datetime.now() < end, (header, seen)


def test_a_deprecated_version_says_so_in_each_answer(served: Served) -> None:
    day = dt.datetime.now(dt.UTC).date() + dt.timedelta(days=400)
    try:
        row = manage(served, "deprecate", {"shutdown_date": day.isoformat()})
        at = dt.datetime.fromisoformat(row["deprecated_at"])
        wait_for(served, "deprecation", f"@{int(at.timestamp())}")
        sunset = f"{day:%a, %d %b %Y} 00:00:00 GMT"
        assert ask(served).headers["sunset"] == sunset
        assert ask(served, stream=True).headers["sunset"] == sunset
        assert ask(served, f"{MODEL}@1").headers["sunset"] == sunset
        assert "sunset" not in ask(served, "invoices").headers
        listed = served.client().models.retrieve(MODEL)
        assert listed.to_dict()["shutdown_date"] == day.isoformat()
        manage(served, "deprecate", {"shutdown_date": dt.datetime.now(dt.UTC).date().isoformat()})
        with pytest.raises(openai.NotFoundError) as caught:
            wait_for(served, "sunset", None)
        assert caught.value.code == "model_not_found"
        assert "was shut down on" in caught.value.message
    finally:
        manage(served, "undeprecate")
    end = dt.datetime.now() + dt.timedelta(seconds=20)
    while True:
        try:
            assert "deprecation" not in ask(served).headers
            break
        except openai.NotFoundError:
            assert dt.datetime.now() < end
