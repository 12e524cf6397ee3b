"""A pytest plugin that turns vLLM's own attention tests on our backend, with no model downloads.

Loaded with ``-p custom_backend`` into a pytest process of vLLM's tests. ``PEER_MODELS`` names a
folder with one configuration per model that those tests ask for, slashes as double underscores.
"""

import os
from pathlib import Path
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    load_general_plugins()
    models = Path(os.environ["PEER_MODELS"])
    for item in items:
        module: Any = item.getparent(pytest.Module).obj  # type: ignore[union-attr]
        for name, value in vars(module).items():
            if name.endswith("BACKENDS_TO_TEST"):
                value[:] = [AttentionBackendEnum.CUSTOM]
        # Asked for whether to run FLEX_ATTENTION beside the backends under test.
        module.is_torch_equal_or_newer = lambda version: False
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "model" in params:
            params["model"] = str(models / params["model"].replace("/", "__"))
