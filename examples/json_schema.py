"""Generate answers that obey a JSON schema, with any adapter.

python examples/json_schema.py
"""

from __future__ import annotations

import json

from samples import arguments, styles

from engine import DashEngine

QUESTION = [{"role": "user", "content": "Name the capital of France, and say how sure you are."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "capital": {"type": "string", "maxLength": 20},
        "certainty": {"enum": ["low", "medium", "high"]},
    },
    "required": ["capital", "certainty"],
    "additionalProperties": False,
}


def main() -> None:
    args = arguments(__doc__)
    with DashEngine(args.base) as engine:
        engine.register_adapter("pirate", styles(args.base, args.work)["pirate"])
        answers = engine.generate(
            [QUESTION] * 2, [None, "pirate"], json_schema=json.dumps(SCHEMA), max_new_tokens=100
        )
        for name, answer in zip(("base", "pirate"), answers, strict=True):
            print(f"{name}: {answer.schema_error or json.loads(answer.text)}")


if __name__ == "__main__":
    main()
