"""Tokenizer and chat template of a model, from a Hugging Face folder or a GGUF file.

Built on the `tokenizers` library and Jinja alone: importing transformers would cost the API process seconds
of start-up and a great deal of memory.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from firsttoken_runtime.model.chat_template import ChatTemplate
from firsttoken_runtime.model.config import ModelConfig
from firsttoken_runtime.model.errors import ChatTemplateError, ModelError
from firsttoken_runtime.model.files import find_model, read_json, read_text
from firsttoken_runtime.model.gguf import open_gguf
from firsttoken_runtime.model.gguf_tokenizer import build_tokenizer, special_tokens

__all__ = [
    "ChatTemplateError",
    "Detokenizer",
    "Tokenizer",
    "check_vocabulary",
    "load_tokenizer",
]


_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes, and so tokens, that one character can take


class Tokenizer:
    """Text to token ids and back, and the chat template.

    Safe to use from several threads; encoding releases the interpreter lock.
    """

    def __init__(
        self, backend: Backend, special_tokens: Mapping[str, str], template: str | None, where: str
    ) -> None:
        self._backend = backend
        self._where = where
        self._vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values(), default=-1) + 1
        self.bos_token = special_tokens.get("bos_token")
        self.eos_token = special_tokens.get("eos_token")
        self.bos_token_id = self._vocabulary.get(self.bos_token) if self.bos_token else None
        self.eos_token_id = self._vocabulary.get(self.eos_token) if self.eos_token else None
        added = backend.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.chat_template = template
        self._template = ChatTemplate(template, special_tokens) if template else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises UnicodeEncodeError (a ValueError) on half a surrogate pair."""
        text.encode("utf-8")
        # A batch of one: the library holds the interpreter lock for a text alone, and not for a batch.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, for log probabilities."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, text: str) -> int | None:
        """The id of a token by its spelling in the vocabulary, None when it has none such."""
        return self._vocabulary.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, which need not be whole characters."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self.is_byte_level:
            spelled = [_BYTE_OF.get(character) for character in piece]
            # A token with a character outside the alphabet stands for its own text.
            known = [byte for byte in spelled if byte is not None]
            return bytes(known) if len(known) == len(spelled) else piece.encode()
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return piece.replace("▁", " ").encode()

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens are spelled in GPT-2's byte alphabet and decode independently of each other."""
        return isinstance(self._backend.decoder, decoders.ByteLevel)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        Raises ModelError when the model has no chat template, ChatTemplateError when it refuses the messages.
        """
        if self._template is None:
            raise ModelError(
                f"{self._where}: the model has no chat template; give one with --chat-template FILE"
            )
        return self._template.render(messages, add_generation_prompt, tools, **variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation; templates write their special tokens themselves."""
        text = self.render_chat(messages, add_generation_prompt, tools, **variables)
        return self.encode(text, add_special_tokens=False)

    def detokenizer(
        self, skip_special_tokens: bool = True, kept: Collection[int] = frozenset()
    ) -> Detokenizer:
        """kept: special tokens that are shown all the same."""
        return Detokenizer(self, skip_special_tokens, kept)


class Detokenizer:
    """Text of a growing token sequence, handed out as soon as it is final.

    The pieces pushed and flushed together equal `Tokenizer.decode` of all the ids, as long as the bytes make
    whole characters.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, kept: Collection[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids.difference(kept) if skip_special_tokens else frozenset()
        # Byte-level tokens decode independently of each other, up to characters that span tokens.
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        # Otherwise a token's text depends on having one before it (a leading space or none), so the tokens of
        # the last piece stay in view:   handed out ... | shown (last piece) | pending (not final)
        self._shown: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that is final now; empty while a character is incomplete."""
        if token_id in self._skip:
            return ""
        if self._bytes is not None:
            return self._bytes.decode(self._tokenizer.token_bytes(token_id))
        self._pending.append(token_id)
        piece = self._pending_text()
        if piece.endswith(_REPLACEMENT) and len(self._pending) < _LONGEST_CHARACTER:
            return ""
        self._shown, self._pending = self._pending, []
        return piece

    def flush(self) -> str:
        """What was held back at the end of the sequence."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        return self._pending_text()

    def _pending_text(self) -> str:
        shown = self._tokenizer.decode(self._shown, skip_special_tokens=False)
        return self._tokenizer.decode(self._shown + self._pending, skip_special_tokens=False)[len(shown) :]


def load_tokenizer(path: str | Path, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a GGUF file.

    chat_template: template text to use instead of the model's own. Raises ModelError.
    """
    place = find_model(path)
    if place.is_file():
        file = open_gguf(place)
        backend, special = build_tokenizer(file), special_tokens(file)
        written = file.metadata.get("tokenizer.chat_template")
        template = written if isinstance(written, str) else None
    else:
        backend, special, template = _folder_tokenizer(place)
    return Tokenizer(backend, special, chat_template or template, str(path))


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raises ModelError when the tokenizer makes ids that the embedding has no row for.

    An embedding with more rows than the vocabulary is common (padded to a round number).
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"the tokenizer has token ids up to {tokenizer.vocab_size - 1}, the embedding has "
            f"{config.vocab_size} rows: tokenizer and weights belong to different models"
        )


def _folder_tokenizer(folder: Path) -> tuple[Backend, dict[str, str], str | None]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{file}: not found; save the model's tokenizer in the fast format (tokenizer.json)")
    try:
        backend = Backend.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file}: not a tokenizer: {error}") from None
    backend.no_padding()
    backend.no_truncation()
    options = folder / "tokenizer_config.json"
    config = read_json(options) if options.is_file() else {}
    special = {
        name: text
        for name, value in config.items()
        if name.endswith("_token") and (text := _token_content(value)) is not None
    }
    return backend, special, _folder_template(folder, config)


def _token_content(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{folder / 'tokenizer_config.json'}: chat_template must be text")
    return template


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
