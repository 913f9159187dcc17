"""Who wins: KillSwitch over spec.rollback over spec.optimizations over the catalogue's default."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken_api.optimizations import BY_NAME, CATALOGUE, NAMES
from firsttoken_api.switches import (
    Cause,
    Setting,
    SwitchError,
    SwitchMessage,
    killed_names,
    parse_message,
    resolve,
)

ESSENTIAL = {entry.name for entry in CATALOGUE if entry.essential}

names = st.sampled_from(NAMES)
written = st.dictionaries(names, st.fixed_dictionaries({}, optional={"enabled": st.booleans() | st.none()}))
rollbacks = st.dictionaries(st.sampled_from(("all", *NAMES)), st.booleans())
kills = st.sets(names)


def test_with_nothing_written_every_switch_has_its_default() -> None:
    resolved = resolve({}, {}, frozenset())
    assert list(resolved) == list(NAMES)
    for entry in CATALOGUE:
        assert resolved[entry.name].enabled is entry.default
        assert resolved[entry.name].cause is None
        assert resolved[entry.name].parameters == entry.defaults


def test_configuration_wins_over_the_default_and_keeps_the_other_parameters() -> None:
    resolved = resolve({"priorityScheduling": {"enabled": False, "maxWaitSeconds": 3.0}}, {}, frozenset())[
        "priorityScheduling"
    ]
    assert resolved.enabled is False
    assert resolved.cause is None
    assert resolved.parameters == {"ageingTokensPerSecond": 100.0, "maxWaitSeconds": 3.0}


def test_a_parameter_that_is_left_empty_has_its_default() -> None:
    assert resolve({"chunkedPrefill": {"chunkSize": None}}, {}, frozenset())["chunkedPrefill"].parameters == {
        "chunkSize": 512
    }


def test_rollback_all_spares_the_essential_ones_and_a_named_rollback_does_not() -> None:
    everything = resolve({}, {"all": True}, frozenset())
    assert {name for name, setting in everything.items() if setting.cause is None} == ESSENTIAL
    named = resolve({}, dict.fromkeys(ESSENTIAL, True), frozenset())
    assert all(named[name].cause is Cause.ROLLED_BACK for name in ESSENTIAL)


def test_all_together_with_one_given_back_still_takes_all_back() -> None:
    resolved = resolve({}, {"all": True, "prefixCache": False}, frozenset())
    assert resolved["prefixCache"].cause is Cause.ROLLED_BACK


def test_an_empty_kill_list_means_all_but_the_essential_ones() -> None:
    assert killed_names(frozenset()) == set(NAMES) - ESSENTIAL
    assert killed_names(frozenset({"prefixCache"})) == {"prefixCache"}


@given(written, rollbacks, kills)
def test_precedence(optimizations: dict[str, Any], rollback: dict[str, bool], killed: set[str]) -> None:
    resolved = resolve(optimizations, rollback, killed)
    assert list(resolved) == list(NAMES)
    for name, setting in resolved.items():
        entry = BY_NAME[name]
        taken_back = rollback.get(name, False) or (rollback.get("all", False) and not entry.essential)
        asked = optimizations.get(name, {}).get("enabled")
        if name in killed:
            assert (setting.enabled, setting.cause) == (False, Cause.KILLED)
        elif taken_back:
            assert (setting.enabled, setting.cause) == (False, Cause.ROLLED_BACK)
        else:
            assert (setting.enabled, setting.cause) == (entry.default if asked is None else asked, None)


@given(written, rollbacks, kills)
def test_releasing_the_kill_switch_gives_back_exactly_what_was(
    optimizations: dict[str, Any], rollback: dict[str, bool], killed: set[str]
) -> None:
    before = resolve(optimizations, rollback, frozenset())
    during = resolve(optimizations, rollback, killed)
    for name in NAMES:
        assert during[name].parameters == before[name].parameters, "a kill keeps the parameters"
        if name not in killed:
            assert during[name] == before[name]


@given(written, rollbacks, kills, st.integers(0, 2**53))
def test_a_message_survives_the_wire(
    optimizations: dict[str, Any], rollback: dict[str, bool], killed: set[str], generation: int
) -> None:
    message = SwitchMessage(generation, resolve(optimizations, rollback, killed))
    assert parse_message(json.loads(json.dumps(message.to_json()))) == message


def test_a_partial_message_leaves_the_rest_at_their_defaults() -> None:
    message = parse_message(
        {"generation": 3, "switches": {"chunkedPrefill": {"enabled": True, "chunkSize": 64}}}
    )
    assert message.switches["chunkedPrefill"].parameters == {"chunkSize": 64}
    rest = {name: setting for name, setting in message.switches.items() if name != "chunkedPrefill"}
    defaults = resolve({}, {}, frozenset())
    assert rest == {name: defaults[name] for name in rest}


def test_a_switch_with_a_cause_is_off_whatever_enabled_says() -> None:
    message = parse_message(
        {"generation": 1, "switches": {"prefixCache": {"enabled": True, "cause": "killed"}}}
    )
    assert message.switches["prefixCache"].enabled is False


def one(name: str, written: Any) -> dict[str, Any]:
    return {"generation": 1, "switches": {name: written}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "expected an object like"),
        ({}, "generation must be a whole number of 0 or more, not None"),
        ({"generation": -1, "switches": {}}, "generation must be a whole number of 0 or more, not -1"),
        ({"generation": True, "switches": {}}, "generation must be a whole number of 0 or more, not True"),
        ({"generation": 1.5, "switches": {}}, "generation must be a whole number of 0 or more, not 1.5"),
        ({"generation": 2**63, "switches": {}}, "generation must be 9223372036854775807 or less"),
        ({"generation": 1}, "switches must be an object"),
        ({"generation": 1, "switches": {}, "force": True}, "unknown field 'force'; use generation and"),
        (one("chunkedPrefil", {}), "unknown switch 'chunkedPrefil'; use one of " + ", ".join(NAMES)),
        (one("chunkedPrefill", True), 'chunkedPrefill: expected an object like {"enabled": true}'),
        (one("chunkedPrefill", {"chunk": 5}), "unknown parameter 'chunk'; use enabled, chunkSize"),
        (one("chunkedPrefill", {"chunk_size": 64}), "unknown parameter 'chunk_size'; use enabled, chunkSize"),
        (one("chunkedPrefill", {"chunkSize": 0}), "chunkSize: Input should be greater than or equal to 16"),
        (one("chunkedPrefill", {"chunkSize": "512"}), "chunkSize: Input should be a valid integer"),
        (one("chunkedPrefill", {"enabled": "no"}), "enabled: Input should be a valid boolean"),
        (one("prefixCache", {"maxMemory": "101%"}), "'101%' is not a per cent from 1% to 100%"),
        (one("prefixCache", {"maxMemory": "0"}), "'0' is not a size; write more than 0"),
        (
            one("continuousBatching", {"maxSequences": 0}),
            "maxSequences: Input should be greater than or equal",
        ),
        (one("kvQuantization", {"precision": "int2"}), "'fp8', 'int8' or 'int4'"),
        (one("kvQuantization", {"layers": [{"layer": -1, "precision": "fp8"}]}), "layers.0.layer: "),
        (one("prefixCache", {"cause": "bored"}), "cause must be rolledBack or killed"),
    ],
)
def test_a_wrong_message_is_refused_in_words(body: Any, words: str) -> None:
    with pytest.raises(SwitchError) as refused:
        parse_message(body)
    assert words in str(refused.value)


SKEWED: dict[str, Any] = {
    "generation": 8,
    "switches": {
        "warpDrive": {"enabled": True, "factor": 10**40},
        "afterburner": {"enabled": False, "layers": [[[]]]},
        "turbo": {"enabled": True, "cause": "killed"},
        "prefixCache": {"enabled": True, "cause": "killed", "maxMemory": "25%"},
        "chunkedPrefill": {"enabled": True, "chunkSize": 64, "overlap": {"of": "NaN"}, "chunk_size": 1},
        "kvQuantization": {"layers": [{"layer": 3, "precision": "int8", "group": 32}]},
    },
}


def test_a_message_of_a_newer_release_counts_as_far_as_it_is_known() -> None:
    message = parse_message(SKEWED, ignore_unknown=True)
    assert set(message.switches) == set(NAMES)
    assert message.switches["prefixCache"] == Setting(False, Cause.KILLED, {"maxMemory": "25%"})
    assert message.switches["chunkedPrefill"].parameters == {"chunkSize": 64}
    assert message.switches["kvQuantization"].parameters["layers"] == [{"layer": 3, "precision": "int8"}]
    assert message.unknown == {
        "afterburner": Setting(False),
        "turbo": Setting(False, Cause.KILLED),
        "warpDrive": Setting(True),
    }
    assert message.not_in_this_build() == [
        "afterburner",
        "turbo",
        "warpDrive",
        "kvQuantization.layers.group",
        "chunkedPrefill.chunk_size",
        "chunkedPrefill.overlap",
    ]


def test_an_optimization_of_a_newer_release_that_is_left_to_its_default_counts_as_asked_for() -> None:
    assert parse_message(one("turbo", {}), ignore_unknown=True).unknown == {"turbo": Setting(True)}


def test_what_is_not_known_survives_the_wire_between_two_readers_by_name() -> None:
    message = parse_message(SKEWED, ignore_unknown=True)
    assert parse_message(json.loads(json.dumps(message.to_json())), ignore_unknown=True) == message


def test_without_anything_new_both_readers_agree() -> None:
    body = one("chunkedPrefill", {"enabled": True, "chunkSize": 64})
    assert parse_message(body, ignore_unknown=True) == parse_message(body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "expected an object like"),
        ({"generation": 1, "switches": []}, "switches must be an object"),
        ({"generation": "1", "switches": {}}, "generation must be a whole number"),
        ({"generation": 1, "switches": {}, "dryRun": True}, "unknown field 'dryRun'"),
        (one("turbo", True), "turbo: expected an object like"),
        (one("turbo", {"enabled": "yes"}), "turbo: enabled: Input should be a valid boolean"),
        (one("turbo", {"cause": "bored"}), "turbo: cause must be rolledBack or killed"),
        (one("tur\ud800bo", {}), "is no name; use up to 63 letters and digits"),
        (one("t" * 64, {}), "is no name"),
        (one("chunkedPrefill", {"a b": 1}), "chunkedPrefill: parameter 'a b' is no name"),
        (one("chunkedPrefill", {"overlap": 1, "chunkSize": "64"}), "chunkSize: Input should be a valid int"),
        (one("chunkedPrefill", {"overlap": 1, "chunkSize": 1}), "chunkSize: Input should be greater than"),
        (one("kvQuantization", {"layers": [{"layer": -1, "group": 3}]}), "layers.0.layer: "),
    ],
)
def test_what_is_malformed_is_refused_also_beside_what_is_new(body: Any, words: str) -> None:
    with pytest.raises(SwitchError) as refused:
        parse_message(body, ignore_unknown=True)
    assert words in str(refused.value)


def test_every_problem_of_a_message_is_named() -> None:
    with pytest.raises(SwitchError) as refused:
        parse_message({"generation": 1, "switches": {"one": {}, "prefixCache": {"maxMemory": "0"}}})
    assert "unknown switch 'one'" in str(refused.value)
    assert "prefixCache: maxMemory" in str(refused.value)


parameters = st.sampled_from(sorted({"enabled", "cause"}.union(*(entry.defaults for entry in CATALOGUE))))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "auto", "50%", "fp8", "no"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(parameters, inner, max_size=3),
    max_leaves=4,
)


@given(
    st.fixed_dictionaries(
        {"generation": st.just(1), "switches": st.dictionaries(names | st.text(max_size=3), json_values)}
    ),
    st.booleans(),
)
def test_whatever_comes_is_taken_whole_or_refused_in_words(body: dict[str, Any], newer: bool) -> None:
    try:
        message = parse_message(body, ignore_unknown=newer)
    except SwitchError:
        return
    assert set(message.switches) == set(NAMES)
    assert set(message.unknown) == set(body["switches"]) - set(NAMES)
    assert newer or not message.not_in_this_build()
    for setting in (*message.switches.values(), *message.unknown.values()):
        assert isinstance(setting.enabled, bool)


@given(
    st.dictionaries(names, st.fixed_dictionaries({"enabled": st.booleans()})),
    st.dictionaries(st.from_regex(r"\Ax[A-Za-z0-9]{0,5}\Z"), st.dictionaries(st.just("p"), json_values)),
)
def test_what_is_new_changes_nothing_of_the_rest(known: dict[str, Any], new: dict[str, Any]) -> None:
    body = {"generation": 1, "switches": known}
    skewed = {"generation": 1, "switches": {**new, **known}}
    assert parse_message(skewed, ignore_unknown=True).switches == parse_message(body).switches
