"""Files of tuned numbers, `tuned/*.json`: what may stand in them, reading and writing.

A file says what it is for, how it was made, and holds rows of numbers::

    {
      "gpus": ["NVIDIA H200"],
      "arch": 90,
      "for_all_of_arch": true,
      "made_by": [{"how": "magi-serve tune", "gpu": "NVIDIA H200", ...,
                   "rows": {"triton/decode_16bit/128": "1.043x of the former one"}}],
      "tiles": {"triton": {"decode_16bit": {"128": {"block_n": 64, "num_warps": 4, ...}}}}
    }

- ``gpus``: names as the driver has them, compared without case, spaces and "NVIDIA"; left out: any.
- ``arch``: compute capability, ``10 * major + minor``; left out: any.
- ``for_all_of_arch``: whether it also serves GPUs of ``arch`` that no file names, and compilation
  where there is no GPU.
- ``made_by``: what measured which rows, as text; ``rows`` names rows as above.
- ``tiles``: rows by kernel, kind of work with the width of q's dtype, and head dim, padded to a
  power of two; the kinds of work and the numbers of each kernel's rows are in `FIELDS`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from magi_serve.errors import ArgumentError
from magi_serve.kernels.ffa.plan import TileConfig

Row = Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class Field:
    """A number of a row: one of `values`, or any from `low` to `high` where there are none."""

    values: tuple[int, ...] = ()
    low: float = 0
    high: float = 0
    required: bool = True

    def accepts(self, value: object) -> bool:
        if self.values:
            return type(value) is int and value in self.values
        return type(value) in (int, float) and self.low <= value <= self.high  # type: ignore[operator]

    def __str__(self) -> str:
        if not self.values:
            return f"a number from {self.low:g} to {self.high:g}"
        first, last = self.values[0], self.values[-1]
        if len(self.values) > 2 and self.values == tuple(range(first, last + 1)):
            return f"an integer from {first} to {last}"
        return f"one of {', '.join(map(str, self.values))}"


def _integers(low: int, high: int, *, required: bool = True) -> Field:
    return Field(tuple(range(low, high + 1)), required=required)


_POWERS = Field((16, 32, 64, 128, 256))
_WALK = {
    "block_n": _POWERS,
    "num_warps": Field((1, 2, 4, 8, 16)),
    "num_stages": _integers(1, 8),
    "programs_per_sm": _integers(1, 8),
    "waves": _integers(1, 16, required=False),
    "min_share": _integers(1, 64, required=False),
}
_TILES = {"block_m": _POWERS, **_WALK}
_WARP_GROUPS = {
    "consumers": Field((1, 2, 3)),
    "block_n": Field((64, 128)),
    "num_stages": _integers(1, 8),
    "programs_per_sm": Field((1, 2, 3)),
    "min_tiles_per_sm": Field(low=0, high=1000),
}
_PACKED = {
    "block_n": Field((64, 128, 256)),
    "num_stages": _integers(2, 8),
    "programs_per_sm": Field((1, 2, 3, 4)),
    "waves": _integers(1, 16, required=False),
    "min_share": _integers(1, 64, required=False),
}
FIELDS: Mapping[str, Mapping[str, Mapping[str, Field]]] = {
    "triton": {
        "prefill": _TILES,
        "window": _TILES,
        "slices": _TILES,
        "decode": _WALK,
        "verify": _WALK,
    },
    "hopper": {
        "prefill": _WARP_GROUPS,
        "window": _WARP_GROUPS,
        "slices": _WARP_GROUPS,
        "decode": _PACKED,
        "verify": _PACKED,
    },
}
"""The numbers of a row, by kernel and kind of work; most are `TileConfig`'s. The others:

- ``consumers``: warp-groups of 64 query rows; with more than one, a multiprocessor holds no second
  program.
- ``min_tiles_per_sm``: the crossover. With fewer query tiles times query heads per multiprocessor,
  Triton's kernel takes the work, which splits keys.
