"""weightQuantization is obeyed at start-up; afterwards the answer is what is in use."""

from __future__ import annotations

import pytest
from page_model import message

from firsttoken_api.switches import SwitchMessage, parse_message
from firsttoken_runtime.engine.snapshot import read_snapshot
from firsttoken_runtime.engine.weights import LoadedWeights, asks_for_int8

INT8, FLOAT = LoadedWeights(int8=True, obstacle=None), LoadedWeights(int8=False, obstacle=None)
STAY = "int8 weights stay in use until the pod restarts"


def answer(switches: SwitchMessage, weights: LoadedWeights | None) -> tuple[str, str]:
    states = read_snapshot(switches, 100, 16, 1024, {}, weights=weights).states
    return next((s["state"], s["reason"]) for s in states if s["name"] == "weightQuantization")


def taken_back(cause: str) -> SwitchMessage:
    return parse_message(
        {"generation": 2, "switches": {"weightQuantization": {"enabled": False, "cause": cause}}}
    )


def test_loaded_as_asked_for() -> None:
    assert answer(message(weightQuantization=True), INT8) == ("on", "")
    assert answer(message(weightQuantization=False), FLOAT) == ("off", "")
    assert answer(message(), FLOAT) == ("off", "")


def test_switched_on_live_it_needs_a_restart() -> None:
    state, reason = answer(message(weightQuantization=True), FLOAT)
    assert (state, reason) == ("inactive", "needs a restart: the weights in use are not quantized")


def test_what_is_not_possible_says_so_rather_than_ask_for_a_restart() -> None:
    cannot = LoadedWeights(int8=False, obstacle="int8 weights are for CPU in this build, not cuda")
    assert answer(message(weightQuantization=True), cannot) == ("inactive", cannot.obstacle)
    assert answer(message(weightQuantization=True), None) == ("inactive", "not in this build")


def test_fp8_is_not_built() -> None:
    asked = message(weightQuantization={"precision": "fp8"})
    assert answer(asked, FLOAT) == ("inactive", "fp8 weights are not in this build")
    assert answer(asked, INT8) == ("inactive", f"fp8 weights are not in this build; {STAY}")
    assert not asks_for_int8(asked.switches["weightQuantization"])


@pytest.mark.parametrize(
    ("switches", "by"),
    [
        (message(weightQuantization=False), "switched off"),
        (taken_back("rolledBack"), "taken back by spec.rollback"),
        (taken_back("killed"), "taken back by the kill switch"),
    ],
)
def test_taken_back_live_the_weights_in_use_are_still_int8(switches: SwitchMessage, by: str) -> None:
    assert answer(switches, INT8) == ("on", f"{by}; {STAY}")


@pytest.mark.parametrize("cause", ["rolledBack", "killed"])
def test_taken_back_where_nothing_was_quantized(cause: str) -> None:
    assert answer(taken_back(cause), FLOAT)[0] == cause


def test_a_pod_that_starts_while_it_is_taken_back_does_not_quantize() -> None:
    assert asks_for_int8(message(weightQuantization=True).switches["weightQuantization"])
    assert not asks_for_int8(taken_back("killed").switches["weightQuantization"])
