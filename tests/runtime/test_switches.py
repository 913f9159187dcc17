"""Switches in the runtime: which message wins, and a file that may change in any way."""

from __future__ import annotations

import json
import os

import pytest

from firsttoken_api.optimizations import NAMES
from firsttoken_api.switches import SwitchError, parse_message
from firsttoken_runtime.engine.snapshot import read_snapshot
from firsttoken_runtime.switches import (
    SwitchFile,
    Verdict,
    answered,
    default_message,
    judge,
    parse_text,
    refusal,
)


def message(generation, **switches):
    return parse_message({"generation": generation, "switches": switches})


ON = {"enabled": True}
OFF = {"enabled": False}


@pytest.mark.parametrize(
    ("offered", "verdict"),
    [
        (message(6), Verdict.TAKE),
        (message(5, chunkedPrefill=OFF), Verdict.SAME),
        (message(5, chunkedPrefill=ON), Verdict.CONFLICT),
        (message(4, chunkedPrefill=OFF), Verdict.OLDER),
    ],
)
def test_the_higher_generation_wins(offered, verdict):
    current = message(5, chunkedPrefill=OFF)
    assert judge(current, offered) is verdict
    if verdict in (Verdict.CONFLICT, Verdict.OLDER):
        assert "6 or higher" in refusal(current, offered)


def test_without_a_file_the_catalogue_decides_at_generation_0():
    current = default_message()
    assert current.generation == 0
    assert current.switches["prefixCache"].enabled
    assert not current.switches["speculativeDecoding"].enabled


KILL_OF_A_NEWER_RELEASE = {
    "generation": 6,
    "switches": {
        "turbo": {"enabled": True, "stages": 2},
        "ramjet": {"enabled": False},
        "scramjet": {"enabled": False, "cause": "killed"},
        "prefixCache": {"enabled": False, "cause": "killed", "tiers": [1]},
        "chunkedPrefill": {"enabled": True, "overlap": True, "lookahead": 2},
    },
}


def test_what_a_newer_release_sends_is_answered_name_by_name():
    taken = parse_text(json.dumps(KILL_OF_A_NEWER_RELEASE))
    snapshot = read_snapshot(taken, 1000, 16, 1024, {})
    found = {state["name"]: (state["state"], state["reason"]) for state in answered(snapshot.states, taken)}
    assert found["turbo"] == ("inactive", "not in this build")
    assert found["ramjet"] == ("off", "")
    assert found["scramjet"] == ("killed", "taken back by the kill switch")
    assert found["prefixCache"] == (
        "killed",
        "taken back by the kill switch; ignored, not in this build: tiers",
    )
    assert found["chunkedPrefill"] == ("on", "ignored, not in this build: lookahead, overlap")
    assert list(found)[: len(NAMES)] == list(NAMES)


def test_the_same_message_of_a_newer_release_is_no_change():
    first, second = (parse_text(json.dumps(KILL_OF_A_NEWER_RELEASE)) for _ in range(2))
    assert judge(first, second) is Verdict.SAME
    assert judge(first, message(6)) is Verdict.CONFLICT


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[1]", '{"generation": 1}'])
def test_text_that_is_no_message_is_refused_in_words(text):
    with pytest.raises(SwitchError, match=r"\w+ \w+"):
        parse_text(text)


class TestSwitchFile:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "switches.json"

    def write(self, path, generation, **switches):
        path.write_text(json.dumps({"generation": generation, "switches": switches}))

    def test_a_content_is_reported_once(self, path):
        self.write(path, 1, prefixCache=OFF)
        file = SwitchFile(path)
        found = file.poll().message
        assert found.generation == 1
        assert not found.switches["prefixCache"].enabled
        assert file.poll().message is None
        self.write(path, 2)
        assert file.poll().message.generation == 2

    def test_a_half_written_content_is_told_once_and_read_when_it_is_whole(self, path):
        self.write(path, 1)
        file = SwitchFile(path)
        file.poll()
        path.write_text('{"generation": 2, "swi')
        first, second = file.poll(), file.poll()
        assert "not valid JSON" in first.problem
        assert "stay" in first.problem
        assert (second.message, second.problem) == (None, None)
        self.write(path, 2)
        assert file.poll().message.generation == 2

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b'{"generation": 2, "switches": {"turbo": 1}}', "turbo: expected an object"),
            (b"\xff", "not UTF-8"),
            (b" " * 2_000_000, "larger than"),
        ],
    )
    def test_a_bad_content_is_refused_in_words(self, path, content, words):
        path.write_bytes(content)
        assert words in SwitchFile(path).poll().problem

    def test_a_content_of_a_newer_release_is_taken(self, path):
        path.write_text(json.dumps(KILL_OF_A_NEWER_RELEASE))
        found = SwitchFile(path).poll()
        assert found.problem is None
        assert found.message.switches["prefixCache"].cause == "killed"

    def test_nesting_without_end_in_what_is_new_does_not_end_the_watch(self, path):
        nested = "[" * 900 + "]" * 900
        layers = '[{"layer": 1, "precision": "fp8", "new": ' + nested + "}]"
        text = (
            f'{{"generation": 2, "switches": {{"kvQuantization": {{"layers": {layers}, "new": {nested}}}}}}}'
        )
        path.write_text(text)
        found = SwitchFile(path).poll()
        assert found.message.generation == 2

    def test_a_missing_file_is_a_problem_until_it_is_there(self, path):
        file = SwitchFile(path)
        assert "cannot be read: No such file" in file.poll().problem
        self.write(path, 1)
        assert file.poll().message.generation == 1

    def test_a_config_map_swaps_a_symlink_of_the_directory(self, tmp_path):
        for generation in (1, 2):
            directory = tmp_path / f"..{generation}"
            directory.mkdir()
            self.write(directory / "switches.json", generation)
        (tmp_path / "..data").symlink_to("..1")
        (tmp_path / "switches.json").symlink_to("..data/switches.json")
        file = SwitchFile(tmp_path / "switches.json")
        assert file.poll().message.generation == 1
        (tmp_path / "..tmp").symlink_to("..2")
        os.replace(tmp_path / "..tmp", tmp_path / "..data")
        assert file.poll().message.generation == 2

    def test_forgotten_content_is_reported_again(self, path):
        self.write(path, 1)
        file = SwitchFile(path)
        file.poll()
        file.forget()
        assert file.poll().message.generation == 1