- ``waves``, ``min_share``: how finely keys are split, where they are; left out: `TileConfig`'s own.
"""

DIMS: Mapping[str, tuple[int, ...]] = {"triton": (64, 128, 256, 512), "hopper": (64, 128, 256)}
"""The head dims that rows are for, by kernel."""


class RowName(NamedTuple):
    """Which row: ``triton/decode_16bit/128``."""

    kernel: str
    kind: str
    bits: int
    dim: int

    def __str__(self) -> str:
        return f"{self.kernel}/{self.kind}_{self.bits}bit/{self.dim}"


@dataclass(frozen=True, slots=True)
class Tuned:
    """The content of one file; see the module. `name` is what messages call it."""

    name: str
    gpus: tuple[str, ...] = ()
    arch: int | None = None
    for_all_of_arch: bool = False
    made_by: tuple[Mapping[str, Any], ...] = ()
    rows: Mapping[RowName, Row] = field(default_factory=dict)

    def rank(self, arch: int | None, gpu: str | None) -> int:
        """How closely it is made for a GPU: 3 for that one, 2 for its kind, 1 for any, 0: not."""
        if self.arch is None:
            return 1
        if arch != self.arch:
            return 0
        if gpu is not None and normal_name(gpu) in map(normal_name, self.gpus):
            return 3
        return 2 if self.for_all_of_arch or not self.gpus else 0

    def with_row(self, name: RowName, row: Row) -> "Tuned":
        """With `row` in the place of the one that it has, if any.

        Raises:
            ArgumentError: the row has a value that is not accepted.
        """
        found = replace(self, rows={**self.rows, name: dict(row)})
        _check_rows(found)
        return found

    def dumps(self) -> str:
        """As the text of a file, one row per line."""
        head: dict[str, Any] = {}
        if self.gpus:
            head["gpus"] = list(self.gpus)
        if self.arch is not None:
            head["arch"] = self.arch
        if self.for_all_of_arch:
            head["for_all_of_arch"] = True
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        made_by = json.dumps(list(self.made_by), indent=2).replace("\n", "\n  ")
        lines += [f'  "made_by": {made_by},', '  "tiles": {']
        tree: dict[str, dict[str, dict[int, Row]]] = {}
        for name in sorted(self.rows, key=_order):
            table = tree.setdefault(name.kernel, {}).setdefault(f"{name.kind}_{name.bits}bit", {})
            table[name.dim] = self.rows[name]
        kernels = []
        for kernel, tables in tree.items():
            shown = []
            for table_name, rows in tables.items():
                body = ",\n".join(f'        "{d}": {json.dumps(row)}' for d, row in rows.items())
                shown.append(f'      "{table_name}": {{\n{body}\n      }}')
            kernels.append(f'    "{kernel}": {{\n' + ",\n".join(shown) + "\n    }")
        return "{\n" + "\n".join(lines) + "\n" + ",\n".join(kernels) + "\n  }\n}\n"


def _order(name: RowName) -> tuple[int, int, int, int]:
    """Kernels and kinds as in `FIELDS`, then width and head dim."""
    kernels, kinds = list(FIELDS), list(FIELDS[name.kernel])
    return kernels.index(name.kernel), kinds.index(name.kind), name.bits, name.dim


def normal_name(gpu: str) -> str:
    """A GPU's name for comparing, and for a file: "NVIDIA H200" is ``h200``."""
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    return "-".join(word for word in words if word != "nvidia")


def loads(text: str, name: str) -> Tuned:
    """The content of a file called `name`.

    Raises:
        ArgumentError: it is not as the module says; the message names key, value and what is
            accepted.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentError(f"{name} is not JSON: {error}; expected a file of tuned data") from None
    _check_object(data, name, "the file", ("gpus", "arch", "for_all_of_arch", "made_by", "tiles"))
    gpus, arch = data.get("gpus", []), data.get("arch")
    if not isinstance(gpus, list) or not all(isinstance(g, str) and normal_name(g) for g in gpus):
        raise _refusal(name, "gpus", gpus, "a list of GPUs' names")
    if arch is not None and not (type(arch) is int and 70 <= arch < 200):
        raise _refusal(name, "arch", arch, "a compute capability, as 90")
    if gpus and arch is None:
        raise _refusal(name, "arch", arch, f"the compute capability of {', '.join(gpus)}")
    whole = data.get("for_all_of_arch", False)
    if type(whole) is not bool or (whole and arch is None):
        raise _refusal(name, "for_all_of_arch", whole, "true, where arch is given, or false")
    found = Tuned(
        name, tuple(gpus), arch, whole, _made_by(data, name), dict(_rows(data.get("tiles"), name))
    )
    _check_rows(found)
    return found


def read(path: Path) -> Tuned:
    """The tuned data in the file `path`.

    Raises:
        ArgumentError: it cannot be read, or is not as the module says.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(
            f"{path} cannot be read: {error}; expected a file of tuned data, as `magi-serve tune` "
            "writes"
        ) from None
    return loads(text, str(path))


