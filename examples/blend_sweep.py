"""Blend two adapters with eleven different weights in one batch.

python examples/blend_sweep.py
"""

from __future__ import annotations

from samples import arguments, styles

from engine import DashEngine

QUESTION = [{"role": "user", "content": "What is the moon?"}]


def main() -> None:
    args = arguments(__doc__)
    with DashEngine(args.base) as engine:
        for name, path in styles(args.base, args.work).items():
            engine.register_adapter(name, path)
        blends = [{"pirate": 1 - i / 10, "poet": i / 10} for i in range(11)]
        answers = engine.generate([QUESTION] * len(blends), blends, max_new_tokens=16)
        for blend, answer in zip(blends, answers, strict=True):
            print(f"pirate {blend['pirate']:.1f}, poet {blend['poet']:.1f}: {answer}")


if __name__ == "__main__":
    main()
