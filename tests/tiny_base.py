"""A base model small enough to train in a test: a random Llama and a byte-pair tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

TINY_NAME = "tiny-llama"
TINY_REVISION = "0" * 64
#: SmolLM2's, without its default system message.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


#: The same with room for prompts that describe tools.
ROOMY_NAME = "roomy-llama"
ROOMY_CONTEXT = 4096


def write_tiny_base(folder: Path, *, name: str = TINY_NAME, context: int = 512) -> Path:
    """Write the model folder: 2 layers of width 32, a vocabulary of 400 byte pairs."""
    # Imported here: tests of the control plane import this module without torch.
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["system user assistant hello world, how are you? {json: 12}"],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.5,  # with the usual 0.02 its logits are too flat to learn anything
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    manifest = {"name": name, "revision": TINY_REVISION}
    (folder / "lorikeet.json").write_text(json.dumps(manifest))
    return folder
