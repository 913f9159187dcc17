"""A conversation whose last message is continued, and special tokens that stay in the text."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from firsttoken_runtime.model.chat_template import open_ended
from firsttoken_runtime.model.errors import ChatTemplateError
from firsttoken_runtime.model.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("rendered", "last", "expected"),
    [
        ("<u>Hi</u><a>It is</a>", "It is", "<u>Hi</u><a>It is"),
        ("<u>It is</u><a>It is</a>", "It is", "<u>It is</u><a>It is"),
        ("<a>It is </a>", "It is ", "<a>It is "),
        ("<a>It is</a>", " It is ", "<a>It is"),
    ],
)
def test_the_prompt_ends_where_the_last_message_does(rendered: str, last: str, expected: str) -> None:
    assert open_ended(rendered, last) == expected


@pytest.mark.parametrize("last", ["gone", ""])
def test_a_text_that_the_template_does_not_show_cannot_be_continued(last: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot be continued"):
        open_ended("<a>HERE</a>", last)


def test_a_special_token_can_be_kept_in_the_text() -> None:
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("[CALL]", special=True), AddedToken("[END]", special=True)])
    tokenizer = Tokenizer(backend, {}, None, "test")
    ids = [0, tokenizer.token_id("[CALL]"), 1, tokenizer.token_id("[END]")]
    for kept, text in (((), "ab"), ((ids[1],), "a[CALL]b")):
        detokenizer = tokenizer.detokenizer(kept=frozenset(kept))
        assert "".join(detokenizer.push(id) for id in ids) + detokenizer.flush() == text
    assert tokenizer.token_id("[NONE]") is None
