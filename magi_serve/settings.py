"""Settings of the serving parts: variables ``MAGI_SERVE_*`` and vLLM's ``--additional-config``.

Read once, when a process first asks for an engine's settings, and passed down from there. The
kernels never see them.
"""

import functools
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from magi_serve.errors import SettingsError

ENV_PREFIX = "MAGI_SERVE_"
CONFIG_KEY = "magi_serve"

# Kubernetes gives pods such variables for a service called "magi-serve" or "magi-serve-...".
_KUBERNETES = re.compile(
    r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?)"
)


class Settings(BaseModel):
    """Every setting, with its default; frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str = Field(
        "auto",
        description="attention kernel: 'auto' lets dispatch take the fastest one that can do the "
        "problem, a name forces that kernel and fails with reasons where it cannot",
    )

    @field_validator("kernel")
    @classmethod
    def _known_kernel(cls, value: str) -> str:
        # Here and not above: the names live in the kernels, a layer above this one.
        from magi_serve.kernels.capabilities import KERNEL_NAMES

        accepted = ("auto", *KERNEL_NAMES)
        if value not in accepted:
            raise ValueError(f"accepts {', '.join(accepted)}")
        return value

    @property
    def forced_kernel(self) -> str | None:
        """The kernel to force, None to let dispatch choose."""
        return None if self.kernel == "auto" else self.kernel


def load_settings(config: Mapping[str, Any] | None = None) -> Settings:
    """The settings of this process.

    Args:
        config: what ``--additional-config`` holds under ``magi_serve``; wins over the environment.

    Raises:
        SettingsError: a key is unknown or a value is not accepted, in either place.
    """
    if config is not None and not isinstance(config, Mapping):
        raise SettingsError(
            f"additional_config[{CONFIG_KEY!r}] = {config!r} is not accepted; expected an object, "
            "as in "
            f'--additional-config \'{{"{CONFIG_KEY}": {{"kernel": "auto"}}}}\''
        )
    return _load(json.dumps(dict(config or {}), sort_keys=True, default=str))


@functools.cache
def _load(config_json: str) -> Settings:
    from_env = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in os.environ.items()
        if name.startswith(ENV_PREFIX) and not _KUBERNETES.fullmatch(name.removeprefix(ENV_PREFIX))
    }
    from_config = json.loads(config_json)
    try:
        return Settings(**{**from_env, **from_config})
    except ValidationError as error:
        problems = [
            _explain(e["type"], str(e["loc"][0]), e["input"], e["msg"], from_config)
            for e in error.errors()
        ]
        raise SettingsError("; ".join(problems)) from None


def _explain(kind: str, key: str, value: Any, message: str, from_config: Mapping[str, Any]) -> str:
    where = (
        f"additional_config[{CONFIG_KEY!r}][{key!r}]"
        if key in from_config
        else ENV_PREFIX + key.upper()
    )
    if kind == "extra_forbidden":
        known = ", ".join(Settings.model_fields)
        return (
            f"{where} = {value!r}: {key} is not a setting (accepted: {known}); remove or rename it"
        )
    reason = message.removeprefix("Value error, ")
    return (
        f"{where} = {value!r} is not accepted: {reason}; correct it or leave it out for the default"
    )
