"""Keys of rows that the reader does not use: neutral keys, and reasons why others are refused."""

from __future__ import annotations

import json
from typing import Any

#: Largest number of messages in a row.
MAX_MESSAGES = 2048
#: Largest number of items in each list of a message, and of functions in a row.
MAX_ITEMS = 128
#: Keys without effect in a row, a message, a part of a content, a tool or a call.
NEUTRAL = frozenset(
    (
        "id",
        "uuid",
        "uid",
        "idx",
        "index",
        "hash",
        "custom_id",
        "row_id",
        "message_id",
        "prompt_id",
        "conversation_id",
        "session_id",
        "sample_id",
        "source",
        "dataset",
        "dataset_name",
        "subset",
        "split",
        "origin",
        "url",
        "license",
        "metadata",
        "meta",
        "extra",
        "tags",
        "comment",
        "notes",
        "title",
        "author",
        "version",
        "category",
        "topic",
        "domain",
        "task",
        "task_type",
        "difficulty",
        "lang",
        "language",
        "num_turns",
        "num_tokens",
        "token_count",
        "schemaVersion",
        "timestamp",
        "date",
        "created",
        "created_at",
        "updated_at",
        "model",
        "model_name",
        "generator",
        "annotator",
        "cache_control",
    )
)
#: Keys of a message that decide whether it is learned: OpenAI's `weight`, and other trainers'
#: names.
NUMBER_SWITCHES = ("weight", "loss_weight")
BOOLEAN_SWITCHES = ("loss", "train", "training")
SWITCHES = NUMBER_SWITCHES + BOOLEAN_SWITCHES

PREFERENCE = (
    "is a key of preference tuning in a form that is not read: write `input`, `preferred_output` "
    "and `non_preferred_output`"
)
_NO_TEXT = "is not text, and the models read only text: remove such rows"
_THOUGHTS = "would not be learned: write it as `reasoning_content`, a string beside the content"
UNKNOWN = (
    "is not a known key, and may change what is learned: if it does not, move it into `metadata`"
)
NO_ROW = "has neither `messages` nor `prompt` and `completion`, and has no other known format"
_PREFERENCE_KEYS = frozenset(
    (
        "preferred_output",
        "non_preferred_output",
        "preference",
        "margin",
        "kto_tag",
        "score_chosen",
        "score_rejected",
        "reward",
        "rewards",
    )
)
#: A pair has one of these.
_PAIR_KEYS = frozenset(("preferred_output", "non_preferred_output", "chosen", "rejected_response"))
_MEDIA_KEYS = frozenset(
    (
        "image",
        "images",
        "image_url",
        "video",
        "videos",
        "audio",
        "audios",
        "objects",
        "attachments",
        "files",
    )
)
_THOUGHT_KEYS = frozenset(("reasoning_content", "reasoning", "thinking", "thinking_blocks"))
_THOUGHT_PARTS = (
    "thinking",
    "redacted_thinking",
    "think",
    "reasoning",
    "reasoning_text",
    "reasoningContent",
)


def says_nothing(value: Any) -> bool:
    """Return whether this value of a key means the same as no key: exports fill columns with it."""
    return value is None or value == [] or value == {}


def is_preference(name: str, value: Any) -> bool:
    """Return whether this value of a key marks an answer as better or worse than another."""
    if name == "label":
        return isinstance(value, bool)
    return name in _PREFERENCE_KEYS or name.startswith(("chosen", "rejected"))


def is_pair(row: Any) -> bool:
    """Return whether a row is a pair of answers in one of the forms that are read."""
    if not isinstance(row, dict) or _PAIR_KEYS.isdisjoint(row):
        return False
    keys = {name for name, value in row.items() if not says_nothing(value)}
    has_response = {"messages", "rejected_response"} <= keys
    is_trl = {"chosen", "rejected"} <= keys and not keys & {"conversations", "instruction"}
    return has_response or is_trl or bool({"preferred_output", "non_preferred_output"} & keys)


def refusal(name: str, value: Any) -> str:
    """Return why a key that is neither read nor neutral is refused."""
    if is_preference(name, value):
        return PREFERENCE
    if name in _MEDIA_KEYS:
        return _NO_TEXT
    return _THOUGHTS if name in _THOUGHT_KEYS else UNKNOWN


def part_refusal(part: Any) -> str:
    """Return why a part of a content that is not text is refused."""
    kinds = [*part, part.get("type")] if isinstance(part, dict) else []
    return _THOUGHTS if any(kind in _THOUGHT_PARTS for kind in kinds) else _NO_TEXT


def shown(name: str) -> str:
    """Return a stranger's key in a form that is safe in a message."""
    return name if name.isprintable() and len(name) <= 60 else ascii(name[:60])


class NotConverted(Exception):
    """The row does not convert without loss; the arguments are the field and the message."""


class Fields:
    """The keys of an object, each taken once; the keys that remain are neutral or a loss."""

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, dict):
            raise NotConverted(where, "must be an object")
        self._left = {name: each for name, each in value.items() if not says_nothing(each)}
        self._where = where

    def place(self, name: str) -> str:
        return f"{self._where}.{shown(name)}" if self._where else shown(name)

    def take(self, *names: str) -> Any:
        """Return the value of the first of these keys that exists; None if none does."""
        return next((self._left.pop(name) for name in names if name in self._left), None)

    def take_text(self, *names: str) -> str:
        """Return the text of the first of these keys that exists."""
        name = next((name for name in names if name in self._left), names[0])
        value = self.take(name)
        if not isinstance(value, str):
            raise NotConverted(self.place(name), "must be a string")
        return value

    def take_all(self, *names: str) -> dict[str, Any]:
        """Return the existing ones of these keys, to be kept unchanged."""
        return {name: self._left.pop(name) for name in names if name in self._left}

    def rest(self) -> dict[str, Any]:
        """Return the neutral keys that remain. Raises NotConverted for any other key."""
        for name, value in self._left.items():
            if name not in NEUTRAL:
                raise NotConverted(self.place(name), refusal(name, value))
        return self._left


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
