"""Writes docs/support-matrix.md: what each kernel takes, and what the vLLM backend accepts.

    python tools/support_matrix.py [--check]

Our columns are asked, not written: the capability table gives the kernels' answers, and the backend
answers as it answers vLLM on an H200. The columns of vLLM's own backends were read from its source
(version in `VLLM`), each cell with the file and line in ``vllm/v1/attention/backends``.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from magi_serve.errors import MagiServeError
from magi_serve.kernels.capabilities import SPECS, KernelSpec
from magi_serve.types import AttentionProblem

PAGE = Path(__file__).parents[1] / "docs/support-matrix.md"
VLLM = "0.33.0"

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = AttentionProblem("cuda", BF16, BF16, 32, 8, 128, 128, page_size=16)

PROBLEMS: dict[str, dict[str, Any]] = {
    "bf16, pages of 16": {},
    "fp16": {"q_dtype": FP16, "kv_dtype": FP16},
    "fp32": {"q_dtype": FP32, "kv_dtype": FP32},
    "fp64": {"q_dtype": torch.float64, "kv_dtype": torch.float64},
    "packed keys under slices": {"page_size": None},
    "pages of 48": {"page_size": 48},
    "pages of 256": {"page_size": 256},
    "pages of 1056": {"page_size": 1056},
    "pages of 24": {"page_size": 24},
    "head_dim 64": {"head_dim": 64, "head_dim_v": 64},
    "head_dim 80": {"head_dim": 80, "head_dim_v": 80},
    "head_dim 256": {"head_dim": 256, "head_dim_v": 256},
    "head_dim 192, of values 128": {"head_dim": 192},
    "head_dim 512": {"head_dim": 512, "head_dim_v": 512},
    "71 query heads, 1 kv head": {"num_q_heads": 71, "num_kv_heads": 1},
    "any strides": {"even_rows": False},
    "sinks": {"sinks": 1},
    "several sinks per token": {"sinks": 3, "sink_per_token": True},
    "sliding window": {"window": True},
    "soft cap": {"softcap": True},
    "ALiBi": {"alibi": True},
    "max-logits": {"max_logits": True},
    "e4m3 pages, scale per head": {"kv_dtype": torch.float8_e4m3fn, "kv_scales": "head"},
    "e5m2 pages, scale per head": {"kv_dtype": torch.float8_e5m2, "kv_scales": "head"},
    "int8 pages, scale per token and head": {"kv_dtype": torch.int8, "kv_scales": "token"},
    "e4m3 pages, sinks, window, soft cap": {
        "kv_dtype": torch.float8_e4m3fn, "kv_scales": "head", "sinks": 1, "window": True,
        "softcap": True,
    },
    "sinks, window, soft cap, max-logits": {
        "sinks": 1, "window": True, "softcap": True, "max_logits": True,
    },
}  # fmt: skip
"""What a problem is besides bf16 over pages of 16, 32 query heads and 8 kv heads of 128."""

MACHINES = {
    "hopper": ("hopper", "cuda", 90),
    "triton, sm_89 and newer": ("triton", "cuda", 89),
    "triton, sm_80": ("triton", "cuda", 80),
    "cpu": ("cpu", "cpu", None),
    "reference": ("reference", "cuda", 90),
}


def reasons(spec: KernelSpec, problem: AttentionProblem) -> list[str]:
    """Why not, whatever is installed on this machine."""
    with patch("magi_serve.kernels.capabilities.triton_problem", lambda: None):
        return spec.why_not(problem)


def kernel_table() -> tuple[list[str], list[str]]:
    """Rows of problems by kernels, and the reasons behind each no as numbered notes."""
    notes: list[str] = []
    specs = {spec.name: spec for spec in SPECS}
    lines = [f"| | {' | '.join(MACHINES)} |", "| --- |" + " --- |" * len(MACHINES)]
    for name, changes in PROBLEMS.items():
        cells = []
        for kernel, device, arch in MACHINES.values():
            problem = replace(PLAIN, **{**changes, "device": device, "arch": arch})
            why = reasons(specs[kernel], problem)
            cells.append(_cell("; ".join(why), notes))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines, notes


def _cell(why: str, notes: list[str]) -> str:
    if not why:
        return "yes"
    if why not in notes:
        notes.append(why)
    return f"no ({notes.index(why) + 1})"


class Ask:
    """Puts questions to the backend as vLLM does for an H200."""

    def __init__(self) -> None:
        from vllm.platforms.interface import DeviceCapability
        from vllm.v1.attention.backend import AttentionType

        from magi_serve.backends.vllm.backend import MagiAttentionBackend
        from magi_serve.backends.vllm.impl import MagiAttentionImpl

        self._backend, self._impl = MagiAttentionBackend, MagiAttentionImpl
        self._plain: dict[str, Any] = {
            "head_size": 128, "dtype": BF16, "kv_cache_dtype": "auto", "block_size": 16,
            "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
            "use_per_head_quant_scales": False, "attn_type": AttentionType.DECODER,
            "has_sliding_window": False, "use_non_causal": False, "use_batch_invariant": False,
            "use_kv_connector": False, "use_pcp": False, "use_dcp": False, "use_rswa": False,
            "use_adaptive_verification": False,
            "device_capability": DeviceCapability(9, 0),
        }  # fmt: skip

    def selection(self, **changes: Any) -> str:
        """Why vLLM's selection would be refused; empty if it would not be."""
        with (
            patch("magi_serve.backends.vllm.compat.platform", lambda: ("cuda", 90)),
            patch("magi_serve.kernels.capabilities.triton_problem", lambda: None),
        ):
            return "; ".join(self._backend.validate_configuration(**{**self._plain, **changes}))

    def layer(self, **options: Any) -> str:
        """Why a layer with `options` would be refused."""
        try:
            self._impl(32, 128, 0.1, 8, **options)
        except MagiServeError as error:
            return str(error).split("; --")[0]
        return ""


