"""The runner: which logits come back, what is refused, and that batching changes nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.model.tiny import VOCAB, tiny_decoder, tokens

from firsttoken_runtime.kernels import reference
from firsttoken_runtime.kernels.dispatch import FusedKernelsUnavailable, Kernels, Obstacle, Operator
from firsttoken_runtime.model.decoder import Decoder
from firsttoken_runtime.model.errors import ModelError
from firsttoken_runtime.model.linear import Linear
from firsttoken_runtime.model.load import kv_bytes_per_token, resolve_device, resolve_dtype
from firsttoken_runtime.model.runner import Chunk, ModelRunner
from firsttoken_runtime.model.step import Decode, PlanSettings, Prefill, plan_step

PAGE = 4


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_decoder()


def alone(model: Decoder, ids: list[int]) -> torch.Tensor:
    """Logits after ids, computed in one piece by themselves."""
    pages = list(range(-(-len(ids) // PAGE)))
    return ModelRunner(model, len(pages), PAGE).run([Chunk(ids, 0, pages, 1)])[0]


def test_only_sampled_chunks_give_logits_in_chunk_order(model):
    """Whatever order the step computes them in: decodes go first, and longest first among them."""
    runner = ModelRunner(model, 64, PAGE)
    a, b, c = tokens(9, 1), tokens(5, 2), tokens(30, 3)
    runner.run([Chunk(a[:8], 0, [0, 1, 2], 0), Chunk(c[:29], 0, list(range(10, 18)), 0)])
    logits = runner.run(
        [
            Chunk(a[8:], 8, [0, 1, 2], 1),
            Chunk(tokens(3, 4), 0, [30], 0),
            Chunk(b, 0, [5, 4], 1),
            Chunk(c[29:], 29, list(range(10, 18)), 1),
        ]
    )
    assert logits.shape == (3, VOCAB)
    assert logits.dtype == torch.float32
    for row, ids in zip(logits, (a, b, c), strict=True):
        torch.testing.assert_close(row, alone(model, ids), atol=1e-4, rtol=0)


def test_nothing_sampled_and_nothing_to_do(model):
    runner = ModelRunner(model, 8, PAGE)
    assert runner.run([Chunk([1, 2, 3], 0, [0], 0)]).shape == (0, VOCAB)
    assert runner.run([]).shape == (0, VOCAB)


def test_an_unsampled_chunk_still_leaves_its_keys_and_values(model):
    ids = tokens(14, 8)
    runner = ModelRunner(model, 8, PAGE)
    runner.run([Chunk(ids[:6], 0, [7, 3], 0)])
    runner.run([Chunk(ids[6:13], 6, [7, 3, 0, 1], 0)])
    torch.testing.assert_close(
        runner.run([Chunk(ids[13:], 13, [7, 3, 0, 1], 1)])[0], alone(model, ids), atol=1e-4, rtol=0
    )


def test_pages_of_others_are_left_alone(model):
    runner = ModelRunner(model, 8, PAGE)
    pools = [pool.codes for pool in runner.pools]
    for pool in pools:
        pool.fill_(3.0)
    runner.run([Chunk(tokens(6, 1), 0, [2, 5], 0)])
    for pool in pools:
        touched = {
            (page, at) for page in range(8) for at in range(PAGE) if not torch.all(pool[page, at] == 3.0)
        }
        assert touched == {(2, 0), (2, 1), (2, 2), (2, 3), (5, 0), (5, 1)}


@given(data=st.data())
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("windows", [(None, None), (None, 7), (5, 5)])
def test_any_mix_of_chunks_gives_what_each_sequence_gives_alone(windows, data):
    """Random lengths, random cuts, random page tables, several sequences per step."""
    model = MODELS[windows]
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    free = data.draw(st.permutations(range(sum(-(-length // PAGE) for length in lengths) + 2)))
    runner = ModelRunner(model, len(free), PAGE)
    work = []
    for number, length in enumerate(lengths):
        need = -(-length // PAGE)
        work.append(SimpleNamespace(ids=tokens(length, number), pages=free[:need], done=0, row=None))
        free = free[need:]
    while unfinished := [w for w in work if w.done < len(w.ids)]:
        chosen = data.draw(st.lists(st.sampled_from(range(len(unfinished))), min_size=1, unique=True))
        step = []
        for w in (unfinished[i] for i in chosen):
            size = data.draw(st.sampled_from([1, 3, 4, 5, 11, 30]))
            end = min(len(w.ids), w.done + size)
            step.append((w, Chunk(w.ids[w.done : end], w.done, w.pages, int(end == len(w.ids)))))
        rows = iter(runner.run([chunk for _, chunk in step]))
        for w, chunk in step:
            w.done = chunk.end
            w.row = next(rows) if chunk.logits else None
    for w in work:
        torch.testing.assert_close(w.row, alone(model, w.ids), atol=1e-4, rtol=0)


MODELS = {windows: tiny_decoder(windows) for windows in [(None, None), (None, 7), (5, 5)]}


@pytest.mark.parametrize("windows", [(None, None), (None, 7)])
def test_logits_of_the_last_tokens_of_a_chunk_are_those_of_shorter_prompts(windows):
    model = MODELS[windows]
    runner = ModelRunner(model, 64, PAGE)
    a, b = tokens(14, 1), tokens(9, 2)
    runner.run([Chunk(a[:8], 0, [0, 1, 2, 3], 0)])
    rows = runner.run([Chunk(a[8:], 8, [0, 1, 2, 3], 4), Chunk([5], 0, [9], 0), Chunk(b, 0, [5, 4, 6], 9)])
    right = [alone(model, a[:end]) for end in range(11, 15)] + [alone(model, b[:end]) for end in range(1, 10)]
    torch.testing.assert_close(rows, torch.stack(right), atol=1e-4, rtol=0)


def test_a_window_hides_what_lies_before_it():
    """Two layers of window 5: what came 9 or more tokens before the last one cannot matter."""
    ids = tokens(30, 1)
    other = [(token + 1) % VOCAB for token in ids[:21]] + ids[21:]
    windowed, plain = MODELS[(5, 5)], MODELS[(None, None)]
    torch.testing.assert_close(alone(windowed, ids), alone(windowed, other), atol=1e-5, rtol=0)
    assert (alone(plain, ids) - alone(plain, other)).abs().max() > 1e-2


def test_contexts_of_very_different_length_decode_in_groups():
    """One long context must not make short ones be padded to it."""
    settings_ = PlanSettings(PAGE, (None,), torch.float32, torch.device("cpu"))
    chunks = [Chunk([1], end - 1, list(range(-(-end // PAGE))), 1) for end in (600, 590, 20, 8)]
    segments = plan_step(chunks, settings_).segments[None]
    assert [(s.first, s.sequences, s.context) for s in segments] == [(0, 2, 600), (2, 2, 20)]


def test_a_first_chunk_needs_no_gather_and_no_mask():
    settings_ = PlanSettings(PAGE, (None,), torch.float32, torch.device("cpu"))
    (segment,) = plan_step([Chunk([1, 2, 3], 0, [7], 1)], settings_).segments[None]
    assert isinstance(segment, Prefill)
    assert segment.pages is None
    assert segment.mask is None


def test_neighbouring_pages_are_read_in_place():
    settings_ = PlanSettings(PAGE, (None,), torch.float32, torch.device("cpu"))
    run, scattered = (
        plan_step([Chunk([1], 9, pages, 1)], settings_).segments[None][0].pages
        for pages in ([5, 6, 7], [5, 7, 6])
    )
    assert (run.first, run.count, run.index) == (5, 3, None)
    assert scattered.index.tolist() == [5, 7, 6]


def test_with_the_fused_kernel_all_sequences_decode_as_one_group():
    settings_ = PlanSettings(PAGE, (None,), torch.float32, torch.device("cpu"), fused_decode=True)
    chunks = [Chunk([1], end - 1, list(range(-(-end // PAGE))), 1) for end in (3, 600)]
    (segment,) = plan_step(chunks, settings_).segments[None]
    assert isinstance(segment, Decode)
    assert segment.lengths.tolist() == [600, 3]
    assert segment.page_table.shape == (2, 150)


def test_the_fused_decode_path_gives_the_same_logits(model, monkeypatch):
    """The path of a GPU, with the kernel's reference in its place."""
    a, b = tokens(9, 1), tokens(21, 2)
    runner = ModelRunner(model, 16, PAGE)
    runner.run([Chunk(a[:8], 0, [0, 1, 2], 0), Chunk(b[:20], 0, list(range(5, 11)), 0)])
    fused = {Operator.PAGED_DECODE: None}
    monkeypatch.setattr(Kernels, "obstacle", lambda _, operator: fused.get(operator, Obstacle.NO_CUDA))
    monkeypatch.setattr(Kernels, "_fused", lambda _: reference)
    rows = runner.run([Chunk(a[8:], 8, [0, 1, 2], 1), Chunk(b[20:], 20, list(range(5, 11)), 1)])
    monkeypatch.undo()
    for row, ids in zip(rows, (a, b), strict=True):
        torch.testing.assert_close(row, alone(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (Chunk([], 0, [0], 1), "at least one token"),
        (Chunk([1], -1, [0], 1), "0 or more"),
        (Chunk([1] * 5, 0, [0], 1), "do not hold positions up to 4"),
        (Chunk([1], 32, list(range(8)), 1), "beyond the longest sequence of 32"),
        (Chunk([1, 2], 0, [0], 3), "logits of 3 tokens asked for, the chunk has 2"),
    ],
)
def test_impossible_chunks(model, chunk, words):
    with pytest.raises(ValueError, match=words):
        ModelRunner(model, 8, PAGE).run([chunk])


