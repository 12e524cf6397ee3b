"""Real text over HTTP: SmolLM2-135M in a real process, asked by the official client."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from magi_serve import __version__

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
MODEL = "SmolLM2"
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def client(service: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_a_completion(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=5, temperature=0
    )
    assert done.choices[0].text.startswith(" Paris")
    assert done.choices[0].finish_reason == "length"
    assert done.usage and (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 5)


def test_a_stream_is_the_completion_in_pieces(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked)
    pieces = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]


def test_asked_for_the_capital_of_france_it_answers_paris(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=24,
        temperature=0,
    )
    assert "Paris" in (done.choices[0].message.content or "")
    assert done.choices[0].finish_reason == "stop"


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert "Paris" in text
    assert usage and usage.completion_tokens > 3


def test_short_and_long_prompts_in_one_request(client: openai.OpenAI) -> None:
    short, long = "The capital of France is", "One two three four five six seven " * 100
    done = client.completions.create(
        model=MODEL, prompt=[short, long, short], max_tokens=3, temperature=0
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert [choice.text.startswith(" Paris") for choice in done.choices] == [True, False, True]
    assert done.usage and done.usage.prompt_tokens > 700


def test_every_layer_runs_our_attention(service: Any) -> None:
    said = httpx.get(f"{service.url}/version").json()
    assert said["magi_serve"] == __version__
    assert said["version"] == said["vllm"] and said["torch"]
    assert said["attention"]["workers"] == 1
    (group,) = said["attention"]["groups"]
    assert group["ours"] is True
    assert group["impl"] == "magi_serve.backends.vllm.impl.MagiAttentionImpl"
    assert (group["layers"], group["kernel"]) == (30, "cpu")
    assert said["device"]


def test_the_log_says_in_one_line_which_attention_was_chosen(service: Any) -> None:
    lines = [line for line in service.said().splitlines() if "attention by magi-serve" in line]
    assert len(lines) == 1
    assert "CUSTOM" in lines[0] and "--attention-backend auto" in lines[0]


def test_probes(service: Any) -> None:
    for path, status in (("/live", "live"), ("/ready", "ready")):
        answer = httpx.get(service.url + path)
        assert (answer.status_code, answer.json()) == (200, {"status": status})
    assert httpx.get(f"{service.url}/health").status_code == 200


def test_metrics_keep_the_names_of_vllm(service: Any) -> None:
    scrape = httpx.get(f"{service.url}/metrics").text
    for name in ("vllm:num_requests_running", "vllm:prompt_tokens_total"):
        assert name in scrape


def test_metrics_have_our_own_beside_them(client: openai.OpenAI, service: Any) -> None:
    client.completions.create(model=MODEL, prompt="A page of keys", max_tokens=2)
    httpx.get(f"{service.url}/metrics")  # has the engine asked
    deadline = time.monotonic() + 30
    while not (plans := re.search(r"^magi_plans_total ([\d.]+)", scrape(service), re.M)) or (
        float(plans[1]) < 2
    ):
        assert time.monotonic() < deadline, scrape(service)
        time.sleep(1)
    found = scrape(service)
    assert re.search(r'^magi_attention_info\{.*kernel="cpu".*\} 1', found, re.M)
    pages, free = (
        float(re.search(rf"^{name} ([\d.e+]+)", found, re.M)[1])  # type: ignore[index]
        for name in ("magi_kv_pages", "magi_kv_pages_free")
    )
    assert pages == free > 0
    assert re.search(r'^magi_kv_pages_held\{.*kind="FullAttentionSpec".*\} 0', found, re.M)
    assert 'magi_prompt_tokens_unread{state="running"} 0.0' in found


def scrape(service: Any) -> str:
    return httpx.get(f"{service.url}/metrics").text


def test_every_panel_of_the_dashboard_finds_its_figures(
    client: openai.OpenAI, service: Any
) -> None:
    """Names and labels of every query, in a scrape of a service that has answered."""
    client.completions.create(model=MODEL, prompt="Two words", max_tokens=3)
    time.sleep(1)
    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(scrape(service)):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    board = json.loads((ROOT / "deploy" / "grafana" / "magi-serve.json").read_text())
    assert len(board["panels"]) >= 10
    for panel in board["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"((?:vllm:|magi_)\w+)\{", target["expr"])
            assert names, target
            missing = [name for name in names if name not in samples]
            assert not missing, (panel["title"], missing)
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            labels |= set(re.findall(r"by \(([\w, ]+)\)", target["expr"])) - {"le"}
            used = {one.strip() for label in labels for one in label.split(",")}
            assert used <= set().union(*(samples[name] for name in names)), panel["title"]
            buckets = [name for name in names if name.endswith("_bucket")]
            assert all("le" in samples[name] for name in buckets)


def test_the_model_is_listed_with_its_length(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.model_dump()["max_model_len"] == 1024


def test_an_unknown_model_is_an_error_of_the_openai_kind(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(model="another", prompt="x")
    assert "another" in raised.value.message
    assert isinstance(raised.value.body, dict) and {"message", "type", "code"} <= set(
        raised.value.body
    )


def test_a_prompt_that_is_too_long_is_refused_with_the_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="1024"):
        client.completions.create(model=MODEL, prompt="hello " * 2000, max_tokens=1)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": "SmolLM2", "prompt": "x", "n": -1}'])
def test_bad_bodies_are_refused_and_do_not_hurt(service: Any, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{service.url}/v1/completions", content=body, headers=headers)
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]["message"]
    assert httpx.get(f"{service.url}/ready").status_code == 200


def test_the_printed_curl_line_works(service: Any) -> None:
    words = shlex.split(service.curl)
    assert words[0] == "curl"
    if shutil.which("curl"):
        said = subprocess.run(words, capture_output=True, text=True, timeout=120).stdout
    else:
        url = next(word for word in words if word.startswith("http"))
        headers = dict(words[i + 1].split(": ") for i, word in enumerate(words) if word == "-H")
        body = words[words.index("-d") + 1]
        said = httpx.post(url, content=body, headers=headers, timeout=120).text
    assert json.loads(said)["choices"][0]["text"].startswith(" Paris")


def test_prompts_and_answers_are_not_logged(client: openai.OpenAI, service: Any) -> None:
    prompt = "Zebra quartz 7731 is the name of"
    done = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
    assert prompt not in service.said()
    assert done.choices[0].text.strip() not in service.said()


MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "max_position_embeddings": 512,
    "vocab_size": 512,
    "torch_dtype": "float32",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def refused(
    tmp_path_factory: pytest.TempPathFactory, command: Callable[..., dict[str, Any]]
) -> dict[str, subprocess.CompletedProcess[str]]:
    """What ``magi-serve serve`` says to an MLA model, and where vLLM does not load our plugin."""
    started = {}
    for name, config, env in (("mla", MLA, {}), ("no plugin", LLAMA, {"VLLM_PLUGINS": "another"})):
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(config))
        keywords = command("serve", str(folder), "--skip-tokenizer-init", "--port", "0")
        keywords["env"] |= env
        started[name] = subprocess.Popen(
            **keywords, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    done = {}
    for name, process in started.items():
        out, err = process.communicate(timeout=180)
        done[name] = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    return done


@pytest.mark.parametrize(
    ("case", "reason"), [("mla", "MLA not supported"), ("no plugin", "has not loaded our plugin")]
)
def test_what_we_cannot_serve_is_refused_with_the_reason(
    refused: dict[str, subprocess.CompletedProcess[str]], case: str, reason: str
) -> None:
    done = refused[case]
    assert done.returncode == 1
    assert reason in done.stderr
    assert "--attention-backend auto" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "ready" not in done.stdout


@pytest.mark.last
def test_sigterm_ends_the_process_with_0_after_an_open_stream(
    client: openai.OpenAI, service: Any
) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt="Count:",
        max_tokens=16,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = iter(stream)
    next(chunks)
    service.process.send_signal(signal.SIGTERM)
    assert [*chunks][-1].choices[0].finish_reason == "length"
    assert service.process.wait(30) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{service.url}/live")
