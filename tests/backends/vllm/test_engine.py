"""Real vLLM on the CPU with our backend, against transformers eager and against stock vLLM."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from magi_serve.backends.vllm import compat
from magi_serve.kernels.capabilities import KERNEL_NAMES
from magi_serve.kernels.paged.reference import dequantise, quantise, token_scale

pytestmark = pytest.mark.vllm

IMPL = "magi_serve.backends.vllm.impl.MagiAttentionImpl"
MODELS = ("llama", "qwen3", "gptoss", "bloom", "mistral", "phi3", "gemma2", "gemma3")
OTHER_VERSIONS = Path(__file__).parents[3] / ".venv"


def run(prompts: list[list[int]], max_tokens: int = 24, **sampling: Any) -> dict[str, Any]:
    return {"prompts": prompts, "sampling": {"max_tokens": max_tokens, **sampling}}


def assert_as_transformers(folder: str, results: list[dict[str, Any]]) -> None:
    """Teacher-forced: each generated token is the eager model's likeliest, log-probs as close."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    for module in model.modules():
        if hasattr(module, "gelu_impl"):  # Bloom's is an approximation here, and exact in vLLM
            module.gelu_impl = torch.nn.GELU()
    for result in results:
        prompt, tokens = result["prompt"], torch.tensor(result["tokens"])
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *result["tokens"]]])).logits[0].float()
        expected = torch.log_softmax(logits, -1)
        generated = expected[len(prompt) - 1 : -1]
        assert generated.argmax(-1).tolist() == tokens.tolist()
        torch.testing.assert_close(
            torch.tensor(result["logprobs"]),
            generated.gather(1, tokens[:, None])[:, 0],
            atol=1e-4,
            rtol=0,
        )
        if result["prompt_logprobs"]:
            of_prompt = expected[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:])[:, None])[
                :, 0
            ]
            torch.testing.assert_close(
                torch.tensor(result["prompt_logprobs"]), of_prompt, atol=1e-4, rtol=5e-5
            )


@pytest.fixture(scope="module")
def ours(
    drive: Callable[..., Any], engine: Callable[..., Any], prompts: list[list[int]]
) -> dict[str, dict[str, Any]]:
    """Each model in one process: with prompt log-probs, then twice through the prefix cache."""
    runs = [run(prompts, prompt_logprobs=1), run(prompts), run(prompts)]
    jobs = [engine(model, *runs, enable_prefix_caching=True) for model in MODELS]
    # One token is enough to look a draft up in the prompt, so that many steps verify some.
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }
    report = drive(*jobs, engine("gptoss", run(prompts), speculative_config=drafts))
    results = report["engines"]
    failed = {e["error"] for e in results if "error" in e}
    assert not failed, (failed, report["log"][-6000:])
    return {**dict(zip([*MODELS, "drafted"], results, strict=True)), "report": report}


@pytest.mark.parametrize("model", MODELS)
def test_chunked_prefill_gives_the_tokens_and_logprobs_of_transformers(
    ours: dict[str, Any], model: str, checkpoint: Callable[[str], str]
) -> None:
    layers = ours[model]["layers"]
    assert layers["impls"] == [IMPL]
    assert layers["kernels"] == ["cpu"]
    assert ours[model]["calls"] > 0
    assert_as_transformers(checkpoint(model), ours[model]["runs"][0])


@pytest.mark.parametrize("model", MODELS)
def test_a_prefix_cache_hit_changes_nothing(
    ours: dict[str, Any], model: str, checkpoint: Callable[[str], str]
) -> None:
    _, _, again = ours[model]["runs"]
    assert [r["cached"] for r in again] == [0, 32, 144]
    assert_as_transformers(checkpoint(model), again)


def test_verifying_drafts_changes_nothing(
    ours: dict[str, Any], checkpoint: Callable[[str], str]
) -> None:
    assert_as_transformers(checkpoint("gptoss"), ours["drafted"]["runs"][0])