Answer = Callable[[Ask], str]


def selected(**changes: Any) -> Answer:
    return lambda ask: ask.selection(**changes)


FA, TRITON, FI = "flash_attn.py", "triton_attn.py", "flashinfer.py"

FEATURES: dict[str, tuple[Answer, str, str, str]] = {
    "learnable sinks": (
        selected(has_sink=True),
        f"FA3 and FA4 only, sm_90 and newer ({FA}:474)",
        f"yes ({TRITON}:387)",
        f"where TRTLLM or XQA serve, else raises ({FI}:1093)",
    ),
    "sinks in an fp32 model": (
        selected(has_sink=True, dtype=FP32),
        f"no fp32 ({FA}:289)",
        f"yes ({TRITON}:321)",
        f"no fp32 ({FI}:572)",
    ),
    "sliding window": (
        selected(has_sliding_window=True),
        f"yes ({FA}:390)",
        f"yes ({TRITON}:363)",
        f"one window for all layers of a group ({FI}:1633)",
    ),
    "soft cap": (
        lambda ask: ask.layer(logits_soft_cap=30.0),
        f"yes ({FA}:1135)",
        f"yes ({TRITON}:708)",
        f"one for all layers of a group ({FI}:1639)",
    ),
    "e4m3 cache": (
        selected(kv_cache_dtype="fp8"),
        f"FA3 on sm_90; queries rounded to 8 bits ({FA}:1163)",
        f"sm_89 and newer ({TRITON}:514); queries rounded to 8 bits (:553)",
        f"yes ({FI}:577)",
    ),
    "e5m2 cache": (
        selected(kv_cache_dtype="fp8_e5m2"),
        "no (fa_utils.py:293)",
        f"listed ({TRITON}:332), but rounds queries (:553), which a layer asserts to be for e4m3",
        f"yes ({FI}:579)",
    ),
    "e4m3 cache, scale per token and head": (
        selected(kv_cache_dtype="fp8_per_token_head"),
        f"no ({FA}:290)",
        f"yes ({TRITON}:335)",
        f"no ({FI}:573)",
    ),
    "int8 cache, scale per token and head": (
        selected(kv_cache_dtype="int8_per_token_head"),
        f"no ({FA}:290)",
        f"yes ({TRITON}:334)",
        f"no ({FI}:573)",
    ),
    "int4 cache": (
        selected(kv_cache_dtype="int4_per_token_head"),
        f"no ({FA}:290)",
        f"yes, causal only ({TRITON}:333)",
        f"no ({FI}:573)",
    ),
    "scales per kv head": (
        selected(kv_cache_dtype="fp8", use_per_head_quant_scales=True),
        f"FA3 and newer ({FA}:412)",
        "no (backend.py:186)",
        "no (backend.py:186)",
    ),
    "sinks and an 8-bit cache per token": (
        selected(kv_cache_dtype="int8_per_token_head", has_sink=True),
        f"no ({FA}:290)",
        f"yes ({TRITON}:334, 387)",
        f"no ({FI}:573)",
    ),
    "causal by request": (
        selected(use_non_causal=True),
        f"FA4 only ({FA}:1382)",
        f"yes ({TRITON}:351)",
        f"no: one for a batch ({FI}:1604)",
    ),
    "head size 80": (
        selected(head_size=80),
        f"yes ({FA}:426)",
        f"yes ({TRITON}:380)",
        f"no ({FI}:693)",
    ),
    "head size 512": (
        selected(head_size=512),
        f"with FA4 ({FA}:433)",
        f"yes ({TRITON}:380)",
        f"yes ({FI}:693)",
    ),
    "blocks of 48 tokens": (
        selected(block_size=48),
        f"yes ({FA}:367)",
        f"yes ({TRITON}:343)",
        f"no ({FI}:603)",
    ),
    "KV connectors": (
        selected(use_kv_connector=True),
        "yes (backend.py:213)",
        "yes (backend.py:213)",
        "yes (backend.py:213)",
    ),
    "ALiBi": (
        lambda ask: ask.layer(alibi_slopes=[0.5] * 32),
        f"through FA2, so without sinks ({FA}:1105)",
        f"yes ({TRITON}:708)",
        f"slopes are stored and never used ({FI}:2031)",
    ),
    "encoder-only attention": (
        selected(attn_type="encoder_only"),
        f"yes, not over an 8-bit cache ({FA}:402, 1670)",
        f"yes, not over an 8-bit cache ({TRITON}:391, 772)",
        f"no ({FI}:2053)",
    ),
    "cross attention": (
        selected(attn_type="encoder_decoder"),
        f"yes ({FA}:408)",
        f"yes ({TRITON}:397)",
        "no (backend.py:251)",
    ),
    "images that see both ways (mm_prefix)": (
        selected(use_mm_prefix=True),
        f"FA4 only ({FA}:448)",
        f"yes ({TRITON}:383)",
        "no (backend.py:179)",
    ),
    "batch invariance": (
        selected(use_batch_invariant=True),
        f"yes ({FA}:394)",
        f"yes ({TRITON}:367)",
        "no (backend.py:210)",
    ),
    "decode context parallel": (
        selected(use_dcp=True),
        f"yes; drops sinks ({FA}:1468-1640)",
        "no (backend.py:825)",
        f"yes; raises with sinks ({FI}:1626)",
    ),
    "prefill context parallel": (
        selected(use_pcp=True),
        "no (backend.py:823)",
        "no (backend.py:823)",
        "no (backend.py:823)",
    ),
    "MLA": (selected(use_mla=True), "another backend", "another backend", "another backend"),
    "R-SWA": (
        selected(use_rswa=True),
        f"FA4 ({FA}:386)",
        f"yes ({TRITON}:359)",
        "no (backend.py:195)",
    ),
}


