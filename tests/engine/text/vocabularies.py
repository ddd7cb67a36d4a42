"""Small tokenizers of every kind whose decoder treats a text's edges or bytes in its own way."""

from __future__ import annotations

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "Grüße aus Köln, a  double space, a third",
    'def f(a):\n    return {"key": a, "other": [1, 2, 3]}',
] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    """As Llama 3's and Qwen's: a token may begin and end in mid-character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Of two characters that differ in their last byte, the merges join what is alike.
    tokenizer.train_from_iterator([*CORPUS, "世丗丘与🦜🦝🦞 กขคง" * 3], trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    return tokenizer


def unigram(prepend_scheme: str) -> Tokenizer:
    """As XLM-R's or T5's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2's and Mistral's."""
    letters = sorted({character for text in CORPUS for character in text.replace(" ", "▁")})
    words = ["th", "the", "▁t", "▁th", "▁the", "▁▁"]
    names = [*SPECIAL, *BYTES, *letters, *words]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "th"), ("▁", "t"), ("▁", "▁")]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT's: the decoder puts the spaces."""
    words = ["the", "quick", "fox", "a", "k", "##o", "##x", "##ing", ".", "'", ",", "##,"]
    vocab = {name: number for number, name in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def ends_of_words() -> Tokenizer:
    """As GPT-1's: a word ends with its space, which the decoder drops at the end."""
    words = ["the</w>", "quick</w>", "fo", "x</w>", "a", "a</w>", "é</w>", ".</w>"]
    vocab = {name: number for number, name in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], end_of_word_suffix="</w>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def words() -> Tokenizer:
    """Without a decoder, which puts a space between any two tokens; no letter is a token."""
    vocab = {name: number for number, name in enumerate([*SPECIAL, "the", "quick", "fox", "Köln"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "always": lambda: unigram("always"),
    "first": lambda: unigram("first"),
    "never": lambda: unigram("never"),
    "word pieces": word_piece,
    "ends of words": ends_of_words,
    "words": words,
}
