"""What all tests share: who is left out on this machine, and how hypothesis runs."""

import importlib.util

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


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
