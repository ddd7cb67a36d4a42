"""Three clients, three adapters, one batch: the offline API.

    python examples/many_adapters.py [--base FOLDER] [ADAPTER_FOLDER ...]

Without adapter folders it makes two random ones, so that something differs. A folder's own name
becomes the adapter's name.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.workload import save_random_adapter
from engine import DashConfig, DashEngine
from engine.config import ModelConfig

QUESTION = "Name the capital of France."
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 40}},
    "required": ["capital"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", type=Path, default=Path(".cache/base/smollm2-135m-instruct"))
    parser.add_argument("adapters", type=Path, nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = args.adapters or make_adapters(args.base, Path(folder))
        with DashEngine(args.base, DashConfig(max_concurrent_adapters=8)) as engine:
            ask(engine, paths)


def make_adapters(base: Path, folder: Path) -> list[Path]:
    model = ModelConfig.from_folder(base)
    return [
        save_random_adapter(folder / name, model, rank=rank, seed=rank)
        for name, rank in (("tenant-a", 4), ("tenant-b", 16))
    ]


def ask(engine: DashEngine, paths: list[Path]) -> None:
    for path in paths:
        engine.register_adapter(path.name, path)
    chat = [{"role": "user", "content": QUESTION}]
    prompt = engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    names = [path.name for path in paths]
    blend = {name: 1 / len(names) for name in names}
    adapters = [None, *names, blend]
    answers = engine.generate([prompt] * len(adapters), adapters, max_new_tokens=24)
    for adapter, answer in zip(adapters, answers, strict=True):
        print(f"{adapter or 'base'}: {answer} [{answer.finish_reason}]")
    (constrained,) = engine.generate(prompt, json_schema=json.dumps(SCHEMA), max_new_tokens=64)
    print(f"as JSON: {constrained}")
    print(engine.stats())


if __name__ == "__main__":
    main()
