"""The reference against its definition, as loops over rows, heads and keys in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_serve import AttentionOutput, AttentionSlices, SinkSpec, ffa_attention
from magi_serve.kernels.ffa.reference import ffa_attention_ref, paged_attention_ref
from magi_serve.testing import make_dense, make_paged, make_sink, make_slices

FP64 = torch.float64
few = settings(max_examples=40, derandomize=True, deadline=None, database=None)

Sees = Callable[[int, int], bool]


def direct(q, k, v, sees: Sees, *, scale: float, softcap: float = 0.0, sink=None):  # type: ignore[no-untyped-def]
    """Attention by its formula: scalar loops, sinks as further softmax columns without a value."""
    num_q, num_heads, _ = q.shape
    groups = num_heads // k.shape[1]
    out = torch.zeros(num_q, num_heads, v.shape[-1], dtype=FP64)
    lse = torch.full((num_q, num_heads), -math.inf, dtype=FP64)
    maxima = [-math.inf] * num_heads
    for i in range(num_q):
        keys = [j for j in range(len(k)) if sees(i, j)]
        for h in range(num_heads):
            columns = []
            for j in keys:
                s = scale * float(q[i, h] @ k[j, h // groups])
                s = softcap * math.tanh(s / softcap) if softcap else s
                columns.append((s, v[j, h // groups]))
                maxima[h] = max(maxima[h], s)
            if sink is not None:
                logits = sink.logits[i] if sink.per_token else sink.logits
                columns += [(float(s), torch.zeros_like(out[i, h])) for s in logits[:, h]]
            if not columns:
                continue
            top = max(s for s, _ in columns)
            total = sum(math.exp(s - top) for s, _ in columns)
            for s, value in columns:
                out[i, h] += math.exp(s - top) / total * value
            lse[i, h] = top + math.log(total)
    return AttentionOutput(out, lse, torch.tensor(maxima, dtype=FP64))


def assert_same(got: AttentionOutput, wanted: AttentionOutput) -> None:
    assert got.max_logits is not None and wanted.max_logits is not None
    torch.testing.assert_close(got.out, wanted.out, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(got.lse, wanted.lse, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(got.max_logits, wanted.max_logits, atol=1e-12, rtol=1e-12)


def in_slices(slices: AttentionSlices) -> Sees:
    """MagiAttention's definition: the half-open key interval of a row in a slice."""

    def sees(i: int, j: int) -> bool:
        for (qs, qe), (ks, ke), kind in zip(
            slices.q_ranges, slices.k_ranges, slices.mask_types, strict=True
        ):
            low = ks + ((i - qs) if kind & 2 else 0)
            high = ke - ((qe - i - 1) if kind & 1 else 0)
            if qs <= i < qe and low <= j < high:
                return True
        return False

    return sees


@pytest.mark.parametrize(
    ("kind", "num_q", "num_k", "picture"),
    [
        (0, 5, 2, ["11", "11", "11", "11", "11"]),
        (1, 5, 2, ["00", "00", "00", "10", "11"]),
        (2, 5, 2, ["11", "01", "00", "00", "00"]),
        (3, 5, 2, ["00", "00", "00", "00", "00"]),
        (0, 2, 5, ["11111", "11111"]),
        (1, 2, 5, ["11110", "11111"]),
        (2, 2, 5, ["11111", "01111"]),
        (3, 2, 5, ["11110", "01111"]),
        (3, 3, 3, ["100", "010", "001"]),
    ],
)
def test_each_mask_type_shows_what_magi_attention_draws(
    kind: int, num_q: int, num_k: int, picture: list[str]
) -> None:
    # Equal logits and one-hot values: out is 1/count at each key that a row sees.
    q = torch.zeros(num_q, 1, 8, dtype=FP64)
    k = torch.zeros(num_k, 1, 8, dtype=FP64)
    v = torch.eye(num_k, dtype=FP64)[:, None]
    slices = AttentionSlices([(0, num_q)], [(0, num_k)], [kind])
    out = ffa_attention(q, k, v, slices, kernel="reference").out[:, 0]
    assert ["".join(str(int(x > 0)) for x in row) for row in out] == picture


@few
@given(st.data())
def test_slices_match_the_formula(data: st.DataObject) -> None:
    num_q, num_k = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 14))
    slices = make_slices(
        num_q, num_k, seed=data.draw(st.integers(0, 999)), max_leaves=data.draw(st.integers(1, 8))
    )
    heads = data.draw(st.sampled_from([(1, 1), (4, 2), (3, 1)]))
    q, k, v = make_dense(
        num_q,
        num_k,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=8,
        head_dim_v=5,
        dtype=FP64,
    )
    kind = data.draw(st.sampled_from(["none", "one", "several", "per token", "strided"]))
    sink = make_sink(kind, num_q, heads[0])
    sink = None if sink is None else SinkSpec(sink.logits.double())
    options = {"softcap": data.draw(st.sampled_from([0.0, 2.0])), "sink": sink}
    got = ffa_attention_ref(q, k, v, slices, softmax_scale=0.3, **options)
    assert_same(got, direct(q, k, v, in_slices(slices), scale=0.3, **options))


@few
@given(st.data())
def test_paged_attention_matches_the_formula(data: st.DataObject) -> None:
    lens = data.draw(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), min_size=1, max_size=3)
    )
    batch = make_paged(
        [n for n, _ in lens],
        [n for _, n in lens],
        head_dim=8,
        page_size=16,
        dtype=FP64,
        padding_rows=data.draw(st.integers(0, 2)),
        seed=data.draw(st.integers(0, 99)),
    )
    side = st.none() | st.integers(0, 20)
    left, right = window = data.draw(st.tuples(side, side))
    each = st.lists(st.booleans(), min_size=len(lens), max_size=len(lens))
    causal = data.draw(st.booleans() | each)
    kind = data.draw(st.sampled_from(["none", "several", "per token"]))
    sink = make_sink(kind, batch.num_tokens, 4)
    sink = None if sink is None else SinkSpec(sink.logits.double())
    softcap = data.draw(st.sampled_from([0.0, 2.0]))

    # All sequences' keys in one row, and of each key its sequence and position.
    page_size = batch.kv.page_size
    keys = [(s, j) for s, n in enumerate(batch.k_lens) for j in range(n)]
    rows = [(s, i) for s, n in enumerate(batch.q_lens) for i in range(n)]
    places = [(int(batch.kv.page_table[s, j // page_size]), j % page_size) for s, j in keys]
    pages, offsets = torch.tensor(places, dtype=torch.long).reshape(-1, 2).unbind(1)
    k, v = batch.kv.k[pages, offsets], batch.kv.v[pages, offsets]

    def sees(row: int, column: int) -> bool:
        if row >= len(rows):
            return False
        (s, i), (of, j) = rows[row], keys[column]
        position = batch.k_lens[s] - batch.q_lens[s] + i
        is_causal = causal[s] if isinstance(causal, list) else causal
        return (
            s == of
            and (not is_causal or j <= position)
            and (left is None or j >= position - left)
            and (right is None or j <= position + right)
        )

    options = {"softcap": softcap, "sink": sink}
    got = paged_attention_ref(
        batch.q,
        batch.kv,
        batch.cu_seqlens_q,
        causal=torch.tensor(causal) if isinstance(causal, list) else causal,
        window=window,
        softmax_scale=0.3,
        **options,
    )
    assert_same(got, direct(batch.q, k, v, sees, scale=0.3, **options))
