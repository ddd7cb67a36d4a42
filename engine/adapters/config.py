"""Reads adapter_config.json with `contract.adapters.peft_config`, and raises the engine's errors.

The contract finds every problem of an adapter; the engine reports the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contract.adapters.peft_config import ENGINE_LIMITS, LoraConfig, load_json, read_config
from contract.adapters.problems import AdapterProblems
from engine.errors import AdapterMismatch

MAX_CONFIG_BYTES = ENGINE_LIMITS.max_bytes


def parse_config(text: bytes) -> dict[str, Any]:
    """Parse adapter_config.json; raise AdapterMismatch when it is not a JSON object."""
    try:
        return load_json(text, MAX_CONFIG_BYTES)
    except AdapterProblems as found:
        raise mismatch(found) from found


def check_config(config: Mapping[str, Any]) -> LoraConfig:
    """Read the config's fields; raise AdapterMismatch naming the first unsupported one."""
    try:
        return read_config(config, ENGINE_LIMITS)
    except AdapterProblems as found:
        raise mismatch(found) from found


def mismatch(found: AdapterProblems) -> AdapterMismatch:
    """Make the engine's error of the first problem."""
    first = found.problems[0]
    return AdapterMismatch(str(first), param=first.field or None)
