"""Tokens, text and chat prompts are those of transformers, without transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from firsttoken_runtime.model.config import read_config
from firsttoken_runtime.model.errors import ChatTemplateError, ModelError
from firsttoken_runtime.model.gguf_tokenizer import text_split
from firsttoken_runtime.model.tokenizer import check_vocabulary, load_tokenizer

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  two  spaces,   three\tand a tab\n\n\nthree lines",
    "don't you've I'LL we're",
    "naïve café — “quoted” … 3.14159 × 2²",
    "日本の首都は東京です。 한국어 العربية हिन्दी",
    "😀 family: 👩‍👩‍👧‍👦 flag: 🇯🇵",
    "e\u0301 decomposed, \u00e9 composed, \u200b zero width, \ufeff mark",
    "def f(x):\n\treturn x**2  # square\r\n",
    '{"key": [1, 2, {"nested": null}]}',
    "<|im_start|>user\nspecial tokens in text<|im_end|> and<|endoftext|>more",
    "a" * 300,
    "\x00\x01 control \x7f",
)


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def theirs(smollm2):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory) -> Path:
    """The same tokenizer as a Hugging Face folder has it, beside a minimal configuration."""
    place = tmp_path_factory.mktemp("folder")
    theirs.save_pretrained(place)
    (place / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "vocab_size": 49152,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "eos_token_id": 0,
            }
        )
    )
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return place


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers(tokenizer, theirs, text):
    ids = theirs.encode(text)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_from_a_folder_as_transformers(folder, theirs, text):
    assert load_tokenizer(folder).encode(text) == theirs.encode(text)


@given(st.text(st.characters(exclude_categories=["Cs", "Nd", "Nl", "No"]), max_size=80))
@settings(max_examples=150, deadline=None)
def test_any_text_without_digits_as_transformers(tokenizer, theirs, text):
    assert tokenizer.encode(text) == theirs.encode(text)


def test_digits_are_split_one_by_one_before_spaces_are_looked_at(tokenizer):
    """SmolLM2's own tokenizer.json splits digits first; transformers leaves that out when it reads a GGUF."""
    ids = tokenizer.encode("a  1")
    assert [tokenizer.token_text(i) for i in ids] == ["a", "  ", "1"]


# Control characters and unassigned planes need bytes that SmolLM2's vocabulary has no token for.
@given(st.text(st.characters(exclude_categories=["Cs", "Cn", "Co", "Cc"]), max_size=60))
@settings(max_examples=100, deadline=None)
def test_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_half_a_surrogate_pair_is_refused_not_passed_on(tokenizer):
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("broken \ud83d")


@given(st.lists(st.integers(0, 49151), max_size=40), st.booleans())
@settings(max_examples=150, deadline=None)
def test_incremental_text_equals_whole_text(tokenizer, ids, skip):
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip)


def test_a_character_that_spans_tokens_is_held_back_until_whole(tokenizer):
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode("😀")]
    assert len(pieces) > 1
    assert pieces[:-1] == [""] * (len(pieces) - 1)
    assert pieces[-1] == "😀"


def test_bytes_of_tokens_add_up_to_the_text(tokenizer):
    text = "Grüße, 世界 🎉<|im_end|>"
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text)).decode() == text


CONVERSATIONS = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue? 🌌"}],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "  and\nthat times three? "},
    ],
)


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_as_transformers(tokenizer, theirs, messages, add_generation_prompt):
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert tokenizer.render_chat(messages, add_generation_prompt) == text
    assert tokenizer.encode_chat(messages, add_generation_prompt) == theirs.encode(text)


WITH_TOOLS = """{%- if tools %}
    {{- '<tools>' + tools | tojson + '</tools>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {%- if loop.index > 8 %}{% break %}{% endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}{{ bos_token + message.content }}{% endif %}
{%- endfor %}"""


