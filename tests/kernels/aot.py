"""Compiles Triton kernels for a GPU that is not there, through the real host code, and reports
resources.

Run as a program so that each Triton and each architecture gets a process of its own:

    python tests/kernels/aot.py ARCH [--all | --warm-up KERNEL]

prints one JSON line per specialisation: its name, and for each kernel registers, stack bytes
    (spills live
there), shared memory and which matrix instruction was used. A stand-in driver answers for the GPU,
and launches stop after compilation.
"""

import argparse
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from magi_serve.kernels.ffa import api, hopper, triton_attention, triton_planner
from magi_serve.kernels.ffa.call import AttentionCall
from magi_serve.kernels.ffa.plan import Batch, Cut, Part, TileConfig
from magi_serve.kernels.ffa.planner import PagedPlanner
from magi_serve.kernels.ffa.slices import plan_slices
from magi_serve.kernels.ffa.warmup import warm_up
from magi_serve.kernels.paged.layout import slot_size, split_slots
from magi_serve.kernels.paged.triton_store import write_kv_triton
from magi_serve.masks import AttentionSlices
from magi_serve.types import AttentionProblem, PagedKV, SinkSpec

MULTIPROCESSORS = 132


class FakeDriver:
    """Enough of a Triton driver to compile for `arch` with CPU tensors."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def resources(kernel: Any) -> dict[str, Any]:
    """Registers, stack, shared memory and matrix instruction of a compiled kernel."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [str(cuobjdump), "--dump-resource-usage", cubin.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    ptx = kernel.asm["ptx"]
    matrix = [name for name in ("tcgen05.mma", "wgmma.mma", "mma.sync") if name in ptx]
    return {
        "registers": found["REG"],
        "stack": found["STACK"],
        "shared": kernel.metadata.shared,
        "matrix": matrix[0] if matrix else None,
    }


