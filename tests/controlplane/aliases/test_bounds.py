"""What an alias's history may hold, and which versions it may name."""

from __future__ import annotations

import datetime as dt

import pytest

from controlplane.adapters import promotion
from controlplane.adapters.models import Adapter, AdapterVersion, today
from controlplane.aliases import services
from controlplane.aliases.models import Alias, AliasRevision
from controlplane.errors import Conflict
from tests.controlplane.aliases.conftest import parts


def numbers() -> list[int]:
    rows = AliasRevision.objects.order_by("number")
    return list(rows.values_list("number", flat=True))


def test_long_revisions_are_kept_by_their_length(
    alias: Alias, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "MAX_REVISION_CHARS", 1000)
    for size in range(300, 308):
        services.alias_change(alias=alias, changes={"system_prompt": "x" * size})
    assert numbers() == [7, 8, 9]
    services.alias_change(alias=alias, changes={"system_prompt": "y" * 5000})
    assert numbers() == [9, 10], "there is always one to go back to"
    services.alias_roll_back(alias=alias)
    assert AliasRevision.objects.get(number=11).system_prompt == "x" * 307


def ends(adapter: Adapter, number: int, day: dt.date | None = None) -> None:
    rows = AdapterVersion.objects.filter(adapter=adapter, number=number)
    rows.update(shutdown_date=day or today())


def test_what_was_shut_down_does_not_become_live(adapter: Adapter, alias: Alias) -> None:
    """Also before the sweep has retired it."""
    for number in (2, 3):
        promotion.adapter_version_promote(version=adapter.versions.get(number=number))
    ends(adapter, 2)
    with pytest.raises(Conflict) as raised:
        promotion.adapter_version_promote(version=adapter.versions.get(number=2))
    assert raised.value.code == "version_not_ready" and "shut down" in str(raised.value)
    with pytest.raises(Conflict) as raised:
        services.alias_change(alias=alias, changes={"primary": parts("invoices@2")})
    assert raised.value.code == "version_not_ready"
    adapter.refresh_from_db()
    promotion.adapter_roll_back(adapter=adapter)
    adapter.refresh_from_db()
    assert adapter.live_version is not None
    assert adapter.live_version.number == 1, "a rollback passes over it"
    ends(adapter, 2, today() + dt.timedelta(days=1))
    promotion.adapter_version_promote(version=adapter.versions.get(number=2))
