"""adapter_config.json as the engine takes it: `contract.peft_config`, in the engine's errors.

The contract finds everything that is wrong with an adapter; the engine names the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contract.adapter_problems import AdapterProblems
from contract.peft_config import ENGINE_LIMITS, LoraConfig, load_json, read_config
from engine.errors import AdapterMismatch

MAX_CONFIG_BYTES = ENGINE_LIMITS.max_bytes


def parse_config(text: bytes) -> dict[str, Any]:
    """adapter_config.json as a dict; raise AdapterMismatch when it is not one."""
    try:
        return load_json(text, MAX_CONFIG_BYTES)
    except AdapterProblems as found:
        raise mismatch(found) from found


def check_config(config: Mapping[str, Any]) -> LoraConfig:
    """Its effect; raise AdapterMismatch naming the first field that cannot be honoured."""
    try:
        return read_config(config, ENGINE_LIMITS)
    except AdapterProblems as found:
        raise mismatch(found) from found


def mismatch(found: AdapterProblems) -> AdapterMismatch:
    first = found.problems[0]
    return AdapterMismatch(str(first), param=first.field or None)
