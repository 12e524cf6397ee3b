"""The error tree: one root, and mistakes in arguments are ValueErrors too."""

import inspect

import pytest

from magi_serve import errors


def test_everything_raised_on_purpose_has_one_root() -> None:
    classes = [
        c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)
    ]
    assert len(classes) >= 8
    assert all(issubclass(c, errors.MagiServeError) for c in classes)


@pytest.mark.parametrize("name", ["ShapeError", "DTypeError", "DeviceError", "NoKernelError"])
def test_mistakes_in_arguments_are_value_errors(name: str) -> None:
    assert issubclass(getattr(errors, name), (errors.ArgumentError, ValueError))


def test_no_kernel_errors_carry_the_reasons_by_kernel() -> None:
    error = errors.NoKernelError("none", {"cpu": ["a", "b"]})
    assert str(error) == "none"
    assert error.reasons == {"cpu": ["a", "b"]}
