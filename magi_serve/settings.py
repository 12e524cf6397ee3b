"""Settings of the serving parts: variables ``MAGI_SERVE_*`` and vLLM's ``--additional-config``.

Read once, when a process first asks for an engine's settings, and passed down from there. The
kernels never see them; they are only told which file of tuned tiles counts. The engine's processes
have `Settings`; `ServiceSettings` are for the process that speaks HTTP only, so that a key never
reaches an engine's configuration or its log.
"""

import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from magi_serve.errors import SettingsError

logger = logging.getLogger(__name__)

ENV_PREFIX = "MAGI_SERVE_"
CONFIG_KEY = "magi_serve"

# Kubernetes gives pods such variables for a service called "magi-serve" or "magi-serve-...".
_KUBERNETES = re.compile(
    r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?)"
)


class Settings(BaseModel):
    """Every setting of an engine, with its default; frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str = Field(
        "auto",
        description="attention kernel: 'auto' lets dispatch take the fastest one that can do the "
        "problem, a name forces that kernel and fails with reasons where it cannot",
    )
    tuned: Path | None = Field(
        None,
        description="file of tuned tiles that counts before the package's own, as `magi-serve "
        "tune --out FILE` writes",
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

    @field_validator("tuned")
    @classmethod
    def _readable_tiles(cls, value: Path | None) -> Path | None:
        if value is not None:
            from magi_serve.kernels.ffa.tuned_files import read

            read(value)
        return value

    @property
    def forced_kernel(self) -> str | None:
        """The kernel to force, None to let dispatch choose."""
        return None if self.kernel == "auto" else self.kernel


class ServiceSettings(BaseModel):
    """Every setting of the HTTP service, with its default; frozen.

    Each field is an option of ``magi-serve serve`` too, which wins; only ``api_key`` is not, for
    vLLM has an option of that name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    api_key: SecretStr | None = Field(
        None, description="a key that clients must send, beside those of --api-key", min_length=1
    )
    api_key_file: Path | None = Field(
        None,
        description="file of keys that clients must send one of, read again when it changes; a "
        "line is KEY [name=NAME] [priority=N] [max-requests=N]",
    )
    max_body_bytes: int = Field(
        32 * 2**20, ge=1, description="bytes that the body of a request may have"
    )
    max_json_depth: int = Field(
        64, ge=1, le=200, description="levels that arrays and objects of a body may be nested"
    )
    max_sequences: int = Field(
        256, ge=1, description="sequences that a request may ask for: its prompts times n"
    )
    max_stop: int = Field(
        64, ge=0, description="stop strings, stop tokens or bad words that a request may give"
    )
    max_logit_bias: int = Field(
        1024, ge=0, description="tokens that a request may bias, or allow and no others"
    )
    max_prompt_logprobs: int = Field(
        1_000_000,
        ge=0,
        description="logprobs of its prompt that a request may ask for: its tokens times the "
        "logprobs of each",
    )
    max_requests: int = Field(
        1024, ge=1, description="requests that may be open at a time; more are answered 429"
    )
    max_requests_per_key: int = Field(
        512, ge=1, description="requests that may be open at a time with the same key"
    )
    long_prompt_tokens: int = Field(
        8192, ge=1, description="tokens from which on a prompt is long, and waits for its turn"
    )
    max_long_prefills: int = Field(
        2, ge=1, description="long prompts that are read (prefilled) at a time; more are queued"
    )
    max_long_prefill_tokens: int = Field(
        0,
        ge=0,
        description="tokens of all long prompts that are read at a time; 0 is what the KV cache "
        "holds; a prompt that is alone is always read",
    )
    max_queue: int = Field(
        64, ge=0, description="long prompts that may wait; more are answered 429"
    )


def load_service_settings(options: Mapping[str, Any]) -> ServiceSettings:
    """The settings of the HTTP service.

    Args:
        options: what the command line says, by field; wins over the environment.

    Raises:
        SettingsError: a value is not accepted, in either place; the message never has a key in it.
    """
    from_env = {
        key: value for key, value in _variables().items() if key in ServiceSettings.model_fields
    }
    try:
        return ServiceSettings(**{**from_env, **options})
    except ValidationError as error:
        problems = []
        for e in error.errors():
            key = str(e["loc"][0])
            where = "--" + key.replace("_", "-") if key in options else ENV_PREFIX + key.upper()
            value = "" if key == "api_key" else f" = {e['input']!r}"
            problems.append(
                f"{where}{value} is not accepted: {e['msg']}; correct it or leave it out for the "
                "default"
            )
        raise SettingsError("; ".join(problems)) from None


def _variables() -> dict[str, str]:
    return {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in os.environ.items()
        if name.startswith(ENV_PREFIX) and not _KUBERNETES.fullmatch(name.removeprefix(ENV_PREFIX))
    }


def load_settings(config: Mapping[str, Any] | None = None) -> Settings:
    """The settings of this process; the file `tuned`, if any, counts in it from here on.

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
        key: value for key, value in _variables().items() if key not in ServiceSettings.model_fields
    }
    from_config = json.loads(config_json)
    try:
        settings = Settings(**{**from_env, **from_config})
    except ValidationError as error:
        problems = [
            _explain(e["type"], str(e["loc"][0]), e["input"], e["msg"], from_config)
            for e in error.errors()
        ]
        raise SettingsError("; ".join(problems)) from None
    if settings.tuned is not None:
        from magi_serve.kernels.ffa import tuned_files, tuning

        tuning.use(tuned_files.read(settings.tuned))
        logger.info("tuned tiles of %s count before the package's own", settings.tuned)
    return settings


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
