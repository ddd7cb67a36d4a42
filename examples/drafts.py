"""Print how many tokens each step gives when tokens are drafted.

python examples/drafts.py
"""

from __future__ import annotations

import json

from samples import arguments

from engine import DashConfig, DashEngine, SamplingParams

LETTER = "On 5 May we ordered 12 filters and 3 pumps from Falcon Energy, Falcon Road 7, Bremen."
QUESTION = [{"role": "user", "content": f"Name sender and order number as JSON. {LETTER}"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "sender_name": {"enum": ["Falcon Energy", "Lumen Print"]},
        "delivery_country": {"enum": ["Germany", "Austria"]},
        "is_confirmed": {"type": "boolean"},
    },
    "required": ["sender_name", "delivery_country", "is_confirmed"],
    "additionalProperties": False,
}


def main() -> None:
    args = arguments(__doc__)
    texts = []
    for speculation in (False, True):
        with DashEngine(args.base, DashConfig(speculation=speculation)) as engine:
            answers = engine.generate(
                [QUESTION] * 2,
                json_schema=json.dumps(SCHEMA),
                max_new_tokens=100,
                sampling=SamplingParams(temperature=0.0),
            )
            stats = engine.stats()
        texts.append([answer.text for answer in answers])
        name = "drafts" if speculation else "no drafts"
        print(f"{name}: {stats.tokens_per_step:.2f} tokens per step and request")
        for source, counts in stats.drafts.items():
            print(f"  {source}: {counts.accepted} of {counts.drafted} right")
    print(f"the same answers: {texts[0] == texts[1]}")


if __name__ == "__main__":
    main()
