"""Settings from the environment and from vLLM's additional config, and what is refused."""

from collections.abc import Iterator

import pytest

from magi_serve import settings
from magi_serve.errors import SettingsError
from magi_serve.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MAGI_SERVE_KERNEL", raising=False)
    settings._load.cache_clear()
    yield
    settings._load.cache_clear()


def test_defaults_let_dispatch_choose() -> None:
    assert load_settings() == Settings(kernel="auto")
    assert load_settings().forced_kernel is None


def test_additional_config_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGI_SERVE_KERNEL", "triton")
    assert load_settings().forced_kernel == "triton"
    assert load_settings({"kernel": "cpu"}).forced_kernel == "cpu"


def test_settings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_settings()
    monkeypatch.setenv("MAGI_SERVE_KERNEL", "triton")
    assert load_settings() is first


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().kernel = "cpu"  # type: ignore[misc]


def test_an_unknown_key_of_the_config_is_named_with_the_accepted_ones() -> None:
    with pytest.raises(SettingsError) as error:
        load_settings({"kernle": "cpu"})
    assert str(error.value) == (
        "additional_config['magi_serve']['kernle'] = 'cpu': kernle is not a setting (accepted: "
        "kernel); remove or rename it"
    )


def test_an_unknown_variable_is_named_as_the_environment_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MAGI_SERVE_KERNLE", "cpu")
    with pytest.raises(SettingsError, match=r"MAGI_SERVE_KERNLE = 'cpu': kernle is not a setting"):
        load_settings()


def test_an_unknown_kernel_is_named_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"'hoper' is not accepted: accepts auto, .*reference"):
        load_settings({"kernel": "hoper"})


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(SettingsError, match="expected an object"):
        load_settings("kernel=cpu")  # type: ignore[arg-type]


def test_what_kubernetes_says_about_a_service_of_our_name_is_no_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        "SERVICE_HOST",
        "GPU_SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_HTTP",
        "PORT",
        "PORT_8000_TCP_ADDR",
    ):
        monkeypatch.setenv(f"MAGI_SERVE_{name}", "x")
    assert load_settings() == Settings()
