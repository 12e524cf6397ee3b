"""What `tune` chooses: rows of tuned numbers, the work each is measured on, and what is tried.

Lists are short on purpose, written from what was learned by hand: a row's numbers interact, and a
grid of all of them takes hours. A round's changes are tried on the best row so far. Where Triton
walks pages smaller than its blocks, an even number of stages makes the kernel of the odd one below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from magi_serve.errors import ArgumentError
from magi_serve.kernels.ffa.tuned_files import RowName

Change = Mapping[str, int | float]
"""Numbers of a row that differ from the best row so far."""

HEADS = {64: "64:8:64s", 128: "32:8:128", 256: "16:8:256"}
"""Heads of the cases, by head dim."""


@dataclass(frozen=True, slots=True)
class Target:
    """A row to choose.

    Attributes:
        row: which one.
        cases: what it is measured on, the most telling first.
        rounds: changes to try, one list after the other.
        sizes: numbers of query rows to look for the crossover among, instead of changes; in the
            cases, ``{rows}`` stands for them.
        quick: whether ``--quick`` tunes it.
    """

    row: RowName
    cases: tuple[str, ...]
    rounds: tuple[tuple[Change, ...], ...] = ()
    sizes: tuple[int, ...] = ()
    quick: bool = False

    @property
    def name(self) -> str:
        what = f"{self.row.kernel}-{self.row.kind}/{self.row.dim}"
        return f"{what}/crossover" if self.sizes else what

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of rows that serve it, its own first; see `tuning.kinds`."""
        general = {"window": "prefill", "verify": "decode"}.get(self.row.kind)
        return (self.row.kind, general) if general else (self.row.kind,)

    def sized(self, rows: int) -> list[str]:
        """The cases of a crossover with so many query rows."""
        return [case.format(rows=rows) for case in self.cases]


def _changes(names: str, *lines: tuple[int, ...]) -> tuple[Change, ...]:
    """Numbers under the names of their columns."""
    return tuple(dict(zip(names.split(), line, strict=True)) for line in lines)


_WALK = "block_n num_warps num_stages"
_BLOCK = "block_m block_n num_warps num_stages programs_per_sm"
_GLUON = "consumers block_n num_stages programs_per_sm"

_SPLITS: tuple[Change, ...] = (
    {"programs_per_sm": 1},
    {"programs_per_sm": 3},
    {"programs_per_sm": 4},
    {"waves": 2},
    {"waves": 8},
    {"min_share": 2},
    {"min_share": 8},
)
_DECODE_TILES = _changes(
    _WALK, (32, 4, 6), (64, 4, 4), (64, 4, 7), (128, 4, 3), (32, 2, 6), (32, 4, 8), (128, 8, 3)
)
_VERIFY_TILES = _changes(
    _WALK, (32, 4, 5), (32, 4, 7), (64, 4, 3), (64, 8, 5), (128, 4, 3), (128, 8, 3)
)
_PACKED = "block_n num_stages programs_per_sm"
_PACKED_TILES = {
    64: _changes(_PACKED, (128, 6, 1), (128, 2, 2), (64, 6, 2), (64, 4, 2)),
    128: _changes(_PACKED, (128, 3, 1), (64, 6, 1), (64, 2, 2)),
    256: _changes(_PACKED, (64, 2, 1)),
}
_PACKED_SPLITS: tuple[Change, ...] = (
    {"waves": 1},
    {"waves": 3},
    {"waves": 4},
    {"min_share": 1},
    {"min_share": 4},
)
_PREFILL_TILES = {
    64: _changes(
        _BLOCK, (128, 64, 8, 3, 1), (128, 128, 8, 3, 1), (64, 64, 4, 3, 2), (128, 64, 4, 5, 2)
    ),
    128: _changes(
        _BLOCK, (128, 64, 8, 5, 1), (128, 128, 8, 2, 1), (64, 64, 4, 3, 2), (128, 64, 8, 2, 1)
    ),
    256: _changes(
        _BLOCK, (128, 64, 8, 2, 1), (64, 32, 4, 2, 1), (64, 64, 4, 2, 1), (128, 32, 8, 3, 1)
    ),
}
_GLUON_TILES = {
    64: _changes(
        _GLUON, (3, 128, 3, 1), (3, 128, 4, 1), (3, 64, 4, 1), (2, 128, 3, 1), (1, 128, 2, 2)
    ),
    128: _changes(
        _GLUON, (2, 64, 4, 1), (2, 64, 5, 1), (2, 64, 3, 1), (3, 64, 3, 1), (3, 64, 4, 1)
    ),
    256: _changes(_GLUON, (2, 64, 1, 1), (1, 64, 2, 1)),
}
_GLUON_WINDOW_TILES = {
    64: _changes(
        _GLUON, (1, 64, 2, 3), (1, 64, 4, 3), (1, 64, 4, 2), (1, 128, 2, 2), (2, 64, 3, 1)
    ),
    128: _changes(
        _GLUON, (1, 64, 3, 1), (1, 64, 2, 2), (2, 64, 3, 1), (2, 64, 4, 1), (1, 128, 2, 1)
    ),
}


