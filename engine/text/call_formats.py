"""The forms in which base models write calls of tools, and their translation into one form.

`contract.messages.tool_calls` has that form. A family's facts name those that its models may write;
which one it is, the chat template says. A grammar binds the model to the form (`worker.grammar`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from contract.adapters.families import FAMILIES
from contract.messages.protocol import CALL_BEGIN, CALL_END
from contract.messages.tool_calls import BLANKS, ObjectEnd


class CallFormat(NamedTuple):
    """A form of calls: begin, head NAME middle {arguments} tail, joint, head NAME …, end.

    sign   what a chat template has that writes calls so
    joint  between two calls; None: there is one alone
    quote  stands around texts of arguments, whose keys are then bare; "": there is none
    pair   what stands before an argument's name, behind it, and behind its value; None: arguments
           are a JSON object, unless there are quotes
    """

    sign: str
    begin: str = ""
    head: str = '{"name": "'
    middle: str = '", "arguments": '
    tail: str = "}"
    joint: str | None = ", "
    end: str = "]"
    quote: str = ""
    pair: tuple[str, str, str] | None = None

    def has(self, token: str) -> bool:
        """Return whether a token's name is a part of the form."""
        parts = (
            *(self.begin, self.head, self.middle, self.tail),
            self.joint or "",
            self.end,
            self.quote,
        )
        return any(token in part for part in parts)

    def start(self, name: str) -> str:
        """Return what stands before a call's arguments."""
        return f"{self.head}{name}{self.middle}"


