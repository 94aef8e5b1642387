"""Tiny tokenizers of the three kinds that turn tokens into text in different ways."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace._common.detokenizer import byte_alphabet

END = "</s>"
# pieces that cut characters, clusters of characters and words
_PIECES = (
    "\U0001f468\u200d", "\u200d\U0001f469", "\U0001f600", "\u4e16\u754c", "\u0627\u0644", "e\u0301", "\u0301", "the", "sky",
    " the", "sky ", "END", "EN", "D", "\n\n", ". ", "'", "\u0e01\u0e33", "\U0001f1e9\U0001f1ea", "\u2028", "\x00",
)


def byte_level() -> Tokenizer:
    """Every byte, and pieces that begin and end within characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = {data: text for text, data in byte_alphabet().items()}
    spelled = []
    for piece in _PIECES:
        data = piece.encode()
        spelled += ["".join(by_byte[b] for b in part) for part in (data, data[1:], data[:-1]) if len(part) > 1]
    vocab = {text: i for i, text in enumerate(dict.fromkeys((END, *alphabet, *spelled)))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return made


def byte_fallback() -> Tokenizer:
    """Like Llama's and Gemma's: pieces of text, and a token for each byte of what they do not cover."""
    pieces = [piece.replace(" ", "\u2581") for piece in (*_PIECES, " ", "a", "b")]
    tokens = ("<unk>", END, *(f"<0x{b:02X}>" for b in range(256)), *pieces)
    vocab = {text: i for i, text in enumerate(dict.fromkeys(tokens))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", END)])
    return made


def wordpiece() -> Tokenizer:
    """Words that are joined by spaces, and a clean-up that takes some of them back."""
    words = ("the", "sk", "##y", "is", ".", ",", "'", "n't", "do", "'s", "\u4e16", "##\u754c", "END", "##E", "\U0001f600")
    vocab = {text: i for i, text in enumerate(("[UNK]", END, *words))}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(cleanup=True)
    made.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return made
