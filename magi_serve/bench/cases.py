"""What `bench attention` measures: cases, the work in each, and the ratios that they have to reach.

A case is written ``WORK/HEADS/LAYOUT[/windowN][/STORED]``:

- WORK: ``COUNTxROWS`` prompts, ``COUNTxROWS@KEYS`` sequences whose last ROWS of KEYS tokens are the
  queries, ``lognormalCOUNT`` prompts of mixed lengths, several of these joined by ``+``; or a mask
  of slices over one length: ``blockcausal-LENGTH``, ``prefix-LENGTH``, ``band-LENGTH``.
- HEADS: ``Q:KV:DIM``, with a final ``s`` for a learnable sink per head.
- LAYOUT: ``contiguous`` or ``pageN``.
- ``windowN``: each row sees its own key and the N - 1 before it.
- STORED: ``e4m3``, ``e5m2`` or ``int8``: quantised pages with a scale per kv head.

Numbers may end in ``k`` for 1024: ``1x2k@128k/32:8:128/page16``.
"""

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from statistics import NormalDist

import numpy as np

from magi_serve.errors import ArgumentError
from magi_serve.masks import AttentionSlices, MaskType

ELEMENT_BYTES = 2
"""Queries and outputs are bf16, and so are keys and values that are not quantised."""
STORED = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "int8": "int8"}
"""How keys and values can be quantised, and torch's name for it."""
MASKS = ("blockcausal", "prefix", "band")
_PATTERN = re.compile(
    r"(?P<work>[^/]+)/(?P<q>\d+):(?P<kv>\d+):(?P<dim>\d+)(?P<sink>s?)"
    r"/(contiguous|page(?P<page>\d+))(/window(?P<window>\d+k?))?"
    r"(/(?P<stored>e4m3|e5m2|int8))?"
)
_FORM = (
    "WORK/HEADS/LAYOUT[/windowN][/STORED], as 1x8k/32:8:128/page16, 64x1@8k/64:8:64s/page16, "
    "lognormal32/32:8:128/page16 or band-32k/32:8:128/contiguous"
)


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement.

    Attributes:
        name: as it is written, see above.
        q_lens, k_lens: query rows and keys of each sequence; the rows are its last tokens.
        page_size: keys per page; None for contiguous keys.
        window: how many keys a row sees, None for all before it.
        stored: one of `STORED`, None for bf16.
        mask: one of `MASKS` instead of causal sequences, or None.
        targets: what has to be reached, by baseline (a ratio), or `read` (a share of bandwidth).
    """

    name: str
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sink: bool
    page_size: int | None
    window: int | None = None
    mask: str | None = None
    stored: str | None = None
    group: str = "own"
    targets: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def num_decodes(self) -> int:
        """Leading sequences of few rows: what vLLM sorts to the front of a batch."""
        spans = zip(self.q_lens, self.k_lens, strict=True)
        return sum(1 for _ in itertools.takewhile(lambda s: s[0] <= 8 < s[1], spans))

    @property
    def key_bytes(self) -> int:
        """Bytes of a number of a key or value."""
        return 1 if self.stored else ELEMENT_BYTES

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of all sequences, seen or not."""
        return sum(self.k_lens) * self.num_kv_heads * self.head_dim * 2 * self.key_bytes

    def visible_pairs(self) -> int:
        """(query row, key) pairs that are not masked."""
        return sum(int((end - begin).sum()) for begin, end in self.intervals())

    def flops(self) -> int:
        """Multiplications and additions of ``q·k`` and ``p·v`` over the visible pairs."""
        return 4 * self.visible_pairs() * self.num_q_heads * self.head_dim

    def bytes(self) -> int:
        """The least traffic: every query, output, and visible key and value once."""
        rows = 2 * self.num_tokens * self.num_q_heads * ELEMENT_BYTES
        keys = 2 * self._visible_keys() * self.num_kv_heads * self.key_bytes
        return (rows + keys) * self.head_dim

    def _visible_keys(self) -> int:
        if self.mask is not None or self.window is None:
            return sum(self.k_lens)
        spans = zip(self.q_lens, self.k_lens, strict=True)
        return sum(min(keys, rows + self.window - 1) for rows, keys in spans)

    def intervals(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Visible keys of every row as ``[begin, end)`` intervals that do not overlap.

        Each entry holds one interval per row, empty for rows that need fewer. Keys count through
        all sequences, one after the other.
        """
        if self.mask is not None:
            return slice_intervals(make_slices(self), self.num_tokens)
        position = np.concatenate(
            [np.arange(n - q, n) for q, n in zip(self.q_lens, self.k_lens, strict=True)]
        )
        first = np.repeat(np.cumsum((0, *self.k_lens[:-1])), self.q_lens)
        begin = np.zeros_like(position)
        if self.window is not None:
            begin = np.maximum(position - self.window + 1, 0)
        return [(first + begin, first + position + 1)]


def make_slices(case: Case) -> AttentionSlices:
    """The mask of `case` for packed queries and keys."""
    if case.window is not None:
        raise ArgumentError(f"{case.name}: windows need pages; expected pageN in place of it")
    total = case.num_tokens
    if case.mask is None:
        ends_q, ends_k = np.cumsum(case.q_lens), np.cumsum(case.k_lens)
        return AttentionSlices(
            np.stack([ends_q - case.q_lens, ends_q], 1),
            np.stack([ends_k - case.k_lens, ends_k], 1),
            [MaskType.CAUSAL] * len(ends_q),
        )
    found: list[tuple[tuple[int, int], tuple[int, int], int]] = []
    if case.mask == "blockcausal":
        # Documents of growing length; rows of a block see their document up to the block's end.
        bounds = [total * i * (i + 1) // 20 for i in range(5)]
        block = max(1, total // 32)
        for begin, end in itertools.pairwise(bounds):
            for q0 in range(begin, end, block):
                q1 = min(q0 + block, end)
                found.append(((q0, q1), (begin, q1), MaskType.FULL))
    elif case.mask == "prefix":
        # Half the tokens are a prefix, which eight continuations share.
        prefix = total // 2
        found.append(((0, prefix), (0, prefix), MaskType.CAUSAL))
        bounds = [prefix + (total - prefix) * i // 8 for i in range(9)]
        for begin, end in itertools.pairwise(bounds):
            found.append(((begin, end), (0, prefix), MaskType.FULL))
            found.append(((begin, end), (begin, end), MaskType.CAUSAL))
    else:
        # Every row sees its own key and the total / 8 before it.
        width = total // 8
        found.append(((0, width), (0, width), MaskType.CAUSAL))
        found.append(((width, total), (0, total), MaskType.BI_CAUSAL))
    return AttentionSlices(*zip(*found, strict=True))


def slice_intervals(slices: AttentionSlices, num_rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Slices as rows of intervals, see `Case.intervals`."""
    layers: list[tuple[np.ndarray, np.ndarray]] = []
    taken: list[np.ndarray] = []
    for q0, q1, k0, k1, lo, hi in slices.bands().tolist():
        row = np.arange(q0, q1)
        free = (i for i, used in enumerate(taken) if not used[q0:q1].any())
        layer = next(free, len(layers))
        if layer == len(layers):
            layers.append((np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)))
            taken.append(np.zeros(num_rows, bool))
        begin = np.maximum(k0, row + lo)
        layers[layer][0][q0:q1] = begin
        layers[layer][1][q0:q1] = np.maximum(begin, np.minimum(k1, row + hi + 1))
        taken[layer][q0:q1] = True
    return layers


