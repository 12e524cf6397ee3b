"""The order of these tests: the one that waits for vLLM, in another process, comes last."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    items.sort(key=lambda item: here in item.path.parents and bool(item.get_closest_marker("vllm")))