def test_a_pool_that_holds_nothing(model):
    with pytest.raises(ValueError, match="holds nothing"):
        ModelRunner(model, 0, PAGE)


def test_kv_size_is_what_the_pool_takes(model):
    runner = ModelRunner(model, 8, PAGE)
    taken = sum(pool.codes.numel() * pool.codes.element_size() for pool in runner.pools)
    assert taken == 8 * PAGE * kv_bytes_per_token(model.config, torch.float32)


def test_capabilities_on_cpu_say_why_not(model):
    runner = ModelRunner(model, 8, PAGE)
    assert runner.capabilities() == {
        "fusedKernels": "no CUDA device",
        "cudaGraphs": "no CUDA device",
        "kvQuantization": None,
        "slidingWindow": None,
    }
    with pytest.raises(FusedKernelsUnavailable, match="no CUDA device"):
        runner.require_fused_kernels()


def test_every_operator_of_a_step_is_counted():
    model = tiny_decoder()
    runner = ModelRunner(model, 8, PAGE)
    runner.run([Chunk([1, 2], 0, [0], 1)])
    runner.run([Chunk([3], 2, [0], 1)])
    counted = {d.operator: d.reference_launches for d in runner.kernel_decisions()}
    assert counted == {
        Operator.RMS_NORM: 2,
        Operator.ADD_RMS_NORM: 8,
        Operator.SILU_GATE: 4,
        Operator.ROTATE_AND_WRITE: 4,
        Operator.PAGED_DECODE: 2,
    }


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_weight_multiplies_like_the_plain_one(rows, biased):
    weight, x = torch.randn(96, 64), torch.randn(rows, 64)
    bias = torch.randn(96) if biased else None
    packed = Linear(weight, bias)
    assert packed.packed
    torch.testing.assert_close(packed(x), torch.nn.functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


def test_device_and_dtype_by_name():
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", cpu) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", cpu) == torch.float16
    with pytest.raises(ModelError, match="'int8' is not supported; use auto, float32"):
        resolve_dtype("int8", cpu)


@pytest.mark.parametrize("name", ["gpu", "mps", ""])
def test_a_device_that_is_none_of_ours(name):
    with pytest.raises(ModelError, match=f"'{name}' is not supported; use auto, cpu or cuda"):
        resolve_device(name)


def test_cuda_asked_for_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ModelError, match="no CUDA device"):
        resolve_device("cuda")
