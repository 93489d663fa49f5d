"""Small tokenizers of the two kinds that models have: of bytes, and of characters with bytes for what they lack."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = ("Once upon a time 🦊👩‍👩‍👧 there was", "cafe\u0301 größer 日本語 e\u0301e\u0301", "END of the stop, the END")


def byte_level(num_tokens: int = 420) -> Tokenizer:
    """A tokenizer of bytes and pairs, which composes characters (NFC), with a special and an ordinary added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    tokenizer.add_tokens(["<call>"])
    return tokenizer


def with_byte_fallback() -> Tokenizer:
    """A tokenizer like Llama's: a space begins a word, unknown characters are bytes, prompts begin with a token."""
    names = [
        "<unk>",
        "<s>",
        "<end>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"abcdeENDhopst,.",
        "\u00e9",
    ]
    names += ["\u2581t", "th", "\u2581th", "the", "\u2581the", "EN", "END", "🦊"]
    merges = [("\u2581", "t"), ("t", "h"), ("\u2581t", "h"), ("th", "e"), ("\u2581th", "e"), ("E", "N"), ("EN", "D")]
    vocabulary = {name: place for place, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "<end>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return tokenizer