def quantising_llama(folder: str, name: str) -> Any:
    """The eager model, with keys and values rounded as a cache of vLLM's dtype `name` does it."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.masking_utils import eager_mask
    from transformers.models.llama.modeling_llama import eager_attention_forward

    stored = compat.QUANTISED[name]

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = token_scale(x, stored.dtype) if stored.scales == "token" else None
        return dequantise(quantise(x, stored.dtype, scale), scale, x.dtype)

    def attention(module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        return eager_attention_forward(module, q, rounded(k), rounded(v), *args, **kwargs)

    AttentionInterface.register("rounding", attention)
    AttentionMaskInterface.register("rounding", eager_mask)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="rounding"
    )


def test_quantised_caches_give_the_logprobs_of_a_model_that_rounds_alike(
    drive: Callable[..., Any],
    engine: Callable[..., Any],
    prompts: list[list[int]],
    checkpoint: Callable[[str], str],
) -> None:
    names = list(compat.QUANTISED)
    jobs = [engine("llama", run(prompts, max_tokens=12), kv_cache_dtype=name) for name in names]
    report = drive(*jobs)
    for name, result in zip(names, report["engines"], strict=True):
        assert "error" not in result, report["log"][-6000:]
        assert result["layers"]["kernels"] == ["cpu"]
        model = quantising_llama(checkpoint("llama"), name)
        for one in result["runs"][0]:
            prompt, tokens = one["prompt"], torch.tensor(one["tokens"])
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *one["tokens"]]])).logits[0].float()
            expected = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
            off = torch.tensor(one["logprobs"]) - expected.gather(1, tokens[:, None])[:, 0]
            # A number between two steps may be rounded to either.
            assert float(off.abs().mean()) < 0.01, (name, off.tolist())


def test_tokens_come_before_heads_in_the_cache(ours: dict[str, Any]) -> None:
    blocks, heads, tokens, content = ours["llama"]["layers"]["shapes"][0]
    assert (heads, tokens, content) == (2, 16, 128)
    assert ours["llama"]["layers"]["strides"][0][1:] == [content, heads * content, 1]
    assert blocks > 8


def test_the_log_names_the_kernel(ours: dict[str, Any]) -> None:
    assert "kernel cpu for cpu, torch.float32 q" in ours["report"]["log"]


def test_encoders_give_the_embeddings_of_transformers(
    drive: Callable[..., Any],
    engine: Callable[..., Any],
    prompts: list[list[int]],
    checkpoint: Callable[[str], str],
) -> None:
    from transformers import AutoModel

    models = ("bert", "modernbert")
    job = {"embed": prompts}
    # A prompt is read as a whole: vLLM does not cut an encoder's into chunks.
    options = {
        "runner": "pooling",
        "pooler_config": {"task": "token_embed"},
        "max_num_batched_tokens": 512,
        "skip_tokenizer_init": False,
    }
    report = drive(*(engine(model, job, **options) for model in models))
    for model, result in zip(models, report["engines"], strict=True):
        assert "error" not in result, report["log"][-6000:]
        assert result["layers"]["impls"] == [IMPL]
        assert result["layers"]["kernels"] == ["cpu"]
        assert result["calls"] > 0
        eager = AutoModel.from_pretrained(
            checkpoint(model), dtype=torch.float32, attn_implementation="eager"
        )
        for prompt, embedded in zip(prompts, result["runs"][0], strict=True):
            with torch.no_grad():
                expected = eager(torch.tensor([prompt])).last_hidden_state[0]
            torch.testing.assert_close(torch.tensor(embedded), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("version", ["0.28", "0.30"])
def test_the_same_plugin_works_under_older_vllm(
    version: str,
    drive: Callable[..., Any],
    engine: Callable[..., Any],
    prompts: list[list[int]],
    checkpoint: Callable[[str], str],
) -> None:
    folder = OTHER_VERSIONS / f"vllm-{version}"
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing: make setup installs it")
    job = engine("gptoss", run(prompts, max_tokens=12, prompt_logprobs=1))
    report = drive(job, path=[str(folder)])
    assert report["version"].startswith(version)
    (result,) = report["engines"]
    assert "error" not in result, report["log"][-6000:]
    assert result["layers"]["impls"] == [IMPL]
    assert_as_transformers(checkpoint("gptoss"), result["runs"][0])


def test_installing_the_plugin_changes_nothing_for_the_stock_backend(
    drive: Callable[..., Any], engine: Callable[..., Any], prompts: list[list[int]]
) -> None:
    job = engine("gptoss", run(prompts, max_tokens=12), backend=None)
    installed, without = drive(job), drive(job, VLLM_PLUGINS="")
    assert installed["custom"] is not None
    assert without["custom"] is None
    for report in (installed, without):
        (impl,) = report["engines"][0]["layers"]["impls"]
        assert impl.startswith("vllm.")
        assert report["engines"][0]["calls"] > 0
        assert "magi" not in report["log"]
    assert installed["engines"] == without["engines"]


@pytest.fixture(scope="module")
def refusals(drive: Callable[..., Any], engine: Callable[..., Any]) -> list[str]:
    """What vLLM says to engines that we must refuse, all tried in one process."""
    report = drive(
        engine("mla", load_format="dummy", block_size=16),
        engine("llama", kv_cache_dtype="int4_per_token_head"),
        engine("llama", additional_config={"magi_serve": {"kernle": "cpu"}}),
        engine("llama", additional_config={"magi_serve": {"kernel": "hoper"}}),
        engine("llama", additional_config={"magi_serve": {"kernel": "triton"}}),
    )
    return [e["error"] for e in report["engines"]]


def test_an_mla_model_is_refused_with_the_reason_and_the_way_out(refusals: list[str]) -> None:
    assert "MLA not supported" in refusals[0]
    assert "--attention-backend auto" in refusals[0]


def test_an_int4_cache_is_refused_with_the_reason(refusals: list[str]) -> None:
    assert "kv_cache_dtype=int4_per_token_head is not supported" in refusals[1]


def test_an_unknown_settings_key_is_an_error_that_names_it(refusals: list[str]) -> None:
    assert "kernle is not a setting (accepted: kernel, tuned)" in refusals[2]


def test_an_unknown_kernel_is_an_error_that_names_the_known_ones(refusals: list[str]) -> None:
    assert "hoper" in refusals[3]
    assert f"accepts auto, {', '.join(KERNEL_NAMES)};" in refusals[3]


def test_a_forced_kernel_that_cannot_run_here_is_refused_with_its_reason(
    refusals: list[str],
) -> None:
    assert "triton: device cpu is not supported" in refusals[4]


def test_another_plugin_that_holds_custom_gives_an_error_naming_both(
    drive: Callable[..., Any], engine: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "rival.py").write_text(
        "def register():\n"
        "    import vllm.v1.attention.backends.registry as r\n"
        "    r.register_backend(r.AttentionBackendEnum.CUSTOM, 'rival.RivalBackend')\n"
    )
    info = tmp_path / "rival-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nrival = rival:register\n")
    error = drive(engine("llama"), path=[str(tmp_path)])["engines"][0]["error"]
    assert "rival.RivalBackend" in error
    assert "magi_serve.backends.vllm.backend.MagiAttentionBackend" in error
    assert "VLLM_PLUGINS" in error
