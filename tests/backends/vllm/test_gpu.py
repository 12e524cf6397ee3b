"""Real vLLM on a GPU under CUDA graphs: our backend against vLLM's Triton backend."""

import importlib.util
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

RUNNERS = pytest.mark.parametrize("runner", ["V1", "V2"])


KERNELS = (
    "_attention_kernel",
    "_reduce_kernel",
    "_hopper_prefill_kernel",
    "_hopper_decode_kernel",
    "_hopper_quantised_kernel",
    "_hopper_quantised_prefill_kernel",
    "_plan_kernel",
    "_write_kv_kernel",
)


def job(engine: Callable[..., Any], model: str, backend: str, **changes: Any) -> dict[str, Any]:
    """An engine that continues prompts of every kind in bf16, with vLLM's CUDA graphs."""
    rng = random.Random(0)
    # Shorter than a page; longer than a window; longer than a chunk; several chunks.
    prompts = [[0] + [rng.randrange(3, 512) for _ in range(n)] for n in (4, 200, 1500, 4000)]
    # Repetitive, so that looking drafts up in the prompt finds some.
    prompts.append([0, *[7, 8, 9, 10, 11] * 40])
    return scoring(
        engine, model, backend, {"prompts": prompts, "sampling": {"max_tokens": 48}}, **changes
    )


