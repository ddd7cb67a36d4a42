"""Reads what a model folder says of its tokenizer, without the tokenizer's library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; {} if there is no such file."""
    settings: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return settings


def read_special_tokens(model_dir: Path) -> dict[str, str]:
    """Return bos_token, eos_token and so on, by name."""
    tokens = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):  # the second one prevails
        for name, value in read_json(model_dir / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
    return tokens


def read_end_id(model_dir: Path) -> int | None:
    """Return the id of the tokenizer's end token; None: it has none, or there is no tokenizer."""
    name = read_special_tokens(model_dir).get("eos_token")
    if name is None:
        return None
    listed = read_json(model_dir / "tokenizer_config.json").get("added_tokens_decoder", {})
    for token_id, token in listed.items():
        if token.get("content") == name:
            return int(token_id)
    settings = read_json(model_dir / "tokenizer.json")
    for token in settings.get("added_tokens", ()):
        if token["content"] == name:
            return int(token["id"])
    vocab = settings.get("model", {}).get("vocab")
    return vocab.get(name) if isinstance(vocab, dict) else None
