"""The prompts by which a worker compares a quantised base at load, and what it tells of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from engine.stats import Precision

#: Prose, a letter, code, data, questions and another language: some 250 tokens.
TEXTS = (
    "The harbour was quiet when the last boat came in. Two men carried the nets up to the wall and "
    "hung them there to dry, while the women counted the fish and laid them on ice. Nobody spoke "
    "of the storm that the radio had promised for the night.",
    "Dear Ms Okafor, thank you for your order of 12 March 2024. Your invoice no. A-1187 amounts to "
    "1,250.00 EUR and is due within thirty days. Please let us know if the delivery is late.",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n"
    "    if len(ordered) % 2:\n        return ordered[middle]\n"
    "    return (ordered[middle - 1] + ordered[middle]) / 2\n",
    '{"name": "Ada Lovelace", "email": "ada@example.com", "items": [{"id": 17, "price": 4.5}]}',
    "Question: Why is the sky blue? Answer: Air scatters short waves of light more than long ones, "
    "so blue light reaches the eye from all directions.",
    "Die Sitzung beginnt am Montag um neun Uhr. Bitte bringen Sie die Unterlagen mit.",
)


def precision_prompts(folder: Path) -> tuple[tuple[int, ...], ...]:
    """Return the prompts as token ids; imported here, as it loads the tokenizers' library."""
    from engine.text.codec import TextCodec

    codec = TextCodec(folder)
    return tuple(tuple(codec.encode(text, add_special_tokens=True)) for text in TEXTS)


def tell(precision: Precision) -> dict[str, Any]:
    """Return it as JSON, with three digits, without what is empty."""
    told = {name: value for name, value in dataclasses.asdict(precision).items() if value}
    if precision.kinds:
        told["kinds"] = {
            kind: {name: float(f"{value:.3g}") for name, value in figures.items()}
            for kind, figures in told["kinds"].items()
        }
    return told


def describe(precision: Precision) -> str:
    """Return one line for the log; empty: nothing was compared."""
    if not precision.kinds:
        return ""
    kinds = "; ".join(
        f"{kind}: KL {each.kl:.3g}, top-1 {each.agreement:.1%}, logit error {each.logit_error:.3g}"
        for kind, each in precision.kinds.items()
    )
    return (
        f"base {precision.weights}, KV {precision.kv}, compared with {precision.compared_with} "
        f"on {precision.num_tokens} tokens: {kinds}"
    )
