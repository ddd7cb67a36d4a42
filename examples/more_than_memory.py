"""Run more adapters than fit into memory: the engine loads and evicts them as needed.

python examples/more_than_memory.py
"""

from __future__ import annotations

from samples import arguments, random_adapters

from engine import DashConfig, DashEngine

NUM_CLIENTS = 24


def main() -> None:
    args = arguments(__doc__)
    paths = random_adapters(args.base, args.work, NUM_CLIENTS)
    file_bytes = sum(file.stat().st_size for path in paths.values() for file in path.iterdir())
    pool = file_bytes // 4
    config = DashConfig(adapter_vram_pool=pool, kv_pool="128MB", host_cache=pool)
    with DashEngine(args.base, config) as engine:
        for name, path in paths.items():
            engine.register_adapter(name, path)
        answers = engine.generate(["Once upon a time"] * NUM_CLIENTS, list(paths), max_new_tokens=8)
        for name, answer in zip(paths, answers, strict=True):
            print(f"{name}: {answer}")
        print(f"{file_bytes / 1e6:.0f} MB of adapters, a pool of {pool / 1e6:.0f} MB")
        print(engine.stats())


if __name__ == "__main__":
    main()
