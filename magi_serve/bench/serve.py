"""vLLM end to end with dummy weights: the same workloads under several attention backends.

Each backend gets a process of its own, one after the other, so that none inherits another's memory,
compiled graphs or caches. Prefix caching is off; CUDA graphs are as vLLM's defaults have them.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from magi_serve.bench.report import add_commit, append_json, machine, table
from magi_serve.errors import ArgumentError

DEFAULT_WORKLOADS = ("1x32768+1", "1x120000+1", "32x8192+128")
_MARK = "magi-serve-bench "


@dataclass(frozen=True, slots=True)
class Workload:
    """`count` prompts of `prompt` tokens, each continued by `output` tokens."""

    count: int
    prompt: int
    output: int

    @classmethod
    def parse(cls, text: str) -> "Workload":
        match = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)
        if not match or not all(int(n) for n in match.groups()):
            raise ArgumentError(
                f"workload {text!r} is not accepted; expected COUNTxPROMPT+OUTPUT with numbers > "
                "0, as 32x8192+128"
            )
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"{self.count}x{self.prompt}+{self.output}"


def model_folder(name: str) -> str:
    """The folder of a shape that comes with magi-serve (`llama-8b`, `gpt-oss-20b`), or `name`
    itself."""
    shape = files("magi_serve.bench") / "models" / name
    return str(shape) if shape.is_dir() else name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", action="append", help="llama-8b, gpt-oss-20b or a model folder; repeatable"
    )
    parser.add_argument(
        "--backend",
        action="append",
        help="vLLM attention backend; repeatable, the others are compared with the first",
    )
    parser.add_argument(
        "--workload", action="append", help="COUNTxPROMPT+OUTPUT in tokens; repeatable"
    )
    parser.add_argument(
        "--repeat", type=int, default=2, help="runs per workload, the median counts"
    )
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, help="JSON of further vllm.LLM arguments"
    )
    parser.add_argument("--json", type=Path, help="append one JSON line per row to this file")
    add_commit(parser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its table; 0 if every backend finished."""
    backends = args.backend or ["CUSTOM", "TRITON_ATTN"]
    workloads = [Workload.parse(text) for text in args.workload or DEFAULT_WORKLOADS]
    failed = False
    for model in args.model or ["llama-8b", "gpt-oss-20b"]:
        seconds: dict[str, dict[str, list[float]]] = {}
        for backend in backends:
            print(f"{model}: {backend} ...", file=sys.stderr, flush=True)
            seconds[backend] = _measure(model, backend, workloads, args.repeat, args.engine_args)
            failed |= not seconds[backend]
        rows = []
        shown = [
            ["model", "prompts", *[f"{b} (s)" for b in backends], f"{backends[0]} is faster by"]
        ]
        for workload in map(str, workloads):
            medians = {b: _median(seconds[b].get(workload, [])) for b in backends}
            first = medians[backends[0]]
            ratios = {
                b: None if first is None or m is None else m / first
                for b, m in medians.items()
                if b != backends[0]
            }
            rows += [
                {
                    "case": "serve",
                    "model": model,
                    "workload": workload,
                    "backend": b,
                    "median_s": medians[b],
                    "all_s": seconds[b].get(workload, []),
                    "engine_args": args.engine_args,
                    **machine(args.commit),
                }
                for b in backends
            ]
            shown.append(
                [
                    model,
                    workload,
                    *[_number(medians[b], 2) for b in backends],
                    ", ".join(f"{_number(r, 2)}x {b}" for b, r in ratios.items()),
                ]
            )
        print(table(shown), flush=True)
        if args.json:
            append_json(args.json, rows)
    return int(failed)


def _number(value: float | None, digits: int) -> str:
    return "failed" if value is None else f"{value:.{digits}f}"


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _measure(
    model: str, backend: str, workloads: list[Workload], repeat: int, engine_args: dict[str, Any]
) -> dict[str, list[float]]:
    """Seconds of each workload, measured in a new process; empty if it failed."""
    job = {
        "model": model_folder(model),
        "backend": backend,
        "workloads": [str(w) for w in workloads],
        "repeat": repeat,
        "engine_args": engine_args,
    }
    command = [sys.executable, "-m", "magi_serve.bench.serve", json.dumps(job)]
    environment = {"VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    results: dict[str, list[float]] = {}
    for line in child.stdout.splitlines():
        if line.startswith(_MARK):
            row = json.loads(line.removeprefix(_MARK))
            results.setdefault(row["workload"], []).append(row["seconds"])
            print(
                f"  {backend} {row['workload']}: {row['seconds']:.2f} s",
                file=sys.stderr,
                flush=True,
            )
    if child.returncode:
        print(f"  {backend} ended with exit code {child.returncode}", file=sys.stderr, flush=True)
    return results


def _work(job: dict[str, Any]) -> None:
    """The child process: one engine, every workload."""
    import random

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend=job["backend"],
        **{
            "max_model_len": 131072,
            "gpu_memory_utilization": 0.85,
            "enable_prefix_caching": False,
            **job["engine_args"],
        },
    )
    generator = random.Random(0)

    def generate(workload: Workload) -> float:
        prompts = [
            {"prompt_token_ids": [generator.randrange(100, 100000) for _ in range(workload.prompt)]}
            for _ in range(workload.count)
        ]
        sampling = SamplingParams(
            max_tokens=workload.output, ignore_eos=True, temperature=0.0, detokenize=False
        )
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    for text in job["workloads"]:
        workload = Workload.parse(text)
        # Kernels and buffers of this batch shape exist before the clock starts.
        generate(Workload(workload.count, min(workload.prompt, 2048), min(workload.output, 8)))
        for _ in range(job["repeat"]):
            seconds = generate(workload)
            print(_MARK + json.dumps({"workload": text, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    _work(json.loads(sys.argv[1]))