def _cases(dim: int, rest: str, *works: str) -> tuple[str, ...]:
    return tuple(f"{work}/{HEADS[dim]}/{rest}" for work in works)


def _decode(kernel: str, dim: int) -> Target:
    works = ("1x1@8k", "64x1@8k", "1x1@128k", "256x1@2k")
    row = RowName(kernel, "decode", 16, dim)
    rounds = (_DECODE_TILES, _SPLITS)
    if kernel == "hopper":
        rounds = (_PACKED_TILES[dim], _PACKED_SPLITS)
    quick = kernel == "hopper" and dim != 256
    return Target(row, _cases(dim, "page16", *works), rounds, quick=quick)


def _verify(kernel: str, dim: int) -> Target:
    row = RowName(kernel, "verify", 16, dim)
    tiles = _PACKED_TILES[dim] if kernel == "hopper" else _VERIFY_TILES
    return Target(row, _cases(dim, "page16", "16x8@8k", "64x8@8k", "1x8@32k"), (tiles,))


def _prefill(kernel: str, dim: int) -> Target:
    works: tuple[str, ...] = ("1x8k", "1x2k@64k", "1x32k")
    tiles = (_GLUON_TILES if kernel == "hopper" else _PREFILL_TILES)[dim]
    if kernel == "triton":
        # Where Gluon has the long prompts, Triton has what is left.
        works = ("1x8k", "1x2k@32k") if dim == 256 else ("1x256@8k", "1x384@32k", "4x64@4k")
    row = RowName(kernel, "prefill", 16, dim)
    quick = kernel == "hopper" and dim != 256
    return Target(row, _cases(dim, "page16", *works), (tiles,), quick=quick)


def _window(dim: int) -> Target:
    windows = ("window128",) if dim == 64 else ("window1k", "window4k")
    cases = [c for w in windows for c in _cases(dim, f"page16/{w}", "1x8k", "1x32k")]
    row = RowName("hopper", "window", 16, dim)
    return Target(row, tuple(cases), (_GLUON_WINDOW_TILES[dim],), quick=dim == 64)


def _slices(kernel: str, dim: int) -> Target:
    works = ("1x8k", "blockcausal-32k", "band-32k") if dim < 256 else ("1x8k", "band-8k")
    cases = _cases(dim, "contiguous", *works)
    tiles = (_GLUON_TILES if kernel == "hopper" else _PREFILL_TILES)[dim]
    return Target(RowName(kernel, "slices", 16, dim), cases, (tiles,))


def _crossover(kind: str, dim: int) -> Target:
    rest = {"prefill": "page16", "window": "page16/window128", "slices": "contiguous"}[kind]
    cases = _cases(dim, rest, "1x{rows}", "1x{rows}@16k")
    sizes = (64, 128, 256, 384, 512, 768, 1024, 1536)
    return Target(RowName("hopper", kind, 16, dim), cases, sizes=sizes)


def targets() -> tuple[Target, ...]:
    """Every target, the most important first; crossovers after the tiles on both sides."""
    return (
        _decode("hopper", 128),
        _decode("hopper", 64),
        _prefill("hopper", 128),
        _prefill("hopper", 64),
        _window(64),
        _verify("hopper", 128),
        _verify("hopper", 64),
        _slices("hopper", 128),
        _prefill("triton", 128),
        _prefill("triton", 64),
        _crossover("prefill", 128),
        _crossover("prefill", 64),
        _crossover("window", 64),
        _window(128),
        _slices("hopper", 64),
        _crossover("slices", 128),
        _decode("hopper", 256),
        _prefill("hopper", 256),
        _decode("triton", 128),
        _decode("triton", 64),
        _verify("triton", 128),
        _verify("triton", 64),
        _decode("triton", 256),
        _prefill("triton", 256),
        _slices("triton", 256),
    )


def select(patterns: Sequence[str], *, quick: bool = False) -> list[Target]:
    """The targets whose names fit one of `patterns`, all for none.

    `quick` keeps the most important ones, and of each two cases and the first round.

    Raises:
        ArgumentError: a pattern fits no target.
    """
    everything = targets()
    for pattern in patterns:
        if not any(fnmatchcase(target.name, pattern) for target in everything):
            raise ArgumentError(
                f"--case {pattern!r} is unknown; accepted: "
                f"{', '.join(target.name for target in everything)}, and patterns of these"
            )
    chosen = [
        target
        for target in everything
        if (any(fnmatchcase(target.name, p) for p in patterns) if patterns else True)
        and (target.quick or patterns or not quick)
    ]
    if not quick:
        return chosen
    return [replace(t, cases=t.cases[:2], rounds=t.rounds[:1]) for t in chosen]
