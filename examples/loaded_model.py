"""Run adapters on a Hugging Face model that is already loaded, without copying its weights.

python examples/loaded_model.py
"""

from __future__ import annotations

import torch
from samples import arguments, styles
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import DashEngine

PROMPT = "The capital of France is"


def main() -> None:
    args = arguments(__doc__)
    model = AutoModelForCausalLM.from_pretrained(args.base).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    with DashEngine(model) as engine:
        engine.register_adapter("poet", styles(args.base, args.work)["poet"])
        base, poet = engine.generate([PROMPT] * 2, [None, "poet"], max_new_tokens=16)
    print(f"ours: {base}")
    print(f"poet: {poet}")
    # The model itself still works.
    with torch.inference_mode():
        inputs = tokenizer(PROMPT, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = out[0, inputs["input_ids"].shape[1] :]
    print(f"transformers: {tokenizer.decode(answer, skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