def compile_only(arch: int) -> list[dict[str, Any]]:
    """Make every launch compile for `arch` and stop; returns the list that compiled kernels go
    to."""
    compiled: list[dict[str, Any]] = []
    driver.set_active(FakeDriver(arch))
    triton_attention.num_sms = lambda device: MULTIPROCESSORS  # type: ignore[assignment]
    run = JITFunction.run

    def compile_and_stop(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append({"kernel": self.__name__, **resources(kernel)})
        return kernel

    JITFunction.run = compile_and_stop
    return compiled


def paged_case(
    arch: int,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    *,
    kernel: str = "triton",
    decode: bool,
    sink: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    max_logits: bool = False,
    kv_dtype: torch.dtype | None = None,
    scales: str = "none",
    alibi: bool = False,
) -> None:
    """Compile what one layer of paged attention launches."""
    num_q_heads, num_kv_heads = heads
    num_seqs, q_len, num_keys = (2, 1, 4096) if decode else (1, 4096, 4096)
    kv_dtype = kv_dtype or dtype
    pages = torch.empty(8, num_kv_heads, page_size, 2 * head_dim, dtype=kv_dtype).transpose(1, 2)
    shape = {"none": None, "head": (num_kv_heads,), "token": (8, page_size, num_kv_heads)}[scales]
    scale = None if shape is None else torch.ones(shape)
    problem = AttentionProblem(
        "cuda",
        dtype,
        kv_dtype,
        num_q_heads,
        num_kv_heads,
        head_dim,
        head_dim,
        arch,
        page_size,
        scales,  # type: ignore[arg-type]
    )
    planner = PagedPlanner(
        problem,
        max_tokens=64,
        max_seqs=8,
        device=torch.device("cpu"),
        window=window,
        kernel=kernel,
    )
    cu_seqlens_q = torch.arange(num_seqs + 1, dtype=torch.int32) * q_len
    plan = planner.plan(
        cu_seqlens_q,
        torch.full((num_seqs,), num_keys, dtype=torch.int32),
        num_tokens=num_seqs * q_len,
        num_decodes=num_seqs if decode else 0,
        num_decode_tokens=num_seqs if decode else 0,
        max_decode_q_len=1,
    )
    q = torch.empty(num_seqs * q_len, num_q_heads, head_dim, dtype=dtype)
    {"hopper": hopper, "triton": triton_attention}[kernel].run(
        AttentionCall(
            q,
            pages[..., :head_dim],
            pages[..., head_dim:],
            torch.zeros(num_seqs, -(-num_keys // page_size), dtype=torch.int32),
            plan.parts,
            head_dim**-0.5,
            softcap,
            torch.zeros(num_q_heads) if sink else None,
            torch.empty_like(q),
            torch.empty(q.shape[:2]),
            torch.empty(num_q_heads) if max_logits else None,
            scale,
            scale,
            torch.ones(num_q_heads) if alibi else None,
        )
    )


def slices_case(arch: int, dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    """Compile what `ffa_attention` launches for a causal slice."""
    total = 8192
    q = torch.empty(total, heads[0], head_dim, dtype=dtype)
    k = torch.empty(total, heads[1], head_dim, dtype=dtype)
    problem = AttentionProblem("cuda", dtype, dtype, *heads, head_dim, head_dim, arch)
    config = triton_attention.tile_config(problem, "slices", total)
    slices = AttentionSlices([(0, total)], [(0, total)], [1])
    plan = plan_slices(slices, total, config, problem, torch.device("cpu"))
    out, lse = torch.empty_like(q), torch.empty(total, heads[0])
    triton_attention.run(AttentionCall(q, k, k, None, (plan,), 0.1, 0.0, None, out, lse, None))


def write_case(
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    page_size: int,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Compile the cache write; with `kv_dtype`, quantised with a scale per head."""
    pages = torch.empty(8, heads, page_size, 2 * head_dim, dtype=kv_dtype or dtype).transpose(1, 2)
    scale = torch.ones(heads) if kv_dtype else None
    kv = PagedKV(
        pages[..., :head_dim],
        pages[..., head_dim:],
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        scale,
        scale,
    )
    k = torch.empty(4, heads, head_dim, dtype=dtype)
    write_kv_triton(k, k, kv, torch.zeros(4, dtype=torch.int64))


def plan_case(budget: int) -> None:
    """Compile the planner, with keys split into `budget` items or not."""
    lengths = torch.zeros(3, dtype=torch.int32)
    batch = Batch(lengths, lengths[:2], 2, True, None, 4096)
    part = Part(0, 3, Cut(TileConfig(64, 64), 8, 4, budget))
    triton_planner.paged_tables(batch, [part], None)


def cases(arch: int, everything: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """The specialisations of the default tiles that served models use; with `everything`, the
    whole grid."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    e4m3, e5m2, i8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8

    def paged(name: str, *args: Any, **kwargs: Any) -> tuple[str, Callable[[], None]]:
        return name, lambda: paged_case(arch, *args, **kwargs)

    for decode in (False, True):
        kind = "decode" if decode else "prefill"
        yield paged(f"{kind} bf16 d128 page 16", bf16, (32, 8), 128, 16, decode=decode)
        yield paged(
            f"{kind} bf16 d64 page 16 sink window", bf16, (64, 8), 64, 16, decode=decode, sink=True,
            window=(127, 0),
        )  # fmt: skip
        yield paged(
            f"{kind} bf16 d256 page 16 softcap", bf16, (8, 4), 256, 16, decode=decode, softcap=50.0
        )
        yield paged(f"{kind} fp32 d64 page 16", fp32, (9, 3), 64, 16, decode=decode)
        stored = partial(paged, decode=decode)
        yield stored(
            f"{kind} bf16 d128 int8 per token", bf16, (32, 8), 128, 16, kv_dtype=torch.int8,
            scales="token",
        )  # fmt: skip
        if arch >= 89:
            yield stored(
                f"{kind} bf16 d128 e4m3", bf16, (32, 8), 128, 16, kv_dtype=e4m3, scales="head"
            )
        if arch >= 89 and everything:
            yield stored(
                f"{kind} bf16 d64 e4m3 sink", bf16, (64, 8), 64, 16, kv_dtype=e4m3, scales="head",
                sink=True,
            )  # fmt: skip
            yield stored(f"{kind} fp16 d256 e5m2", fp16, (8, 4), 256, 16, kv_dtype=e5m2)
        if everything:
            yield paged(f"{kind} fp16 d128 page 128", fp16, (32, 8), 128, 128, decode=decode)
            yield paged(f"{kind} bf16 d128 page 64", bf16, (32, 8), 128, 64, decode=decode)
            yield paged(f"{kind} bf16 d80 page 16", bf16, (32, 32), 80, 16, decode=decode)
            yield paged(f"{kind} fp32 d128 page 16", fp32, (32, 8), 128, 16, decode=decode)
            yield paged(f"{kind} fp32 d256 page 16", fp32, (8, 4), 256, 16, decode=decode)
            # At this width matrices are multiplied as on Ampere, everywhere but on Hopper.
            yield paged(f"wide {kind} bf16 d512", bf16, (16, 2), 512, 16, decode=decode)
            yield paged(f"wide {kind} fp32 d512", fp32, (4, 4), 512, 16, decode=decode)
            yield stored(
                f"wide {kind} bf16 d512 int8", bf16, (64, 1), 512, 16, kv_dtype=i8, scales="token"
            )
            yield paged(
                f"{kind} bf16 d64 page 16 ALiBi", bf16, (71, 1), 64, 16, decode=decode, alibi=True
            )
            yield paged(
                f"{kind} bf16 d128 page 16 max-logits",
                bf16,
                (32, 8),
                128,
                16,
                decode=decode,
                max_logits=True,
            )
    if arch == 90:
        hop = partial(paged, kernel="hopper", decode=False)
        packed = partial(paged, kernel="hopper", decode=True)
        yield packed("hopper decode bf16 d128 page 16", bf16, (32, 8), 128, 16)
        yield packed("hopper decode bf16 d64 page 16 sink", bf16, (64, 8), 64, 16, sink=True)
        yield packed("hopper decode bf16 d256 page 16", bf16, (8, 4), 256, 16)
        eight = partial(packed, kv_dtype=e4m3, scales="head")
        yield eight("hopper decode bf16 d128 e4m3", bf16, (32, 8), 128, 16)
        yield eight("hopper decode bf16 d64 e4m3 sink", bf16, (64, 8), 64, 16, sink=True)
        yield eight("hopper decode bf16 d256 e4m3", bf16, (8, 4), 256, 16)
        eight = partial(hop, kv_dtype=e4m3, scales="head")
        yield eight("hopper bf16 d128 e4m3", bf16, (32, 8), 128, 16)
        yield eight(
            "hopper bf16 d64 e4m3 sink window", bf16, (64, 8), 64, 16, sink=True, window=(127, 0)
        )
        yield hop("hopper bf16 d256 page 16", bf16, (8, 4), 256, 16)
        yield hop("hopper bf16 d128 page 16", bf16, (32, 8), 128, 16)
        yield hop("hopper bf16 d64 page 16 sink", bf16, (64, 8), 64, 16, sink=True)
        yield hop(
            "hopper bf16 d64 page 16 sink window", bf16, (64, 8), 64, 16, sink=True, window=(127, 0)
        )
        if everything:
            for d in (64, 128, 256):
                yield packed(
                    f"hopper decode bf16 d{d} e4m3 mqa", bf16, (64, 1), d, 16, kv_dtype=e4m3
                )
                yield packed(f"hopper decode fp16 d{d} int8", fp16, (32, 2), d, 64, kv_dtype=i8)
            yield packed(
                "hopper decode bf16 d128 e4m3 softcap max-logits", bf16, (32, 8), 128, 64,
                softcap=30.0, max_logits=True, kv_dtype=e4m3, scales="head",
            )  # fmt: skip
            yield hop(
                "hopper fp16 d128 int8 softcap max-logits", fp16, (32, 8), 128, 64, kv_dtype=i8,
                softcap=30.0, max_logits=True,
            )  # fmt: skip
            yield packed(
                "hopper decode bf16 d64 window sink",
                bf16,
                (64, 8),
                64,
                16,
                window=(127, 0),
                sink=True,
            )
            yield packed(
                "hopper decode bf16 d128 softcap max-logits", bf16, (32, 8), 128, 64, softcap=30.0,
                max_logits=True,
            )  # fmt: skip
            yield hop("hopper fp16 d128 page 128", fp16, (32, 8), 128, 128)
            yield hop("hopper bf16 d128 window", bf16, (32, 8), 128, 16, window=(4095, 0))
            yield hop("hopper bf16 d128 page 256", bf16, (32, 8), 128, 256)
            yield hop(
                "hopper bf16 d128 softcap max-logits", bf16, (32, 8), 128, 64, softcap=30.0,
                max_logits=True,
            )  # fmt: skip
    yield "slices bf16 d128", lambda: slices_case(arch, bf16, (32, 8), 128)
    if everything:
        yield "slices bf16 d64", lambda: slices_case(arch, bf16, (64, 8), 64)
    yield "write bf16 d128", lambda: write_case(bf16, 8, 128, 16)
    yield "write bf16 d128 int8", lambda: write_case(bf16, 8, 128, 16, i8)
    yield "plan", lambda: plan_case(0)
    yield "plan split", lambda: plan_case(40)


def warm_up_case(arch: int, kernel: str) -> None:
    """Print how many kernels the warm-up compiles, and how many more random batches need."""
    run, hashes = JITFunction.run, []
    compile_only(arch)

    def remember(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        hashes.append(run(self, *args, grid=grid, warmup=True, **kwargs).hash)

    JITFunction.run = remember
    random = Random(0)
    bf16, e4m3, i8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
    gptoss, llama = (64, 8, (127, 0), 1), (128, 4, None, 0)
    served: list[tuple[Any, torch.dtype, Any]] = [
        (gptoss, bf16, "none"),
        (gptoss, e4m3, "head"),
        (llama, bf16, "none"),
        (llama, i8, "token"),
    ]
    for (head_dim, groups, window, sinks), kv_dtype, scales in served:
        problem = AttentionProblem(
            "cuda", bf16, kv_dtype, 8 * groups, 8, head_dim, head_dim, arch, 16, scales,
            sinks=sinks, even_rows=scales != "token",
        )  # fmt: skip
        planner = PagedPlanner(
            problem,
            max_tokens=256,
            max_seqs=256,
            device=torch.device("cpu"),
            window=window,
            kernel="triton" if scales == "token" else kernel,  # rows of uneven strides
        )
        api._problem = lambda *args, problem=planner.problem, **kwargs: problem  # type: ignore[assignment]
        del hashes[:]
        kinds = warm_up(planner, max_tokens=8192)
        known = set(hashes)
        slots = torch.empty(8, 16, 8, slot_size(head_dim, head_dim, scales), dtype=kv_dtype)
        k, v, *of_pages = split_slots(slots, head_dim, head_dim, kv_dtype, scales)
        if scales == "head":
            of_pages = [torch.ones(()), torch.ones(())]
        for _ in range(60):
            num_decodes = random.choice([0, 1, 3, 16, 40, 64, 200])
            prompts = [random.choice([2, 5, 60, 100])] * random.choice([0, 1, 2, 5, 30])
            prompts += [random.choice([700, 3000, 5000])] * random.choice([0, 0, 1])
            q_lens = [1] * num_decodes + prompts or [1]
            num_tokens = sum(q_lens) + random.choice([0, 0, 3])
            cu_seqlens_q = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
            lengths = [n + random.choice([0, 1, 60, 5000, 30000]) for n in q_lens]
            seqlens_k = torch.tensor(lengths, dtype=torch.int32)
            plan = planner.plan(
                cu_seqlens_q,
                seqlens_k,
                num_tokens=num_tokens,
                num_decodes=num_decodes if prompts else len(q_lens),
                num_decode_tokens=num_decodes,
                max_decode_q_len=1,
                max_seqlen_k=max(lengths),
            )
            table = torch.zeros(len(q_lens), random.choice([1, 16, 4000]), dtype=torch.int32)
            sink = SinkSpec(torch.zeros(8 * groups)) if sinks else None
            api.paged_attention(
                torch.empty(num_tokens, 8 * groups, head_dim, dtype=bf16),
                PagedKV(k, v, table, seqlens_k, *of_pages),
                cu_seqlens_q,
                window=window,
                sink=sink,
                plan=plan,
            )
        report = {"kinds": kinds, "kernels": len(known), "later": len(set(hashes) - known)}
        named = {"head_dim": head_dim, "stored": str(kv_dtype)}
        print(json.dumps({**named, **report}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arch", type=int, help="compute capability, as 90")
    parser.add_argument("--all", action="store_true", help="the whole grid")
    parser.add_argument("--warm-up", metavar="KERNEL", help="compare a warm-up with what follows")
    args = parser.parse_args()
    if args.warm_up:
        return warm_up_case(args.arch, args.warm_up)
    compiled = compile_only(args.arch)
    for name, case in cases(args.arch, args.all):
        del compiled[:]
        case()
        # The kernel that the case is about comes first, not the one that plans for it.
        kernels = sorted(compiled, key=lambda kernel: kernel["kernel"] == "_plan_kernel")
        print(
            json.dumps({"case": name, "triton": triton.__version__, "kernels": kernels}),
            flush=True,
        )


if __name__ == "__main__":
    main()