def lognormal_lengths(count: int) -> tuple[int, ...]:
    """Lengths at even quantiles of a log-normal law from 64 to 16k, in a fixed mixed order."""
    low, high = math.log(64), math.log(16384)
    law = NormalDist((low + high) / 2, (high - low) / 5)
    values = [math.exp(law.inv_cdf((i + 0.5) / count)) for i in range(count)]
    lengths = [min(max(round(v), 64), 16384) for v in values]
    return tuple(lengths[i] for i in np.random.default_rng(0).permutation(count))


def parse(text: str) -> Case:
    """The case that `text` writes.

    Raises:
        ArgumentError: it is not written as the module says.
    """
    match = _PATTERN.fullmatch(text)
    if not match:
        raise ArgumentError(f"case {text!r} is not accepted; expected {_FORM}")
    mask = None
    kind, _, length = match["work"].rpartition("-")
    if kind in MASKS and re.fullmatch(r"\d+k?", length):
        mask = kind
        lens = [(_number(length), _number(length))]
    else:
        lens = [s for part in match["work"].split("+") for s in _sequences(part, text)]
    case = Case(
        text,
        tuple(q for q, _ in lens),
        tuple(k for _, k in lens),
        int(match["q"]),
        int(match["kv"]),
        int(match["dim"]),
        bool(match["sink"]),
        int(match["page"]) if match["page"] else None,
        _number(match["window"]) if match["window"] else None,
        mask,
        match["stored"],
    )
    few = 32 if mask else 1
    for rows, keys in lens or [(0, 0)]:
        if rows < few or rows > keys:
            raise ArgumentError(
                f"case {text!r} has {rows} rows over {keys} keys; expected at least one row per "
                "sequence (32 for a mask of slices), and as many keys as rows or more"
            )
    sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size, case.window)
    if 0 in sizes or case.num_q_heads % case.num_kv_heads:
        raise ArgumentError(
            f"case {text!r} has a size of 0, or query heads that are no multiple of kv heads; "
            f"expected {_FORM}"
        )
    if case.page_size is None and case.window is not None:
        raise ArgumentError(f"case {text!r}: windows need pages; write pageN for contiguous")
    if case.page_size is None and case.stored is not None:
        raise ArgumentError(f"case {text!r}: quantised keys need pages; write pageN for contiguous")
    if case.page_size is not None and mask is not None:
        raise ArgumentError(f"case {text!r}: slices need packed keys; write contiguous for pageN")
    return case


