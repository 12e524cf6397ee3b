"""Settings from the environment and from vLLM's additional config, and what is refused."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from magi_serve import settings
from magi_serve.errors import SettingsError
from magi_serve.kernels.ffa import tuning
from magi_serve.kernels.ffa.tuned_files import RowName, Tuned
from magi_serve.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MAGI_SERVE_KERNEL", raising=False)
    settings._load.cache_clear()
    yield
    settings._load.cache_clear()
    tuning.use(None)


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
        "kernel, tuned); remove or rename it"
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


def test_a_file_of_tuned_tiles_counts_before_the_packages_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def block_n() -> int | float:
        row = tuning.lookup("triton", ["decode"], bits=16, dim=128, arch=90, gpu=None)
        assert row is not None
        return row["block_n"]

    numbers = {"block_n": 16, "num_warps": 4, "num_stages": 2, "programs_per_sm": 2}
    tuned = Tuned("", arch=90, made_by=({"how": "by hand"},), rows={})
    path = tmp_path / "mine.json"
    path.write_text(tuned.with_row(RowName("triton", "decode", 16, 128), numbers).dumps())
    load_settings()
    assert block_n() != 16
    monkeypatch.setenv("MAGI_SERVE_TUNED", str(path))
    settings._load.cache_clear()
    with caplog.at_level(logging.INFO, logger="magi_serve.settings"):
        assert load_settings().tuned == path
    assert block_n() == 16 and str(path) in caplog.text


def test_a_file_of_tuned_tiles_that_is_missing_or_bad_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.json"
    monkeypatch.setenv("MAGI_SERVE_TUNED", str(path))
    with pytest.raises(SettingsError) as error:
        load_settings()
    assert f"MAGI_SERVE_TUNED = '{path}' is not accepted: {path} cannot be read" in str(error.value)
    path.write_text('{"made_by": [{}], "tiles": {"cuda": {}}}')
    with pytest.raises(SettingsError, match=r"mine.json: tiles has 'cuda', which is unknown"):
        load_settings()
    with pytest.raises(SettingsError, match=r"additional_config\['magi_serve'\]\['tuned'\] = "):
        load_settings({"tuned": str(path)})


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
