"""Registration, selection and the capability questions, without building an engine."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import AttentionSelectorConfig

from magi_serve import settings
from magi_serve.backends.vllm import compat, plugin
from magi_serve.backends.vllm.backend import MagiAttentionBackend, why_not
from magi_serve.errors import PluginError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="asks as the CPU platform does"),
]

CUSTOM = AttentionBackendEnum.CUSTOM


@pytest.fixture(autouse=True)
def _settings(vllm_as_installed: None) -> Iterator[None]:
    settings._load.cache_clear()
    yield
    settings._load.cache_clear()


def select(backend: Any = CUSTOM, **changes: Any) -> str:
    fields: dict[str, Any] = {
        "head_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": None,
        **changes,
    }
    return current_platform.get_attn_backend_cls(
        backend, attn_selector_config=AttentionSelectorConfig(**fields), num_heads=4
    )


def test_registering_twice_is_harmless_and_makes_custom_count() -> None:
    stock = select()
    plugin.register()
    guarded = current_platform.get_attn_backend_cls
    plugin.register()
    assert current_platform.get_attn_backend_cls == guarded
    assert "cpu_attn" in stock
    assert select() == plugin.BACKEND
    assert CUSTOM.get_class() is MagiAttentionBackend


@pytest.mark.parametrize("backend", [None, AttentionBackendEnum.CPU_ATTN])
def test_what_is_not_custom_is_chosen_as_before(backend: Any) -> None:
    stock = select(backend)
    plugin.register()
    assert select(backend) == stock
    assert "mla" in select(backend, use_mla=True, head_size=576).lower()


@pytest.mark.parametrize("first", [True, False], ids=["before us", "after us"])
def test_a_rival_for_custom_is_named_when_custom_is_selected(
    first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if first:
        register_backend(CUSTOM, "rival.Backend")
    plugin.register()
    if first:
        assert "rival.Backend" in caplog.text
        assert plugin.BACKEND in caplog.text
    else:
        register_backend(CUSTOM, "rival.Backend")
    assert "cpu_attn" in select(None)
    with pytest.raises(PluginError, match=r"rival\.Backend.*MagiAttentionBackend.*VLLM_PLUGINS"):
        select()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"attn_type": "encoder"}, "attention type encoder not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "int4_per_token_head"}, "=int4_per_token_head is not supported"),
        ({"kv_cache_dtype": "float16"}, "k and v of torch.float16 with q of torch.bfloat16"),
        ({"head_size": 2048}, "cpu: head_dim=2048 is not supported"),
        ({"dtype": torch.float64}, "cpu: q dtype torch.float64 is not supported"),
        ({"block_size": 24}, "block_size not supported"),
    ],
)
def test_a_refusal_says_why_and_what_to_do(changes: dict[str, Any], reason: str) -> None:
    plugin.register()
    with pytest.raises(PluginError) as error:
        select(**changes)
    assert reason in str(error.value)
    assert compat.WAY_OUT in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"has_sink": True, "has_sliding_window": True},
        {"dtype": torch.float32},
        {"dtype": torch.float16, "kv_cache_dtype": "float16"},
        {"head_size": 80, "block_size": 48},
        {"use_kv_connector": True},
        {"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True},
        *({"kv_cache_dtype": name, "has_sink": True} for name in compat.QUANTISED),
        {"use_non_causal": True},
    ],
)
def test_what_the_kernels_do_is_accepted(changes: dict[str, Any]) -> None:
    plugin.register()
    assert select(**changes) == plugin.BACKEND


def test_answers_follow_the_forced_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MagiAttentionBackend.supports_head_size(36)
    monkeypatch.setenv("MAGI_SERVE_KERNEL", "reference")
    settings._load.cache_clear()
    assert MagiAttentionBackend.supports_dtype(torch.float64)
    monkeypatch.setenv("MAGI_SERVE_KERNEL", "triton")
    settings._load.cache_clear()
    assert why_not(head_dim=36)[0].startswith("triton: ")


def test_pages_are_multiples_of_sixteen_and_any_layout_is_taken() -> None:
    assert MagiAttentionBackend.get_supported_kernel_block_sizes() == [MultipleOf(16)]
    layouts = MagiAttentionBackend.supported_kv_cache_layouts()
    assert layouts[0].name == "LBNHC"
    assert len(set(layouts)) == len(type(layouts[0]))
    shape = MagiAttentionBackend.get_kv_cache_shape
    assert shape(7, 16, 2, 64) == shape(7, 16, 2, 64, "fp8") == (7, 2, 16, 128)
    assert shape(7, 16, 2, 64, "int8_per_token_head") == (7, 2, 16, 136)
