"""The vLLM plugin: makes ``--attention-backend CUSTOM`` mean our backend, in every process.

A process that does not select CUSTOM behaves as without us: all we add is an entry in vLLM's
registry, a pass-through around the platform's choice of backend, and two methods of the engine
core that nothing calls but our service.
"""

import logging
from typing import Any

from magi_serve.backends.vllm import engine_state, progress
from magi_serve.errors import PluginError

logger = logging.getLogger(__name__)

BACKEND = "magi_serve.backends.vllm.backend.MagiAttentionBackend"


def register() -> None:
    """Entry point of ``vllm.general_plugins``; runs in every process, any number of times."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        register_backend(custom, BACKEND)
    elif custom.get_path() != BACKEND:
        # Not raised here: vLLM would not start, though this process may never select CUSTOM.
        logger.warning("%s", _clash(custom.get_path()))
    _guard_selection(type(current_platform), custom)
    progress.add_method()
    engine_state.add_method()


def _clash(holder: str) -> str:
    return (
        f"two plugins claim the attention backend CUSTOM: {holder} holds it, and magi-serve would "
        f"register {BACKEND}; name the plugins to load in VLLM_PLUGINS (ours is magi_serve), or "
        "uninstall one"
    )


def _guard_selection(platform: Any, custom: Any) -> None:
    """Wrap the platform's choice of backend: refuse CUSTOM with reasons, make it count on the CPU.

    vLLM's CPU platform ignores CUSTOM silently, and any platform would run another plugin's class
    if that plugin came after us.
    """
    stock = platform.get_attn_backend_cls
    if getattr(stock, "guarded_by_magi_serve", False):
        return

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        if selected_backend is not custom:
            return str(stock(selected_backend, attn_selector_config, *args, **kwargs))
        _check(cls, custom, attn_selector_config)
        if cls.device_type == "cpu":
            return BACKEND
        return str(stock(selected_backend, attn_selector_config, *args, **kwargs))

    get_attn_backend_cls.guarded_by_magi_serve = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def _check(platform: Any, custom: Any, attn_selector_config: Any) -> None:
    from magi_serve.backends.vllm.compat import WAY_OUT, show_our_logs

    show_our_logs()
    holder = custom.get_path()
    if holder != BACKEND:
        raise PluginError(_clash(holder))
    reasons = custom.get_class().validate_configuration(
        device_capability=platform.get_device_capability(), **attn_selector_config._asdict()
    )
    if reasons:
        raise PluginError(
            "magi-serve (attention backend CUSTOM) cannot serve this model: "
            f"{'; '.join(reasons)}; {WAY_OUT}"
        )
