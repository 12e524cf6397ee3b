"""Runs vLLM engines in one process, as a JSON job says, and writes down what came out.

Started by the tests as a process of its own: ``drive.py job.json result.json``. A job is a list of
engines: ``{"model", "options": LLM keywords, "runs": [{"prompts", "sampling"}]}``. A run
``{"score": i}`` reads what engine `i` continued in its first run, and gives log-probs of that;
``{"embed": prompts}`` gives what an encoder makes of each token.
"""

import json
import sys
from typing import Any


def watch(worker: Any) -> dict[str, Any]:
    """In the worker: which attention classes the layers have; counts their calls from now on."""
    layers = attention_layers(worker)
    for cls in {type(layer.impl) for layer in layers}:
        if "calls" not in vars(cls):
            cls.calls, cls.forward = 0, counted(cls, cls.forward)
    return {
        "cudagraphs": worker.vllm_config.compilation_config.cudagraph_mode.name,
        "runner": type(worker.model_runner).__module__,
        "impls": sorted({f"{type(x.impl).__module__}.{type(x.impl).__name__}" for x in layers}),
        "kernels": sorted({str(getattr(x.impl, "kernel_name", None)) for x in layers}),
        "strides": [list(x.kv_cache.stride()) for x in layers],
        "shapes": [list(x.kv_cache.shape) for x in layers],
    }


def counted(cls: Any, forward: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        cls.calls += 1
        return forward(*args, **kwargs)

    return wrapper


def calls(worker: Any) -> int:
    return sum(cls.calls for cls in {type(layer.impl) for layer in attention_layers(worker)})


def attention_layers(worker: Any) -> list[Any]:
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if hasattr(layer, "impl")]


def score(llm: Any, continued: list[dict[str, Any]]) -> list[list[float]]:
    """The log-prob of each generated token, given those before it."""
    run = {
        "prompts": [r["prompt"] + r["tokens"] for r in continued],
        "sampling": {"max_tokens": 1, "prompt_logprobs": 0},
    }
    return [
        scored["prompt_logprobs"][-len(r["tokens"]) :]
        for scored, r in zip(generate(llm, run), continued, strict=True)
    ]


def generate(llm: Any, run: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, ignore_eos=True, logprobs=1, **run["sampling"])
    prompts = [{"prompt_token_ids": p} for p in run["prompts"]]
    results = []
    for prompt, output in zip(
        run["prompts"], llm.generate(prompts, sampling, use_tqdm=False), strict=True
    ):
        tokens = list(output.outputs[0].token_ids)
        of_prompt = output.prompt_logprobs
        results.append(
            {
                "prompt": prompt,
                "tokens": tokens,
                "logprobs": [
                    d[t].logprob for d, t in zip(output.outputs[0].logprobs, tokens, strict=True)
                ],
                "prompt_logprobs": of_prompt
                and [d[t].logprob for d, t in zip(of_prompt[1:], prompt[1:], strict=True)],
                "cached": output.num_cached_tokens,
            }
        )
    return results


def embed(llm: Any, prompts: list[list[int]]) -> list[list[list[float]]]:
    """What an encoder makes of each token."""
    from vllm import PoolingParams

    outputs = llm.encode(
        [{"prompt_token_ids": p} for p in prompts],
        PoolingParams(use_activation=False),
        pooling_task="token_embed",
        use_tqdm=False,
    )
    return [output.outputs.data.float().tolist() for output in outputs]


def perform(llm: Any, run: dict[str, Any], results: list[dict[str, Any]]) -> Any:
    if "embed" in run:
        return embed(llm, run["embed"])
    if "score" in run:
        return score(llm, results[run["score"]]["runs"][0])
    return generate(llm, run)


def main() -> None:
    with open(sys.argv[1]) as f:
        job = json.load(f)
    import vllm
    from vllm import LLM
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    results: list[dict[str, Any]] = []
    for engine in job:
        result: dict[str, Any] = {}
        results.append(result)
        try:
            llm = LLM(engine["model"], **engine["options"])
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
            continue
        result["layers"] = llm.collective_rpc(watch)[0]
        result["runs"] = [perform(llm, run, results) for run in engine["runs"]]
        result["calls"] = llm.collective_rpc(calls)[0]
        llm.llm_engine.engine_core.shutdown()
        del llm
    custom = AttentionBackendEnum.CUSTOM
    report = {
        "version": vllm.__version__,
        "custom": custom.get_path() if custom.is_overridden() else None,
        "engines": results,
    }
    with open(sys.argv[2], "w") as f:
        json.dump(report, f)


if __name__ == "__main__":
    main()