def _number(text: str) -> int:
    return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)


def _sequences(part: str, case: str) -> list[tuple[int, int]]:
    if match := re.fullmatch(r"lognormal(\d+)", part):
        return [(n, n) for n in lognormal_lengths(int(match[1]))]
    if match := re.fullmatch(r"(\d+)x(\d+k?)(?:@(\d+k?))?", part):
        rows = _number(match[2])
        return [(rows, _number(match[3]) if match[3] else rows)] * int(match[1])
    raise ArgumentError(f"work {part!r} of case {case!r} is not accepted; expected {_FORM}")


@functools.cache
def standard_cases() -> tuple[Case, ...]:
    """The cases with targets, in the groups of `MEAN_TARGETS`."""
    from magi_serve.bench.targets import rows

    return tuple(rows())


def select(texts: Sequence[str], *, quick: bool = False) -> list[Case]:
    """The cases that `texts` name: groups, standard cases, patterns of names, or others written
    out; all standard cases for none. `quick` keeps the first of each group and head shape.

    Raises:
        ArgumentError: a text is none of these.
    """
    standard = standard_cases()
    groups = list(dict.fromkeys(c.group for c in standard))
    chosen: dict[str, Case] = {}
    for text in texts or groups:
        found = [c for c in standard if text == c.group or fnmatchcase(c.name, text)]
        if not found and "/" not in text:
            raise ArgumentError(
                f"case {text!r} is unknown; accepted: the groups {', '.join(groups)}, names and "
                f"patterns of names that --list shows, or {_FORM}"
            )
        chosen |= {c.name: c for c in found or [parse(text)]}
    if not quick:
        return list(chosen.values())
    first: dict[tuple[str, int], Case] = {}
    for case in chosen.values():
        first.setdefault((case.group, case.head_dim), case)
    return list(first.values())
