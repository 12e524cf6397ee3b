"""What all tests share: who is left out on this machine, and how hypothesis runs."""

import importlib.util
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Triton's interpreter takes seconds for an example: a deadline would measure the machine.
settings.register_profile("magi-serve", deadline=None, print_blob=True)
settings.load_profile("magi-serve")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if importlib.util.find_spec("vllm") is None:
        missing["vllm"] = "vLLM is not importable here"
    wanted = any(item.get_closest_marker(name) for item in items for name in ("gpu", "multi_gpu"))
    gpus = _num_gpus() if wanted else 0
    if gpus == 0:
        missing["gpu"] = "no NVIDIA GPU here"
    if gpus < 2:
        missing["multi_gpu"] = f"needs several NVIDIA GPUs, found {gpus}"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def vllm_as_installed() -> Iterator[None]:
    """Leaves vLLM's registry and platform as they were, and starts without an override."""
    if importlib.util.find_spec("vllm") is None:
        yield
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    platform, custom = type(current_platform), AttentionBackendEnum.CUSTOM
    stock = vars(platform).get("get_attn_backend_cls")
    custom.clear_override()
    yield
    custom.clear_override()
    if stock is not None:
        platform.get_attn_backend_cls = stock


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
