"""Tiny random checkpoints, and a way to run vLLM engines on them in a process of its own."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB = 512
ENCODERS = ("bert", "modernbert")
DRIVER = Path(__file__).with_name("drive.py")
Drive = Callable[..., dict[str, Any]]


def _config(name: str) -> Any:
    import transformers as t

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    if name == "llama":
        return t.LlamaConfig(intermediate_size=256, num_hidden_layers=2, head_dim=64, **common)
    if name == "qwen3":
        return t.Qwen3Config(intermediate_size=256, num_hidden_layers=2, head_dim=32, **common)
    if name == "bloom":
        return t.BloomConfig(
            n_layer=2, n_head=6, **common | {"hidden_size": 192, "tie_word_embeddings": True}
        )
    if name == "mistral":
        return t.MistralConfig(
            intermediate_size=256, num_hidden_layers=2, head_dim=32, sliding_window=24, **common
        )
    if name == "phi3":
        return t.Phi3Config(
            intermediate_size=256, num_hidden_layers=2, partial_rotary_factor=0.5, **common
        )
    if name.startswith("gemma"):
        configs = {"gemma2": t.Gemma2Config, "gemma3": t.Gemma3TextConfig}
        common |= {"tie_word_embeddings": True}
        return configs[name](
            intermediate_size=256,
            num_hidden_layers=4,
            head_dim=32,
            sliding_window=24,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "full_attention"] * 2,
            **{"attn_logit_softcapping": 5.0} if name == "gemma2" else {},
            **common,
        )
    if name.startswith("gptoss"):
        rope = {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
        if name == "gptoss-gpu":
            common |= {"hidden_size": 512, "num_attention_heads": 16}
        return t.GptOssConfig(
            intermediate_size=common["hidden_size"],
            num_hidden_layers=4,
            head_dim=64,
            sliding_window=128 if name == "gptoss-gpu" else 32,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters=rope,
            **common,
        )
    if name in ENCODERS:
        del common["num_key_value_heads"], common["bos_token_id"], common["eos_token_id"]
        del common["tie_word_embeddings"]
        common |= {"intermediate_size": 256, "num_hidden_layers": 3}
        if name == "bert":
            return t.BertConfig(**common)
        return t.ModernBertConfig(
            local_attention=16,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            bos_token_id=0,
            eos_token_id=1,
            cls_token_id=0,
            sep_token_id=1,
            **common,
        )
    assert name == "mla"
    common["num_key_value_heads"] = common["num_attention_heads"]
    return t.DeepseekV2Config(
        intermediate_size=256,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        architectures=["DeepseekV2ForCausalLM"],
        **common,
    )


def _make(name: str, folder: Path) -> None:
    import transformers as t

    config = _config(name)
    if name == "mla":
        config.save_pretrained(folder)
        return
    kind = t.AutoModel if name in ENCODERS else t.AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_config(config).to(torch.float32)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            noise = torch.randn_like(p)
            if "norm" in parameter_name or "ln_" in parameter_name:
                # Gemma's norms multiply by 1 + weight.
                p.copy_((0 if name.startswith("gemma") else 1) + 0.1 * noise)
            elif "sinks" in parameter_name:
                p.copy_(1 + 1.5 * noise)
            else:
                # Large weights, so that the likeliest token leads by far more than rounding.
                p.copy_(noise * 1.4 / p.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    if name in ENCODERS:  # vLLM's pooling runner starts with a tokenizer only
        _word_tokenizer().save_pretrained(folder)


def _word_tokenizer() -> Any:
    """A tokenizer of `VOCAB` words."""
    import transformers as t
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{i}": i for i in range(VOCAB)}
    return t.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a tiny random model: llama, qwen3, gptoss (sinks, alternating window), bloom
    (ALiBi), mistral (window), phi3, gemma2 (soft cap, alternating window), gemma3, mla, bert and
    modernbert (encoders; the latter's second and third layer have a window).

    gptoss-gpu is a larger gptoss; mla is a configuration without weights.
    """
    made: dict[str, str] = {}

    def folder(name: str) -> str:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            _make(name, path)
            made[name] = str(path)
        return made[name]

    return folder


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids: shorter than a page, longer than gpt-oss's window, longer than two chunks."""
    rng = random.Random(0)
    return [[0] + [rng.randrange(3, VOCAB) for _ in range(n)] for n in (4, 39, 149)]


@pytest.fixture(scope="session")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    """Run a job of `drive.py`; returns its report, with what the process printed under "log"."""

    def run(*engines: dict[str, Any], path: list[str] | None = None, **env: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("drive")
        job, result = folder / "job.json", folder / "result.json"
        job.write_text(json.dumps(engines))
        search = [*(path or []), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        settings = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(p for p in search if p),
        }
        log = folder / "log.txt"  # a file, so that a hanging engine leaves its last words
        with log.open("w") as f:
            process = subprocess.run(
                [sys.executable, str(DRIVER), str(job), str(result)],
                env={**os.environ, **settings, **env},
                stdout=f,
                stderr=subprocess.STDOUT,
                timeout=420,
                check=False,
            )
        said = log.read_text()
        assert process.returncode == 0, said[-6000:]
        return {**json.loads(result.read_text()), "log": said}

    return run


@pytest.fixture(scope="session")
def engine(checkpoint: Callable[[str], str]) -> Callable[..., dict[str, Any]]:
    """One engine of a job; CUSTOM, fp32, small chunks and small pages unless told otherwise."""

    def job(
        model: str, *runs: dict[str, Any], backend: str | None = "CUSTOM", **options: Any
    ) -> dict[str, Any]:
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "block_size": 16,
            "skip_tokenizer_init": True,
        }
        if backend:
            defaults["attention_config"] = {"backend": backend}
        return {"model": checkpoint(model), "options": {**defaults, **options}, "runs": list(runs)}

    return job
