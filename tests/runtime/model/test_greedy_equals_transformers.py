"""Greedy tokens of the real model equal those of transformers in float32, however the work is cut."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.model.prompts import COUNT, LENGTHS


def assert_same(sequence, reference) -> None:
    assert sequence.tokens[:COUNT] == reference.tokens
    logits = torch.stack(sequence.logits[:COUNT])
    torch.testing.assert_close(logits, reference.logits, atol=1e-3, rtol=0)


def test_alone_and_in_one_piece(decoder, driver_on, prompts, expected):
    driver = driver_on(decoder)
    for prompt, reference in zip(prompts, expected, strict=True):
        sequence = driver.finish(driver.sequence(prompt, COUNT), COUNT)
        assert_same(sequence, reference)
        driver.release(sequence)


@pytest.mark.parametrize("page_tokens", [16, 5])
def test_cut_in_chunks_of_any_size(decoder, driver_on, prompts, expected, page_tokens):
    """Chunk sizes around page edges, one odd page size, and chunks that start in the middle of a page."""
    driver = driver_on(decoder, total_pages=2048 // page_tokens, page_tokens=page_tokens, seed=1)
    sizes = (1, 3, 15, 16, 17, 31, 33, 48, 64, 100)
    for number, (prompt, reference) in enumerate(zip(prompts, expected, strict=True)):
        if page_tokens != 16 and not 3 <= len(prompt) <= 130:
            continue
        size = sizes[number % len(sizes)]
        if len(prompt) > 8 * size:  # keep the test short: single tokens are for the short prompts
            size = len(prompt) // 6 + number
        sequence = driver.finish(driver.sequence(prompt, COUNT), COUNT, size)
        assert_same(sequence, reference)
        driver.release(sequence)


def test_in_mixed_batches(decoder, driver_on, prompts, expected):
    """All prompts at once: a step decodes what decodes and spends the rest on several partial prefills."""
    driver = driver_on(decoder, total_pages=320, seed=2)
    sequences = [driver.sequence(prompt, COUNT) for prompt in prompts]
    mixed_steps = 0
    while unfinished := [s for s in sequences if len(s.tokens) < COUNT]:
        decoding = [(s, 1) for s in unfinished if s.computed >= len(s.prompt)]
        prefilling = [s for s in unfinished if s.computed < len(s.prompt)]
        share = max(20, 300 // max(1, len(prefilling)))
        # Shortest rest first, so that decodes and prefills overlap for many steps.
        prefilling.sort(key=lambda s: len(s.prompt) - s.computed)
        work = [*[(s, share) for s in prefilling[:6]], *decoding]
        mixed_steps += bool(decoding) and bool(prefilling)
        driver.step(work)
    assert mixed_steps > 10
    for sequence, reference in zip(sequences, expected, strict=True):
        assert_same(sequence, reference)


def test_prefix_reused_through_shared_pages(
    decoder, driver_on, prompts, expected, transformers_smollm2, reference_greedy
):
    """Two prompts share pages of a third: neither recomputes them, neither disturbs the other."""
    first, reference = prompts[LENGTHS.index(384)], expected[LENGTHS.index(384)]
    driver = driver_on(decoder, seed=3)
    original = driver.finish(driver.sequence(first, COUNT), COUNT)
    other_prompt = first[:250] + prompts[5][:20]
    other_reference = reference_greedy(transformers_smollm2, other_prompt, COUNT)
    same = driver.sequence(first, COUNT, shared=original.pages[:23], computed=23 * 16)
    other = driver.sequence(other_prompt, COUNT, shared=original.pages[:15], computed=15 * 16)
    while len(same.tokens) < COUNT or len(other.tokens) < COUNT:
        driver.step([(s, 512) for s in (same, other) if len(s.tokens) < COUNT])
    assert_same(same, reference)
    assert_same(other, other_reference)
    assert_same(original, reference)
