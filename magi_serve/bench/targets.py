"""The cases that have targets: what the kernels have to reach on an H200.

Ratios are to FlashAttention 3 in the same run (`fa3`), to FlexAttention (`flex`), to our own
causal attention per visible pair (`causal`), or to our own attention over bf16 (`bf16`); `read` is
a share of the bandwidth of a plain read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from magi_serve.bench.cases import Case, parse

D128 = "32:8:128"
D64 = "64:8:64s"
MAX_KV_BYTES = 64 << 30
MEAN_TARGETS: Mapping[str, Mapping[str, float]] = {
    "prefill": {"fa3": 1.05},
    "prefill-sink": {"fa3": 1.08},
    "decode-one": {"fa3": 1.18},
    "decode": {"fa3": 1.06},
}
"""Targets of the geometric mean over a group."""


def _group(group: str, names: Sequence[str], targets: Mapping[str, float]) -> Iterator[Case]:
    for name in names:
        yield replace(parse(name), group=group, targets=targets)


def rows() -> Iterator[Case]:
    """Every standard case."""
    lengths = ("8k", "32k", "128k")
    yield from _group(
        "prefill",
        [f"1x{n}/{D128}/{kv}" for kv in ("contiguous", "page16") for n in ("2k", *lengths)],
        {"fa3": 1.02},
    )
    yield from _group("prefill-sink", [f"1x{n}/{D64}/page16" for n in lengths], {"fa3": 1.04})
    yield from _group("window", [f"1x{n}/{D64}/page16/window128" for n in lengths], {"fa3": 1.5})
    mixed = [f"lognormal32/{D128}/page16", f"64x1@8k+lognormal32/{D128}/page16"]
    yield from _group("mixed", mixed, {"fa3": 1.08})
    for page, target in ((16, 1.05), (64, 1.12), (128, 1.02)):
        yield from _group("chunk", [f"1x2k@128k/{D128}/page{page}"], {"fa3": target})
    for count in (1, 4, 16, 64, 256):
        for heads in (D128, D64):
            for n in ("2k", *lengths):
                yield from _decode(f"{count}x1@{n}/{heads}/page16")
    verify = [
        f"{count}x{drafts}@8k/{heads}/page16"
        for heads in (D128, D64)
        for count in (16, 64)
        for drafts in (4, 8)
    ]
    yield from _group("verify", verify, {"fa3": 1.08})
    for n in ("8k", "32k", "128k"):
        for heads in (D128, D64):
            yield from _group(
                "prefill-e4m3", [f"1x{n}/{heads}/page16/e4m3"], {"bf16": 0.95, "fa3": 0.95}
            )
    for count, n in ((16, "2k"), (16, "8k"), (64, "8k"), (16, "32k"), (4, "128k"), (256, "8k")):
        for heads in (D128, D64):
            yield _quantised(f"{count}x1@{n}/{heads}/page16/e4m3")
    masks = [f"{mask}-32k/{D128}/contiguous" for mask in ("blockcausal", "prefix", "band")]
    yield from _group("slices", masks, {"causal": 0.9, "flex": 3.0})


def _quantised(name: str) -> Case:
    """Decode over a quantised cache: half the bytes of `bf16`."""
    case = parse(name)
    target = 1.7 if 2 * case.kv_bytes >= 10**9 else 1.5
    return replace(case, group="decode-e4m3", targets={"bf16": target})


def _decode(name: str) -> Iterator[Case]:
    case = parse(name)
    if case.kv_bytes > MAX_KV_BYTES:
        return
    one = len(case.q_lens) == 1
    targets = {"fa3": 1.05 if one else 1.0}
    if case.kv_bytes >= 10**9:
        targets["read"] = 0.93
    yield replace(case, group="decode-one" if one else "decode", targets=targets)
