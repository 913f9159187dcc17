"""The tokenizer that a GGUF file describes, built with the `tokenizers` library.

A GGUF holds the vocabulary, the merges or scores, token kinds and the name of the text split its merges were
learned with. The splits are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from firsttoken_runtime.model.errors import ModelError
from firsttoken_runtime.model.gguf import GgufFile

CONTROL, USER_DEFINED = 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# `tokenizer.ggml.pre` -> how text is split before merging
_SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _byte_level,
    "gpt-2": _byte_level,
    "smollm": _digits_byte_level,
    "starcoder": _digits_byte_level,
    "refact": _digits_byte_level,
    "llama-bpe": _split(_LLAMA3),
    "llama3": _split(_LLAMA3),
    "llama-v3": _split(_LLAMA3),
    "smaug-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "deepseek-r1-qwen": _split(_QWEN2),
    "tekken": _split(_TEKKEN),
}
_IGNORE_MERGES = _BEGIN_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # text is brought to Unicode form NFC first


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """Raises ModelError: no vocabulary, a tokenizer kind or text split that is not known."""
    tokens = _required(file, "tokens", str)
    kind = file.metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if kind not in builders:
        raise ModelError(f"{file.path}: tokenizer kind {kind!r} is not supported; use one of gpt2, llama")
    tokenizer = builders[kind](file, tokens)
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ModelError(f"{file.path}: damaged tokenizer: token_type does not have {len(tokens)} entries")
    marked = [pair for pair in zip(tokens, kinds, strict=True) if pair[1] in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=mark == CONTROL) for token, mark in marked]
    )
    bos = _token(file, tokens, "bos", None)
    if bos is not None and _adds_bos(file, kind):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B"],
            special_tokens=[(bos, file.metadata["tokenizer.ggml.bos_token_id"])],
        )
    return tokenizer


def special_tokens(file: GgufFile) -> dict[str, str]:
    """Texts of the special tokens, by the names that chat templates use."""
    tokens = _required(file, "tokens", str)
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: _token(file, tokens, key, None) for name, key in keys.items()}
    return {name: text for name, text in found.items() if text is not None}


def _token(file: GgufFile, tokens: Sequence[str], key: str, default: int | None) -> str | None:
    """The token that `tokenizer.ggml.<key>_token_id` points at."""
    index = file.metadata.get(f"tokenizer.ggml.{key}_token_id", default)
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise ModelError(
            f"{file.path}: damaged tokenizer: {key}_token_id is {index}, there are {len(tokens)} tokens"
        )
    return tokens[index]


def text_split(name: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging, by `tokenizer.ggml.pre`. Raises KeyError for an unknown name."""
    return _SPLITS[name]()


def _required(file: GgufFile, key: str, kind: type) -> list[Any]:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if not value:
        raise ModelError(f"{file.path}: tokenizer.ggml.{key} is missing; the file carries no whole tokenizer")
    if not isinstance(value, list) or not isinstance(value[0], kind):
        raise ModelError(f"{file.path}: damaged tokenizer: {key} is no list of {kind.__name__}")
    return value


def _adds_bos(file: GgufFile, kind: str) -> bool:
    said = file.metadata.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    # What files from before that flag mean, by kind.
    return kind == "llama" or file.metadata.get("tokenizer.ggml.pre") in _BEGIN_WITH_BOS


def _byte_level_bpe(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    split = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if split not in _SPLITS:
        raise ModelError(
            f"{file.path}: text split {split!r} is not supported; use one of {', '.join(sorted(_SPLITS))}, "
            "or a Hugging Face folder with tokenizer.json"
        )
    cut = [merge.partition(" ") for merge in _required(file, "merges", str)]
    merges = [(left, right) for left, _, right in cut]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = _merging(file, vocabulary, merges, ignore_merges=split in _IGNORE_MERGES)
    tokenizer.pre_tokenizer = text_split(split)
    tokenizer.decoder = decoders.ByteLevel()
    if split in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _merging(
    file: GgufFile, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], **options: Any
) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file.path}: damaged tokenizer: {error}") from None


def _sentencepiece_bpe(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    """SentencePiece BPE with byte fallback (Llama 2, Mistral): merges follow from the scores."""
    scores = _required(file, "scores", float)
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path}: damaged tokenizer: {len(tokens)} tokens, but {len(scores)} scores")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = _token(file, tokens, "unknown", 0)
    merges = _merges_from_scores(vocabulary, scores)
    tokenizer = _merging(file, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_from_scores(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to cut a token in two known tokens, best score of the whole first."""
    found: list[tuple[float, str, str]] = []
    for token, index in vocabulary.items():
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
        known.sort(key=lambda cut: (vocabulary[cut[0]], vocabulary[cut[1]]))
        found += [(scores[index], left, right) for left, right in known]
    found.sort(key=itemgetter(0), reverse=True)
    return [(left, right) for _, left, right in found]