#: name in `contract.adapters.families.Facts.calls` -> the form
FORMATS = {
    "llama": CallFormat('"parameters": ', middle='", "parameters": ', joint=None, end=""),
    "mistral": CallFormat("[TOOL_CALLS]", begin="[TOOL_CALLS]["),
    "mistral_3": CallFormat("[TOOL_CALLS] [", begin="[TOOL_CALLS] ["),
    "mistral_args": CallFormat(
        "[ARGS]", "[TOOL_CALLS]", head="", middle="[ARGS]", tail="", joint="[TOOL_CALLS]", end=""
    ),
    "glm4": CallFormat("<|observation|>", "", head="", middle="\n", tail="", joint=None, end=""),
    "gemma4": CallFormat(
        "<|tool_call>", "", "<|tool_call>call:", "", "<tool_call|>", joint="", end="", quote='<|"|>'
    ),
    "qwen3_5": CallFormat(
        "<function=",
        "",
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        "\n",
        "",
        pair=("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "granite": CallFormat("<|tool_call|>", begin="<|tool_call|>["),
}


def call_format(config: Mapping[str, object], template: str) -> CallFormat | None:
    """Return the form of a base's calls; None: the form that is ours.

    config  its config.json, that of its text model
    """
    facts = FAMILIES.get(str(config.get("model_type")))
    for name in () if facts is None else facts.calls:
        if FORMATS[name].sign in template:
            return FORMATS[name]
    return None


class BareObject:
    """Makes JSON of an object with bare keys, whose text comes in pieces.

    quote     the mark around texts
    is_found  whether the object has ended
    """

    _WORD = re.compile(r"[^\s{}\[\],:<]+")

    def __init__(self, quote: str) -> None:
        self.is_found = False
        self._quote, self._is_in_text, self._depth = quote, False, 0

    def take(self, text: str) -> tuple[str, str]:
        """Return the next piece as JSON, and its rest, which may be part of a mark or word."""
        shown = ""
        while text and not self.is_found:
            if self._is_in_text:
                end = text.find(self._quote)
                is_whole = end >= 0
                end = end if is_whole else len(text) - _overlap(text, self._quote)
                shown += json.dumps(text[:end], ensure_ascii=False)[1:-1]
                text = text[end:]
                if not is_whole:
                    break
            if text.startswith(self._quote):
                shown, text = f'{shown}"', text[len(self._quote) :]
                self._is_in_text = not self._is_in_text
                continue
            word = self._WORD.match(text)
            if self._quote.startswith(text) or (word and word.end() == len(text)):
                break
            if word:
                is_key = text[word.end()] == ":"
                shown += json.dumps(word[0]) if is_key else word[0]
                text = text[word.end() :]
                continue
            self._depth += (text[0] in "{[") - (text[0] in "}]")
            shown, text = shown + text[0], text[1:]
            self.is_found = self._depth == 0
        return shown, text


class TaggedObject:
    """Makes JSON of values between tags, whose text comes in pieces.

    pair      see `CallFormat`
    schema    of the object, which says which values are texts
    is_found  whether something else than a value has come, which is the rest
    """

    def __init__(self, pair: tuple[str, str, str], schema: Any) -> None:
        self.is_found = False
        self._before, self._behind, self._end = pair
        self._schemas = schema.get("properties") if isinstance(schema, dict) else None
        self._key: str | None = None
        self._is_text = False
        self._opening = "{"

    def take(self, text: str) -> tuple[str, str]:
        """Return the next piece as JSON, and its rest, which may be part of a tag or value."""
        shown = ""
        while text:
            if self._key is None:
                key = text.find(self._behind)
                if self._before.startswith(text) or (text.startswith(self._before) and key < 0):
                    break
                if not text.startswith(self._before):
                    self.is_found = True
                    return shown + ("{}" if self._opening == "{" else "}"), text
                self._key = text[len(self._before) : key]
                self._is_text = is_text((self._schemas or {}).get(self._key))
                shown += f"{self._opening}{json.dumps(self._key)}: " + '"' * self._is_text
                self._opening, text = ", ", text[key + len(self._behind) :]
            end = text.find(self._end)
            is_whole = end >= 0
            end = end if is_whole else (len(text) - _overlap(text, self._end)) * self._is_text
            if self._is_text:
                shown += json.dumps(text[:end], ensure_ascii=False)[1:-1] + '"' * is_whole
            elif is_whole:
                shown += _as_json(text[:end])
            text = text[end + len(self._end) * is_whole :]
            if not is_whole:
                break
            self._key = None
        return shown, text


def is_text(schema: Any) -> bool:
    """Return whether a schema's values are texts alone."""
    return isinstance(schema, dict) and schema.get("type") == "string"


def _as_json(text: str) -> str:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `mark`."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


class CallTranslator:
    """Translates the text of one answer while it is written.

    functions  the names of those that may be called -> the schemas of their arguments
    """

    def __init__(self, form: CallFormat, functions: Mapping[str, Any]) -> None:
        self._form = form
        brace = "{" if form.quote else ""  # where the name's end is
        joint = form.tail + (form.joint or "")
        self._functions = functions
        self._firsts = {f"{form.begin}{form.start(name)}{brace}": name for name in functions}
        self._nexts = {f"{joint}{form.start(name)}{brace}": name for name in functions}
        if form.joint is None:
            self._nexts = {}
        self._held, self._is_text = "", False
        self._arguments: ObjectEnd | BareObject | TaggedObject | None = None
        self._has_calls = False

    def feed(self, text: str) -> str:
        """Return what more text means; its end is held back where it may begin a call."""
        if self._is_text:
            return text
        self._held += text
        shown = ""
        while True:
            if self._arguments is not None:
                if isinstance(self._arguments, ObjectEnd):
                    end = self._arguments.find(self._held)
                    more, self._held = self._held[:end], self._held[end:]
                else:
                    more, self._held = self._arguments.take(self._held)
                shown += more
                if not self._arguments.is_found:
                    return shown
                self._arguments = None
                shown += "}" + CALL_END
            found = self._begun()
            if found is None:
                return shown + self._as_text()
            start, name = found
            quote, self._has_calls = self._form.quote, True
            self._held = self._held[len(start) - bool(quote) :]
            self._arguments = BareObject(quote) if quote else ObjectEnd()
            if self._form.pair is not None:
                self._arguments = TaggedObject(self._form.pair, self._functions[name])
            shown += f'{CALL_BEGIN}{{"name": {json.dumps(name)}, "arguments": '

    def mark(self, token: str) -> str:
        """Return a special token's name if it is a part of a call; it has no text else."""
        return token if self._form.has(token) else ""

    def finish(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return "" if self._has_calls else held

    def _begun(self) -> tuple[str, str] | None:
        """Return the beginning of a call that is whole, and the call's name."""
        starts = self._nexts if self._has_calls else self._firsts
        if not self._has_calls:
            text = self._held.lstrip(BLANKS)
            self._held = text if any(text.startswith(start) for start in starts) else self._held
        return next(
            ((start, name) for start, name in starts.items() if self._held.startswith(start)), None
        )

    def _as_text(self) -> str:
        """Return what was held back once it cannot begin a call."""
        text = self._held.lstrip(BLANKS)
        if self._has_calls or any(start.startswith(text) for start in self._firsts):
            return ""
        self._is_text = True
        return self.finish()
