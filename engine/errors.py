"""The tree of all errors that the engine raises or reports.

    EngineError                      internal
    ├── RequestError                 invalid_request
    │   ├── InvalidPrompt            invalid_prompt
    │   ├── ContextTooLong           context_length_exceeded
    │   ├── BadGrammar               invalid_response_format
    │   └── DeadlineExceeded         deadline_exceeded
    │       └── DeadlineUnreachable  deadline_exceeded
    ├── AdapterError                 adapter_unavailable
    │   ├── AdapterMismatch          adapter_incompatible
    │   ├── AdapterOverflow          adapter_incompatible
    │   ├── AdapterUnavailable       adapter_unavailable
    │   │   └── AdapterDamaged       adapter_unavailable
    │   └── UnknownAdapter           adapter_unavailable
    ├── GrammarFailed                grammar_failed
    ├── OutOfPages                   overloaded
    ├── PinLimitExceeded             overloaded
    ├── OutOfMemory                  internal
    └── UnsupportedModel             internal

The right column is `code`: the value of `contract.messages.protocol.ErrorCode` that a client
receives.
"""

from __future__ import annotations

MAX_MESSAGE_CHARS = 2000


class EngineError(Exception):
    """The root; raised itself only for errors that the engine does not expect.

    message  one sentence for the person who sent the request
    param    the field of the request, or of the adapter's config, that is wrong

    Both may quote untrusted files and requests: each is cut to `MAX_MESSAGE_CHARS`, and characters
    that are not printable or that UTF-8 cannot encode are escaped.
    """

    code = "internal"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.message = _printable(message)
        self.param = None if param is None else _printable(param)
        super().__init__(self.message)


class RequestError(EngineError):
    """A field of the request has a value that the engine does not accept."""

    code = "invalid_request"


class InvalidPrompt(RequestError):
    """The prompt is empty or holds a token id outside the vocabulary."""

    code = "invalid_prompt"


class ContextTooLong(RequestError):
    """The prompt leaves no room for a single token in the model's context."""

    code = "context_length_exceeded"


class BadGrammar(RequestError):
    """The JSON schema cannot be compiled, or nothing can satisfy it."""

    code = "invalid_response_format"


class GrammarFailed(EngineError):
    """A grammar that compiled cannot be followed to an end: the request's sender cannot help it.

    reason  the decoder's, a word without anything of the request
    """

    code = "grammar_failed"

    def __init__(self, reason: str = "") -> None:
        super().__init__(
            "The grammar of the answer's format allows no further token. This is a defect of the "
            "server: report it with the format, or try again with another seed."
        )
        self.reason = reason


class DeadlineExceeded(RequestError):
    """The request's deadline passed before it finished."""

    code = "deadline_exceeded"


class DeadlineUnreachable(DeadlineExceeded):
    """The request cannot finish before its deadline, which has not passed yet."""


class AdapterError(EngineError):
    """The request's adapter is wrong or missing; the request itself is valid."""

    code = "adapter_unavailable"


class AdapterMismatch(AdapterError):
    """The adapter's config or tensors do not fit the base model or are of an unsupported kind."""

    code = "adapter_incompatible"


class AdapterOverflow(AdapterError):
    """The adapter's values are finite, but so large that the model's numbers overflow."""

    code = "adapter_incompatible"


class AdapterUnavailable(AdapterError):
    """The adapter's file could not be read when it was needed."""


class AdapterDamaged(AdapterUnavailable):
    """The adapter's files are not those that its digest names."""


class UnknownAdapter(AdapterError):
    """No adapter is registered under the digest that the request names."""


class OutOfPages(EngineError):
    """The page pool is too small for this one request or adapter, even when nothing else runs."""

    code = "overloaded"


class PinLimitExceeded(EngineError):
    """More pages would be pinned than `EngineConfig.pin_share` allows."""

    code = "overloaded"


class OutOfMemory(EngineError):
    """The device has too little memory for the weights, a step and the smallest useful arena."""


class UnsupportedModel(EngineError):
    """The base model needs something that the decoder does not implement."""


def _printable(text: str) -> str:
    text = text[: MAX_MESSAGE_CHARS + 1]
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[: MAX_MESSAGE_CHARS - 1]}…"
