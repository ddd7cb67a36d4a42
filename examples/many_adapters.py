"""Run several adapters, a blend of them and the base model in one batch.

python examples/many_adapters.py
"""

from __future__ import annotations

from samples import arguments, styles

from engine import DashConfig, DashEngine

QUESTION = [{"role": "user", "content": "What is the moon?"}]


def main() -> None:
    args = arguments(__doc__)
    paths = styles(args.base, args.work)
    with DashEngine(args.base, DashConfig(max_concurrent_adapters=8)) as engine:
        for name, path in paths.items():
            engine.register_adapter(name, path)
        adapters = [None, "pirate", "poet", {"pirate": 0.5, "poet": 0.5}]
        answers = engine.generate([QUESTION] * 4, adapters, max_new_tokens=24)
        for adapter, answer in zip(adapters, answers, strict=True):
            print(f"{adapter or 'base'}: {answer}")
        print(engine.stats())


if __name__ == "__main__":
    main()
