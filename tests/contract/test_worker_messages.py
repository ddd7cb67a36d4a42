"""What a heartbeat says of adapters, and what old and new processes make of each other's words."""

from __future__ import annotations

import json
from typing import Any

from contract.messages.protocol import AdapterRef, Control, ControlMessage, Heartbeat, Tier
from contract.messages.worker_messages import MAX_TOLD, TOLD_CHARS, told


def beat(**fields: Any) -> Heartbeat:
    return Heartbeat(
        worker_id="w", boot_id="b", pool="p", base_model="m", base_revision="r", device="cpu",
        **fields,
    )  # fmt: skip


def digest(number: int) -> str:
    return f"{number:064x}"[::-1]


def test_the_fastest_tier_counts() -> None:
    every = tuple(map(digest, range(3)))
    said = beat(resident_digests=every[:1], host_digests=told(every[:2]), disk_digests=told(every))
    again = Heartbeat.decode(said.encode())
    assert again == said
    assert again.tiers_of(map(digest, range(4))) == {
        digest(n): again.tier_of(digest(n)) for n in range(4)
    }
    assert [again.tier_of(digest(n)) for n in range(4)] == [
        Tier.GPU, Tier.HOST, Tier.DISK, Tier.STORE,
    ]  # fmt: skip


def test_a_heartbeat_stays_short() -> None:
    many = tuple(map(digest, range(100_000)))
    names = told(many)
    assert len(names) == MAX_TOLD
    assert names[-1] == many[-1][:TOLD_CHARS]
    assert len(beat(host_digests=names, disk_digests=names).encode()) < 21_000


def test_a_prefetch_crosses_the_wire() -> None:
    ref = AdapterRef(digest=digest(1), config_key="c", tensors_key="t", num_bytes=5)
    asked = ControlMessage(
        action=Control.PREFETCH, adapter=ref, tier=Tier.HOST, tenant_id="t", pin_s=9.0
    )
    assert ControlMessage.decode(asked.encode()) == asked
    assert ControlMessage.decode(b'{"action":"forget","digest":"x"}').adapter is None


def test_what_a_newer_process_says_can_be_read() -> None:
    sent = {"action": "dance", "tempo": 3, "adapter": None}
    assert ControlMessage.decode(json.dumps(sent)).action == "dance"
    newer = json.loads(beat().encode()) | {"moon_digests": ["x"]}
    assert Heartbeat.decode(json.dumps(newer)) == beat()
