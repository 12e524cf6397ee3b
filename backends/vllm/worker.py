"""What a vLLM worker says about the attention that it runs."""

from typing import Any


class WorkerReport:
    """Mixed into vLLM's worker through ``--worker-extension-cls`` and called over RPC.

    An extension of one's own derives from this class to keep the report.
    """

    def magi_serve_report(self) -> dict[str, Any]:
        """Which attention class each KV group of this worker runs.

        Returns:
            ``device``, its name, and ``groups``, one entry per KV group and attention class:
            ``layers`` (their number), ``backend`` and ``impl`` (full class names), ``kernel`` (None
            unless ours) and ``ours``.
        """
        from vllm.platforms import current_platform

        worker: Any = self
        layers: dict[str, Any] = worker.vllm_config.compilation_config.static_forward_context
        groups: list[dict[str, Any]] = []
        for kv_group in worker.model_runner.kv_cache_config.kv_cache_groups:
            by_class: dict[type, list[Any]] = {}
            for name in kv_group.layer_names:
                if hasattr(layers.get(name), "get_attn_backend"):
                    by_class.setdefault(layers[name].get_attn_backend(), []).append(layers[name])
            groups.extend(_describe(backend, members) for backend, members in by_class.items())
        return {"device": str(current_platform.get_device_name()), "groups": groups}

    def magi_serve_plan_time(self) -> tuple[int, float]:
        """How many batches this worker has planned, and the seconds of host time that it took."""
        from magi_serve.backends.vllm.plan_time import plan_time

        return plan_time.count, plan_time.seconds


def _describe(backend: type, layers: list[Any]) -> dict[str, Any]:
    impl = getattr(layers[0], "impl", None)
    kernel = getattr(impl, "kernel_name", None)
    return {
        "layers": len(layers),
        "backend": f"{backend.__module__}.{backend.__qualname__}",
        "impl": f"{type(impl).__module__}.{type(impl).__qualname__}",
        "kernel": None if kernel is None else str(kernel),
        "ours": type(impl).__module__.startswith("magi_serve."),
    }
