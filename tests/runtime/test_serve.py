"""What `firsttoken serve` looks up before anything starts."""

from __future__ import annotations

import json
import signal
import socket
import stat
import subprocess
import sys

import pytest

from firsttoken_runtime.serve import (
    ServeError,
    ServeOptions,
    bind,
    ended_line,
    make_plan,
    model_path,
    new_token_file,
)


@pytest.fixture
def token(tmp_path):
    return new_token_file(tmp_path)


def test_a_new_token_is_long_and_only_its_owners_to_read(token):
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text().strip()) >= 32


@pytest.mark.parametrize(
    ("file", "given", "served"),
    [
        ("SmolLM2.Q4_1.gguf", None, "SmolLM2.Q4_1"),
        ("Qwen3-8B", None, "Qwen3-8B"),
        ("Qwen3-8B", "qwen", "qwen"),
    ],
)
def test_the_model_is_served_under_its_own_name_unless_told_otherwise(tmp_path, token, file, given, served):
    (tmp_path / file).touch()
    plan = make_plan(ServeOptions(str(tmp_path / file), served_name=given), token)
    assert plan.served_name == served
    assert plan.message.generation == 0
    assert plan.start().model == str(tmp_path / file)


def test_a_file_uri_is_a_path(tmp_path):
    (tmp_path / "my model").mkdir()
    assert model_path(f"file://{tmp_path}/my%20model") == str(tmp_path / "my model")


def test_the_draft_model_is_looked_up_like_the_model_and_named_when_missing(tmp_path, token):
    for name in ("large", "small"):
        (tmp_path / name).mkdir()
    options = ServeOptions(str(tmp_path / "large"), draft_model=f"file://{tmp_path}/small")
    assert make_plan(options, token).start().draft_model == str(tmp_path / "small")
    with pytest.raises(ServeError, match=r"--draft-model .*/none: no such file or folder"):
        make_plan(ServeOptions(str(tmp_path / "large"), draft_model=str(tmp_path / "none")), token)


def test_a_file_uri_with_two_slashes_is_refused_before_its_first_folder_is_taken_for_a_host():
    with pytest.raises(ServeError, match="three slashes"):
        model_path("file://models/smollm2.gguf")


def test_a_switches_file_that_cannot_be_read_is_no_start_with_defaults(tmp_path, token):
    (tmp_path / "switches.json").write_text(
        '{"generation": 3, "switches": {"prefixCache": {"enabled": "no"}}}'
    )
    options = ServeOptions(str(tmp_path), switches=tmp_path / "switches.json")
    with pytest.raises(ServeError, match="prefixCache: enabled: Input should be a valid boolean"):
        make_plan(options, token)


def test_a_pod_of_an_older_release_that_starts_again_takes_what_it_knows_of_its_mounted_file(tmp_path, token):
    switches = {"turbo": {"enabled": True}, "prefixCache": {"enabled": False, "cause": "killed"}}
    (tmp_path / "switches.json").write_text(json.dumps({"generation": 3, "switches": switches}))
    plan = make_plan(ServeOptions(str(tmp_path), switches=tmp_path / "switches.json"), token)
    assert plan.message.switches["prefixCache"].cause == "killed"
    assert plan.start().switches["switches"]["turbo"] == {"enabled": True}, "the engine answers for it"


def test_a_port_in_use_is_told_before_the_model_is_loaded():
    with bind("127.0.0.1", 0) as taken, pytest.raises(ServeError, match=r"in use; choose others with --host"):
        bind("127.0.0.1", taken.getsockname()[1])


def test_first_chunks_do_not_wait_for_acknowledgements():
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_how_an_engine_ended_is_said_in_words():
    assert "SIGKILL; perhaps the machine or the container is out of memory" in ended_line(-signal.SIGKILL)
    assert ended_line(-signal.SIGSEGV).endswith("SIGSEGV")
    assert ended_line(3).endswith("status 3")


def test_the_api_process_never_imports_torch():
    heavy = "{'torch', 'transformers', 'kopf'}"
    code = f"import sys, firsttoken_runtime.api.server; print({heavy} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
