"""Chat with an adapter, and print the answer while it is generated.

python examples/streaming.py
"""

from __future__ import annotations

from samples import arguments, styles

from engine import DashEngine

CHAT = [
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "Arr, matey! I be a sailor."},
    {"role": "user", "content": "What do you eat?"},
]


def main() -> None:
    args = arguments(__doc__)
    with DashEngine(args.base) as engine:
        engine.register_adapter("pirate", styles(args.base, args.work)["pirate"])
        for piece in engine.stream(CHAT, "pirate", max_new_tokens=40):
            print(piece, end="", flush=True)
        print(f"\n[{piece.finish_reason}, {len(piece.completion.token_ids)} tokens]")


if __name__ == "__main__":
    main()
