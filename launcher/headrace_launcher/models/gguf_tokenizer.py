"""GGUF metadata as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace._common.errors import StartupError
from headrace_launcher.models.gguf_header import Header

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How a text is cut into words before merging, by `tokenizer.ggml.pre`. "digits" = each digit alone, then GPT-2's rule.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
PRE_TOKENIZERS: dict[str, str] = {
    "default": "gpt2", "gpt-2": "gpt2", "phi-2": "gpt2", "olmo": "gpt2", "mpt": "gpt2",
    "smollm": "digits", "starcoder": "digits", "refact": "digits", "codeshell": "digits",
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "dbrx": _LLAMA3, "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
}
_NORMALIZED = (_QWEN2,)  # NFC first
_UNKNOWN_TYPE, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"


def build(header: Header) -> Tokenizer:
    """The tokenizer that the metadata describes.

    Raises:
        StartupError: there is none, or it is of a kind that is not known.
    """
    model = header.metadata.get("tokenizer.ggml.model")
    tokens: list[str] = header.metadata.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise StartupError(f"{header.path} has no vocabulary")
    if model not in ("gpt2", "llama"):
        raise StartupError(f"{header.path}: tokenizer model {model!r} is not supported (gpt2 and llama are)")
    try:
        made = _byte_level(header, tokens) if model == "gpt2" else _sentencepiece(header, tokens)
        _add_tokens(made, header, tokens)
    except StartupError:
        raise
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises bare Exception
        raise StartupError(f"{header.path}: its tokenizer cannot be built: {error}") from None
    if adds_bos(header):
        _put_bos_first(made, header, tokens)
    return made


def tokenizer_config(header: Header) -> dict[str, Any]:
    """tokenizer_config.json: texts of the named special tokens."""
    tokens: list[str] = header.metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": header.get("context_length"),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(header),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    return config


def adds_bos(header: Header) -> bool:
    """Whether prompts start with the bos token; a file that does not say follows its model's habit, as in llama.cpp."""
    meta = header.metadata
    pre = PRE_TOKENIZERS.get(meta.get("tokenizer.ggml.pre", ""))
    habit = meta.get("tokenizer.ggml.model") == "llama" or pre == _LLAMA3
    return bool(meta.get("tokenizer.ggml.add_bos_token", habit)) and meta.get("tokenizer.ggml.bos_token_id") is not None


def _byte_level(header: Header, tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = header.metadata.get("tokenizer.ggml.pre", "default")
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise StartupError(f"{header.path}: pre-tokenizer {name!r} is not supported ({', '.join(PRE_TOKENIZERS)} are)")
    merges = [tuple(line.split(" ", 1)) for line in header.metadata.get("tokenizer.ggml.merges") or []]
    vocab = {text: i for i, text in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule == _LLAMA3))
    if rule == "gpt2":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif rule == "digits":
        digits = pre_tokenizers.Digits(individual_digits=True)
        made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        words = pre_tokenizers.Split(Regex(rule), behavior="isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if rule in _NORMALIZED:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(header: Header, tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE: the pair whose merged piece has the best score is merged first; unknown bytes stay bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores: list[float] = header.metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise StartupError(f"{header.path}: the vocabulary has {len(tokens)} tokens and {len(scores)} scores")
    vocab = {text: i for i, text in enumerate(tokens)}
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    made = Tokenizer(models.BPE(
        vocab=vocab, merges=_merges(tokens, scores, vocab), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
    ))
    prefix = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    tail = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    return made


def _merges(tokens: list[str], scores: list[float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    ranked: list[tuple[float, int, int, int]] = []
    for number, text in enumerate(tokens):
        for cut in range(1, len(text)):
            left, right = vocab.get(text[:cut]), vocab.get(text[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[number], number, left, right))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(ranked)]


def _add_tokens(made: Tokenizer, header: Header, tokens: list[str]) -> None:
    """Control tokens become special; user-defined ones are matched as a whole but print as text."""
    from tokenizers import AddedToken

    kinds: list[int] = header.metadata.get("tokenizer.ggml.token_type") or []
    special = [t for t, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _UNKNOWN_TYPE)]
    plain = [t for t, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    made.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])


def _put_bos_first(made: Tokenizer, header: Header, tokens: list[str]) -> None:
    from tokenizers import processors

    number = int(header.metadata["tokenizer.ggml.bos_token_id"])
    text = tokens[number]
    made.post_processor = processors.TemplateProcessing(
        single=[text, "$A"], pair=[text, "$A", f"{text}:1", "$B:1"], special_tokens=[(text, number)]
    )
