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

CLOSE = 0.2  # log-probs of two bf16 runs; the likeliest token leads by several on average


def generate(
    drive: Callable[..., Any], engine: Callable[..., Any], model: str, backend: str, **changes: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    env = changes.pop("env", {})
    rng = random.Random(0)
    # Shorter than a page; longer than a window; longer than a chunk; several chunks.
    prompts = [[0] + [rng.randrange(3, 512) for _ in range(n)] for n in (4, 200, 1500, 4000)]
    # Repetitive, so that looking drafts up in the prompt finds some.
    prompts.append([0, *[7, 8, 9, 10, 11] * 40])
    options = {
        "dtype": "bfloat16",
        "enforce_eager": False,
        "gpu_memory_utilization": 0.4,
        "max_model_len": 4352,
        "max_num_batched_tokens": 1024,
        **changes,
    }
    run = {"prompts": prompts, "sampling": {"max_tokens": 48}}
    (result,) = drive(engine(model, run, backend=backend, **options), **env)["engines"]
    assert "error" not in result, result["error"]
    return result["layers"], result["runs"][0]


def assert_alike(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """The same tokens, or another one only where both were about as likely."""
    agreed = 0
    for mine, other in zip(ours, theirs, strict=True):
        for a, b, p, q in zip(
            mine["tokens"], other["tokens"], mine["logprobs"], other["logprobs"], strict=True
        ):
            assert abs(p - q) < CLOSE
            if a != b:
                break
            agreed += 1
    assert agreed > 0.5 * sum(len(r["tokens"]) for r in ours)


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("model", ["llama", "gptoss-gpu"])
def test_cuda_graphs_give_what_triton_attn_gives(
    model: str, runner: str, drive: Callable[..., Any], engine: Callable[..., Any]
) -> None:
    env = {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2"))}
    layers, ours = generate(drive, engine, model, "CUSTOM", env=env)
    assert layers["impls"] == ["magi_serve.backends.vllm.impl.MagiAttentionImpl"]
    assert layers["kernels"] != ["reference"]
    assert layers["cudagraphs"] == "FULL_AND_PIECEWISE"
    assert (".gpu." in layers["runner"]) == (runner == "V2")
    stock, theirs = generate(drive, engine, model, "TRITON_ATTN", env=env)
    assert stock["impls"] != layers["impls"]
    assert_alike(ours, theirs)


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_verifying_drafts_under_cuda_graphs_changes_no_token(
    runner: str, drive: Callable[..., Any], engine: Callable[..., Any]
) -> None:
    if runner == "V2" and not importlib.util.find_spec("vllm.v1.worker.gpu.spec_decode.ngram"):
        pytest.skip("this vLLM's V2 runner looks no drafts up")
    env = {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2"))}
    # One token is enough to look a draft up, so that many steps verify some.
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }
    _, plain = generate(drive, engine, "llama", "CUSTOM", env=env)
    _, drafted = generate(drive, engine, "llama", "CUSTOM", env=env, speculative_config=drafts)
    assert_alike(drafted, plain)