def scoring(
    engine: Callable[..., Any],
    model: str,
    backend: str,
    run: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The same engine, giving log-probs of what the job's first engine continued."""
    options = {
        "dtype": "bfloat16",
        "enforce_eager": False,
        "max_model_len": 4352,
        "max_num_batched_tokens": 1024,
        # Little memory, and no more than that looked at: several tests share the GPU.
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 1 << 30,
        # Dynamo and CUDA graphs as by default; Inductor would take most of the test's time.
        "compilation_config": {"backend": "eager", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
        **changes,
    }
    return engine(model, run or {"score": 0}, backend=backend, **options)


def finish(
    drive: Callable[..., Any], runner: str, *jobs: dict[str, Any], others_compile: bool = False
) -> list[dict[str, Any]]:
    """The engines' results, one after the other in one process under this model runner.

    vLLM watches for kernels that are compiled from the first engine's start on: with
    `others_compile` those may be what a later engine needs for its start.
    """
    report = drive(*jobs, VLLM_USE_V2_MODEL_RUNNER=str(int(runner == "V2")))
    results: list[dict[str, Any]] = report["engines"]
    assert [r.get("error") for r in results] == [None] * len(jobs), report["log"][-6000:]
    for result in results:
        assert (".gpu." in result["layers"]["runner"]) == (runner == "V2")
        assert result["layers"]["cudagraphs"] == "FULL_AND_PIECEWISE"
    # vLLM reports what is compiled once it serves; the metadata builder's warm-up left nothing.
    if others_compile:
        return results
    late = [line for line in report["log"].splitlines() if "compilation during inference" in line]
    assert [line for line in late if any(f": {name}." in line for name in KERNELS)] == []
    return results


def assert_alike(continued: dict[str, Any], scored: dict[str, Any], times: float = 1) -> None:
    """Log-probs of the same tokens, generated one by one and scored at once, differ by rounding.

    Where a mixture of experts routes a token elsewhere for rounding alone, its log-prob jumps: most
    must be close, not all.
    """
    ours = torch.tensor([r["logprobs"] for r in continued["runs"][0]])
    theirs = torch.tensor(scored["runs"][0])
    far = (ours - theirs).abs().flatten()
    typical, most = far.quantile(torch.tensor([0.5, 0.9])).tolist()
    assert typical < times * 0.05, far.tolist()
    assert most < times * 0.2, far.tolist()


@RUNNERS
@pytest.mark.parametrize("model", ["llama", "gptoss-gpu"])
def test_cuda_graphs_give_what_triton_attn_gives(
    model: str, runner: str, drive: Callable[..., Any], engine: Callable[..., Any]
) -> None:
    ours, theirs = finish(
        drive, runner, job(engine, model, "CUSTOM"), scoring(engine, model, "TRITON_ATTN")
    )
    assert ours["layers"]["impls"] == ["magi_serve.backends.vllm.impl.MagiAttentionImpl"]
    assert ours["layers"]["kernels"] != ["reference"]
    assert theirs["layers"]["impls"] != ours["layers"]["impls"]
    assert_alike(ours, theirs)


@RUNNERS
@pytest.mark.parametrize("stored", ["fp8", "fp8_e5m2", "int8_per_token_head"])
@pytest.mark.parametrize("model", ["llama", "gptoss-gpu"])
def test_quantised_caches_give_what_plain_triton_gives(
    model: str, stored: str, runner: str, drive: Callable[..., Any], engine: Callable[..., Any]
) -> None:
    if (model == "llama") != (stored == "fp8") and runner == "V1":
        pytest.skip("as under the other runner")
    # TRITON_ATTN rounds queries to 8 bits too with fp8, and does not start with fp8_e5m2.
    other: dict[str, Any] = {"backend": "TRITON_ATTN"}
    if stored.startswith("fp8"):
        other = {"backend": "CUSTOM", "additional_config": {"magi_serve": {"kernel": "triton"}}}
    ours, theirs = finish(
        drive,
        runner,
        job(engine, model, "CUSTOM", kv_cache_dtype=stored),
        scoring(engine, model, kv_cache_dtype=stored, **other),
        others_compile=other["backend"] == "CUSTOM",
    )
    assert ours["layers"]["shapes"] == theirs["layers"]["shapes"]
    assert_alike(ours, theirs)


def test_an_fp8_cache_gives_about_what_triton_attn_gives(
    drive: Callable[..., Any], engine: Callable[..., Any]
) -> None:
    ours, theirs = finish(
        drive,
        "V2",
        job(engine, "llama", "CUSTOM", kv_cache_dtype="fp8"),
        scoring(engine, "llama", "TRITON_ATTN", kv_cache_dtype="fp8"),
    )
    assert_alike(ours, theirs, times=3)  # for their 8-bit queries


@RUNNERS
def test_verifying_drafts_under_cuda_graphs_changes_no_logprob(
    runner: str, drive: Callable[..., Any], engine: Callable[..., Any]
) -> None:
    if runner == "V2" and not importlib.util.find_spec("vllm.v1.worker.gpu.spec_decode.ngram"):
        pytest.skip("this vLLM's V2 runner looks no drafts up")
    # One token is enough to look a draft up, so that many steps verify some.
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }
    drafted, plain = finish(
        drive,
        runner,
        job(engine, "llama", "CUSTOM", speculative_config=drafts),
        scoring(engine, "llama", "CUSTOM"),
    )
    assert_alike(drafted, plain)


def test_an_encoder_gives_what_triton_attn_gives(
    drive: Callable[..., Any], engine: Callable[..., Any], prompts: list[list[int]]
) -> None:
    rng = random.Random(1)
    long = [rng.randrange(3, 512) for _ in range(3000)]
    options = {
        "runner": "pooling",
        "pooler_config": {"task": "token_embed"},
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_batched_tokens": 4096,
        "gpu_memory_utilization": 0.05,
        "skip_tokenizer_init": False,
    }
    run = {"embed": [*prompts, long]}
    jobs = [
        engine("modernbert", run, backend=name, **options) for name in ("CUSTOM", "TRITON_ATTN")
    ]
    report = drive(*jobs)
    ours, theirs = report["engines"]
    assert "error" not in ours and "error" not in theirs, report["log"][-6000:]
    assert ours["layers"]["impls"] == ["magi_serve.backends.vllm.impl.MagiAttentionImpl"]
    assert ours["layers"]["impls"] != theirs["layers"]["impls"]
    for mine, others in zip(ours["runs"][0], theirs["runs"][0], strict=True):
        a, b = torch.tensor(mine), torch.tensor(others)
        assert float((a - b).norm() / b.norm()) < 0.03