def _refusal(name: str, key: str, value: object, accepted: object) -> ArgumentError:
    return ArgumentError(f"{name}: {key} = {value!r} is not accepted; expected {accepted}")


def _check_object(value: object, name: str, key: str, known: Iterable[str]) -> None:
    accepted = f"an object of {', '.join(known)}"
    if not isinstance(value, dict):
        raise _refusal(name, key, value, accepted)
    unknown = [k for k in value if k not in known]
    if unknown:
        raise ArgumentError(
            f"{name}: {key} has {unknown[0]!r}, which is unknown; expected {accepted}"
        )


def _made_by(data: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], ...]:
    entries = data.get("made_by")

    def text_only(value: object) -> bool:
        return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())

    good = isinstance(entries, list) and all(
        isinstance(e, dict)
        and text_only({k: v for k, v in e.items() if k != "rows"})
        and text_only(e.get("rows", {}))
        for e in entries
    )
    if not good or not entries:
        raise _refusal(name, "made_by", entries, "a list of objects of texts, and texts by row")
    return tuple(entries)


def _rows(tiles: object, name: str) -> Iterator[tuple[RowName, Row]]:
    _check_object(tiles, name, "tiles", FIELDS)
    assert isinstance(tiles, dict)
    for kernel, tables in tiles.items():
        kinds = FIELDS[kernel]
        known = {f"{kind}_{bits}bit": (kind, bits) for kind in kinds for bits in (8, 16, 32)}
        _check_object(tables, name, f"tiles.{kernel}", known)
        for table, rows in tables.items():
            where = f"tiles.{kernel}.{table}"
            dims = {str(dim): dim for dim in DIMS[kernel]}
            _check_object(rows, name, where, dims)
            for dim, row in rows.items():
                yield RowName(kernel, *known[table], dims[dim]), row


def _check_rows(tuned: Tuned) -> None:
    for at, row in tuned.rows.items():
        where = f"tiles.{at.kernel}.{at.kind}_{at.bits}bit.{at.dim}"
        fields = FIELDS[at.kernel][at.kind]
        _check_object(row, tuned.name, where, fields)
        for key, one in fields.items():
            if key not in row and one.required:
                raise ArgumentError(f"{tuned.name}: {where} has no {key}; expected {one}")
            if key in row and not one.accepts(row[key]):
                raise _refusal(tuned.name, f"{where}.{key}", row[key], one)
        if row.get("consumers", 1) > 1 and row["programs_per_sm"] > 1:
            raise _refusal(
                tuned.name, f"{where}.programs_per_sm", row["programs_per_sm"],
                f"1 with {row['consumers']} consumers, which take all registers",
            )  # fmt: skip
        if at.kind == "verify":
            # Planners size their buffers by the tiles of one row per sequence.
            decode = tuned.rows.get(at._replace(kind="decode"))
            if decode is None:
                raise ArgumentError(f"{tuned.name}: {where} needs a row of decode beside it")
            if shares(row) > shares(decode):
                raise ArgumentError(
                    f"{tuned.name}: {where} splits keys into {shares(row)} shares per "
                    f"multiprocessor (waves * programs_per_sm); expected at most the "
                    f"{shares(decode)} of its row of decode"
                )


def shares(row: Row) -> int:
    """Most shares of keys per multiprocessor that a row of decode asks for."""
    return int(row["programs_per_sm"] * row.get("waves", TileConfig(16, 16).waves))