def test_a_template_of_ones_own_with_the_dialect_of_transformers(smollm2, theirs):
    tokenizer = load_tokenizer(smollm2, chat_template=WITH_TOOLS)
    tools = [{"type": "function", "function": {"name": "now", "description": "the time, é < ü"}}]
    messages = [{"role": "user", "content": "time?"}, {"role": "assistant", "content": " noon "}]
    expected = theirs.apply_chat_template(
        messages, tools=tools, chat_template=WITH_TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.render_chat(messages, tools=tools) == expected


def test_messages_that_a_template_refuses(smollm2):
    tokenizer = load_tokenizer(smollm2, chat_template=WITH_TOOLS)
    with pytest.raises(ChatTemplateError, match="unknown role pirate"):
        tokenizer.render_chat([{"role": "pirate", "content": "arr"}])


def test_messages_without_the_fields_a_template_needs(tokenizer):
    with pytest.raises(ChatTemplateError):
        tokenizer.render_chat([{"role": "user"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length // 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'x'.encode('ascii').decode('utf-16') }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_whatever_goes_wrong_inside_a_template_is_the_callers_error(smollm2, template):
    tokenizer = load_tokenizer(smollm2, chat_template=template)
    with pytest.raises(ChatTemplateError):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("chat_template.jinja", b"\xff\xfe", r"chat_template\.jinja: not UTF-8"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template must be text"),
        ("tokenizer_config.json", b"[" * 200_000, "not valid JSON"),
    ],
)
def test_damaged_files_beside_the_tokenizer(folder, tmp_path, name, content, words):
    for file in folder.iterdir():
        if file.name not in ("tokenizer_config.json", "chat_template.jinja"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=words):
        load_tokenizer(tmp_path)


def test_a_token_outside_the_byte_alphabet_stands_for_its_own_text(folder, tmp_path):
    """Its characters are no spelled bytes; whole text and incremental text say the same."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["世 x"] = 49152
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([49152]) == "世 x"
    assert tokenizer.token_text(49152) == "世 x"
    assert tokenizer.detokenizer().push(49152) == "世 x"


def test_a_template_cannot_reach_out_of_the_sandbox(smollm2):
    tokenizer = load_tokenizer(smollm2, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(ChatTemplateError):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_a_template_that_is_no_template(smollm2):
    with pytest.raises(ModelError, match="chat template, line 1"):
        load_tokenizer(smollm2, chat_template="{% if %}")


def test_no_template(folder, tmp_path):
    for file in folder.iterdir():
        if file.name not in ("tokenizer_config.json", "chat_template.jinja"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="--chat-template"):
        load_tokenizer(tmp_path).render_chat([{"role": "user", "content": "x"}])


def test_end_of_answer_ids(smollm2, folder):
    assert read_config(smollm2).eos_token_ids == (2,)
    assert read_config(folder).eos_token_ids == (2, 0)


def test_special_tokens_of_a_folder(folder):
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == (
        "<|im_start|>",
        "<|im_end|>",
        2,
    )


def test_a_tokenizer_of_another_model(tokenizer, smollm2, tmp_path, folder):
    check_vocabulary(tokenizer, read_config(smollm2))
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 32000}))
    with pytest.raises(ModelError, match=r"up to 49151.*32000 rows.*different models"):
        check_vocabulary(tokenizer, read_config(tmp_path))


def test_folder_without_a_fast_tokenizer(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"tokenizer\.json: not found"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


def test_the_api_process_needs_neither_torch_nor_transformers(smollm2):
    program = (
        "import sys; from firsttoken_runtime.model.tokenizer import load_tokenizer; "
        "load_tokenizer(sys.argv[1]); "
        "print([m for m in ('torch', 'transformers', 'numpy', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(smollm2)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("split", ["llama-bpe", "qwen2", "tekken"])
@pytest.mark.parametrize("text", [*TEXTS, "ABCdef HTTPServer I'm 12345 1/2 a/b\r\n\r\n  x"])
def test_other_families_split_text_as_transformers(split, text):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    reference = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[split]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert text_split(split).pre_tokenize_str(text) == reference.pre_tokenize_str(text)


def test_a_long_text_lets_other_threads_run(tokenizer):
    """The server tokenises in threads: one long prompt must not stop everybody's streams."""
    pauses, done = [0.0], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not done.is_set():
            time.sleep(0.001)
            now = time.monotonic()
            pauses.append(now - last)
            last = now

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.monotonic()
    tokens = tokenizer.encode("hello world " * 150_000)
    took = time.monotonic() - began
    done.set()
    ticking.join()
    assert len(tokens) > 250_000
    assert max(pauses) < took / 2
