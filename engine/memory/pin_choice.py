"""Who gets the pages for pins if they do not suffice for all. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def choose_pins(
    wanted: Sequence[tuple[str, str]], num_pages: Mapping[str, int], max_pages: int
) -> list[str]:
    """Return the names to pin: of each tenant the first, then of each the second, and so on.

    What does not fit is passed over. One tenant gets half of the pages at most.
    """
    of_tenant: dict[str, list[str]] = {}
    for tenant_id, name in wanted:
        of_tenant.setdefault(tenant_id, []).append(name)
    chosen: dict[str, None] = {}
    used = dict.fromkeys(of_tenant, 0)
    for turn in range(max(map(len, of_tenant.values()), default=0)):
        for tenant_id, names in of_tenant.items():
            if turn >= len(names) or names[turn] in chosen:
                continue
            pages = num_pages[names[turn]]
            has_quota = used[tenant_id] + pages <= max_pages // 2
            if has_quota and sum(used.values()) + pages <= max_pages:
                chosen[names[turn]] = None
                used[tenant_id] += pages
    return list(chosen)
