"""One buffer, laid out for any precision per layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.model.test_runner import PAGE, VOCAB, tiny_decoder, tokens

from firsttoken_runtime.model.kv_pool import KvBudget, KvPrecision, KvShape, describe
from firsttoken_runtime.model.runner import Chunk, ModelRunner

CPU = torch.device("cpu")
QUANTIZED = (KvPrecision.FP8, KvPrecision.INT8, KvPrecision.INT4)
tables = st.lists(st.sampled_from(KvPrecision), min_size=3, max_size=3).map(tuple)


def budget(dtype: torch.dtype = torch.float32, pages: int = 10, head_dim: int = 6) -> KvBudget:
    return KvBudget(KvShape(3, 2, head_dim, dtype, 5), pages)


@given(table=tables, dtype=st.sampled_from([torch.float32, torch.bfloat16]), pages=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_no_byte_belongs_to_two_tensors_and_none_lies_outside(table, dtype, pages) -> None:
    kv = budget(dtype, pages)
    buffer = kv.allocate(CPU)
    pools = kv.lay_out(buffer, table)
    tensors = [t for pool in pools for t in (pool.codes, pool.scales) if t is not None]
    taken = 0
    for number, tensor in enumerate(tensors, 1):
        assert tensor.data_ptr() % 64 == buffer.data_ptr() % 64
        tensor.view(torch.uint8).fill_(number)
        taken += tensor.numel() * tensor.element_size()
    for number, tensor in enumerate(tensors, 1):
        assert torch.all(tensor.view(torch.uint8) == number)
    assert int((buffer != 0).sum()) == taken == kv.pages_at(table) * kv.shape.page_bytes(table)
    assert [pool.precision for pool in pools] == list(table)


@given(table=tables)
def test_no_table_has_fewer_pages_than_the_models_own_precision(table) -> None:
    kv = budget(torch.bfloat16, head_dim=64)
    assert kv.obstacle(table) is None
    assert kv.pages_at(kv.model_table) == kv.pages <= kv.pages_at(table)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "precision", "words"),
    [
        (torch.float32, 5, KvPrecision.INT4, "head size 5 is odd"),
        (torch.bfloat16, 1, KvPrecision.INT8, "heads of 1 elements take more memory"),
    ],
)
def test_what_cannot_be(dtype, head_dim, precision, words) -> None:
    kv = budget(dtype, head_dim=head_dim)
    reason = kv.obstacle(kv.shape.uniform(precision))
    assert reason is not None
    assert words in reason


def test_bytes_of_smollm2() -> None:
    shape = KvShape(30, 3, 64, torch.float32, 16)
    found = {p: shape.token_bytes(shape.uniform(p)) for p in KvPrecision}
    assert found == {"model": 46_080, "fp8": 11_880, "int8": 11_880, "int4": 6_480}


@given(one=tables, other=tables)
def test_tables_in_words_differ_where_tables_do(one, other) -> None:
    assert (describe(one) == describe(other)) == (one == other)


def test_words() -> None:
    assert describe((KvPrecision.INT8,) * 4) == "int8"
    assert describe((KvPrecision.FP8, KvPrecision.MODEL, KvPrecision.FP8)) == "fp8; layer 1 model"


@given(
    changes=st.lists(st.lists(st.sampled_from(KvPrecision), min_size=2, max_size=2).map(tuple), max_size=5)
)
@settings(max_examples=25, deadline=None)
def test_after_any_changes_the_pool_is_zeros_and_answers_are_those_of_a_new_one(changes) -> None:
    """Nothing of an older layout is left: what is NaN in one precision is a number in another."""
    model = tiny_decoder()
    runner = ModelRunner(model, 12, PAGE)
    ids = tokens(19, 1)
    for table in changes:
        runner.run([Chunk(ids, 0, [11, 3, 0, 7, 5], 1), Chunk(ids[:3], 0, [8], 1)])
        for pool in runner.pools:
            pool.codes[:12].view(torch.uint8).fill_(0xFF)  # NaN in float32 and in fp8
        before = runner.kv_table
        assert runner.set_kv_table(table) == runner.kv.pages_at(table) == runner.total_pages
        assert before == table or not runner._buffer.any()
    fresh = ModelRunner(model, 12, PAGE)
    fresh.set_kv_table(runner.kv_table)
    assert fresh.run([Chunk(ids, 0, [0, 1, 2, 3, 4], 1)]).equal(
        runner.run([Chunk(ids, 0, [0, 1, 2, 3, 4], 1)])
    )


@pytest.mark.parametrize("precision", QUANTIZED)
def test_paths_agree_within_a_precision(precision) -> None:
    """Whole, in chunks, behind a cached prefix, token by token, and beside others: one and the same answer.

    To the last bit but for the order of float sums; where that moves a value over the edge of a code it is
    off by a step, so the bound is well under what quantizing itself changes, and not 1e-4.
    """
    model = tiny_decoder()
    runner = ModelRunner(model, 64, PAGE)
    ids = tokens(30, 4)
    pages = [9, 2, 33, 17, 5, 60, 41, 8]
    exact = runner.run([Chunk(ids, 0, pages, 1)])[0]
    runner.set_kv_table(runner.kv.shape.uniform(precision))
    whole = runner.run([Chunk(ids, 0, pages, 1)])[0]
    quantizing = float((whole - exact).abs().max())
    assert quantizing > 1e-4  # it was quantized

    def check(row: torch.Tensor) -> None:
        assert float((row - whole).abs().max()) <= quantizing / 4

    for size in (1, 5, 8, 29):
        for start in range(0, 30, size):
            row = runner.run([Chunk(ids[start : start + size], start, pages, 1)])
        check(row[0])
    cached = [*pages[:6], 50, 51]  # the first 24 tokens are there already
    check(runner.run([Chunk(ids[24:], 24, cached, 1)])[0])
    others = [Chunk(tokens(11, 5), 0, [20, 21, 22], 1), Chunk(tokens(1, 6), 0, [23], 1)]
    check(runner.run([*others, Chunk(ids, 0, pages, 1)])[2])
    check(runner.run([*others, Chunk(ids[29:], 29, pages, 1)])[2])


def test_layers_may_differ() -> None:
    """A table of its own for a layer: between all quantized and none, and exact where nothing is."""
    model = tiny_decoder()
    runner = ModelRunner(model, 16, PAGE)
    ids, pages = tokens(30, 4), list(range(8))
    exact = runner.run([Chunk(ids, 0, pages, 1)])

    def error(*table: KvPrecision) -> float:
        runner.set_kv_table(table)
        return float((runner.run([Chunk(ids, 0, pages, 1)]) - exact).norm())

    model_precision, int4 = KvPrecision.MODEL, KvPrecision.INT4
    both, first, last = error(int4, int4), error(int4, model_precision), error(model_precision, int4)
    assert 0 < first < both * 1.5
    assert 0 < last < both * 1.5
    assert error(model_precision, model_precision) == 0


def test_a_quantized_layer_says_why_its_kernels_are_not_fused(monkeypatch) -> None:
    from firsttoken_runtime.kernels.dispatch import Kernels, Obstacle, Operator

    kernels = Kernels(CPU, torch.float32, 64)
    kernels._possible = dict.fromkeys(Operator)
    kernels.set_kv_quantized(True)
    unfused = {operator for operator in Operator if kernels.obstacle(operator) is Obstacle.KV_PRECISION}
    assert unfused == {Operator.ROTATE_AND_WRITE, Operator.PAGED_DECODE}
    kernels.set_kv_quantized(False)
    assert all(kernels.obstacle(operator) is None for operator in Operator)


def test_more_pages_are_usable() -> None:
    model = tiny_decoder()
    runner = ModelRunner(model, 8, PAGE)
    total = runner.set_kv_table(runner.kv.shape.uniform(KvPrecision.INT4))
    assert total > 16
    row = runner.run([Chunk(tokens(3, 1), 0, [total - 1], 1)])
    assert row.shape == (1, VOCAB)
    assert row.isfinite().all()
