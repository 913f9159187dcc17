"""The draft model's own bookkeeping: what it keeps, what it computes anew, and what it does without pages."""

from __future__ import annotations

from page_model import VOCAB, PageModel, expected, prompt

from firsttoken_runtime.engine.draft import DraftModel
from firsttoken_runtime.engine.prefix import Namespace
from firsttoken_runtime.engine.requests import Request, SamplingParams
from firsttoken_runtime.engine.sequence import Sequence

NAMESPACE = Namespace("")


def sequence(tokens, number: int = 0, **sampling) -> Sequence:
    params = SamplingParams(max_tokens=100, **{"temperature": 0.0, "seed": 5, "ignore_eos": True, **sampling})
    made = Sequence(Request(f"r{number}", tuple(tokens), params, 0), number, 100, NAMESPACE)
    made.seed = params.seed or 0
    return made


def made(pages: int = 64, max_length: int = 1000) -> tuple[DraftModel, PageModel]:
    model = PageModel(pages, 4)
    return DraftModel(model, pages, 4, max_length, VOCAB), model


def computed(model: PageModel) -> list[int]:
    """Tokens of every step since the last look."""
    counts = [sum(len(chunk.token_ids) for chunk in chunks) for chunks in model.steps]
    model.steps.clear()
    return counts


def test_it_proposes_what_its_model_would_say_next_greedy_and_drawn() -> None:
    draft, _ = made()
    greedy, drawn = sequence(prompt(9)), sequence(prompt(11, 2), 1, temperature=0.9, top_p=0.9)
    found = draft.propose([(greedy, 5), (drawn, 3)])
    assert found == {0: expected(greedy.request, 5), 1: expected(drawn.request, 3)}


def test_what_was_drawn_is_not_computed_again_and_what_was_not_is() -> None:
    draft, model = made()
    ours = sequence(prompt(9))
    # Given how many proposals were drawn, and how many tokens came after the first that was not
    for accepted, later in ((4, 0), (0, 0), (2, 3), (4, 0), (1, 2)):
        [proposed] = draft.propose([(ours, 4)]).values()
        assert proposed == expected(sequence(ours.tokens).request, 4), "from pages of rejected proposals"
        ours.tokens += proposed[:accepted]
        ours.tokens.append(1 + (proposed[accepted] if accepted < 4 else 0) % 90)  # not what was proposed
        ours.tokens += range(1, later + 1)
    assert computed(model) == [9, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 4, 1, 1, 1, 2, 1, 1, 1]
    draft.propose([(ours, 4)])
    assert computed(model) == [3, 1, 1, 1]


def test_a_long_prompt_is_caught_up_with_over_several_steps_while_others_go_on() -> None:
    draft, model = made(pages=400)
    quick, slow = sequence(prompt(9)), sequence(prompt(700, 2), 1)
    assert set(draft.propose([(slow, 2), (quick, 2)])) == {0}
    assert computed(model) == [256, 1]
    assert set(draft.propose([(slow, 2), (quick, 2)])) == {0}
    assert draft.propose([(slow, 2)])[1] == expected(slow.request, 2)
    assert max(computed(model)) <= 256


def test_pages_come_back_when_sequences_end() -> None:
    draft, _ = made(pages=8)
    for number in range(20):
        assert draft.propose([(sequence(prompt(20, number), number), 3)])
        draft.forget(number)
        assert draft.pages_in_use == 0
    draft.forget(99)
    assert draft.propose([(sequence(prompt(20), 50), 3)])
    draft.clear()
    assert draft.pages_in_use == 0


def test_without_pages_the_longest_unused_gives_way_and_those_of_the_step_do_not() -> None:
    draft, _ = made(pages=12)
    first, second, third = (sequence(prompt(20, number), number) for number in range(3))
    assert set(draft.propose([(first, 3)])) == {0}
    assert set(draft.propose([(second, 3)])) == {1}
    assert draft.propose([(third, 3)])[2] == expected(third.request, 3), "in place of the first"
    assert len(draft.propose([(first, 3), (second, 3), (third, 3)])) == 2, "one goes without"
    assert draft.pages_in_use <= 12


def test_nothing_is_proposed_beyond_the_drafts_length_or_pool_or_vocabulary() -> None:
    draft, model = made(max_length=12)
    assert draft.propose([(sequence(prompt(9)), 4)])
    assert draft.propose([(sequence(prompt(10), 1), 4)]) == {}
    draft, model = made(pages=3)
    assert draft.propose([(sequence(prompt(13)), 1)]) == {}
    draft, model = made()
    assert draft.propose([(sequence([1, 2, VOCAB]), 2)]) == {}
    assert model.steps == []