def backend_table() -> tuple[list[str], list[str]]:
    """Rows of features by attention backend, and the reasons behind our noes."""
    ask, notes = Ask(), list[str]()
    lines = [
        "| | CUSTOM (magi-serve) | FLASH_ATTN | TRITON_ATTN | FLASHINFER |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, (ours, *theirs) in FEATURES.items():
        lines.append(f"| {name} | {_cell(ours(ask), notes)} | {' | '.join(theirs)} |")
    return lines, notes


def page() -> str:
    """The whole page."""
    kernels, kernel_notes = kernel_table()
    backends, backend_notes = backend_table()

    def numbered(notes: list[str]) -> list[str]:
        return [f"{i}. {note}" for i, note in enumerate(notes, 1)]

    return "\n".join(
        [
            "# What is supported",
            "",
            "Written by `make matrix`, and compared with the code in every test run. A *no* is a",
            "refusal before anything is launched, with the reason below; a `yes` is held to the",
            "reference in float64 by the shared grid of tests.",
            "",
            "## Kernels",
            "",
            "Dispatch takes the first that says yes, in the order hopper, triton, cpu, reference.",
            "",
            *kernels,
            "",
            *numbered(kernel_notes),
            "",
            "## As a vLLM backend, on an H200",
            "",
            f"The other columns were read from the source of vLLM {VLLM}; file and line are in",
            "`vllm/v1/attention/backends`, `backend.py` one folder up.",
            "",
            *backends,
            "",
            *numbered(backend_notes),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="write docs/support-matrix.md")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit(f"{PAGE} is not what the code says: make matrix")


if __name__ == "__main__":
    main()
