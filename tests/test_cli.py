"""The command line: fast where nothing heavy is needed, clear where something is missing."""

import subprocess
import sys

import pytest

from magi_serve import __version__, cli


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("word", ["--version", "--help"])
def test_version_and_help_import_neither_torch_nor_vllm(word: str) -> None:
    done = run(
        "import sys\n"
        "from magi_serve.cli import main\n"
        "try:\n"
        f"    main(['{word}'])\n"
        "finally:\n"
        "    heavy = {'torch', 'vllm', 'fastapi', 'pydantic'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    assert done.returncode == 0, done.stderr
    assert __version__ in done.stdout or "doctor" in done.stdout


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert name in said and command.summary in said


@pytest.mark.parametrize("argv", [[], ["sevre"], ["--verison"]])
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert "magi-serve" in capsys.readouterr().err


def test_serve_without_vllm_says_how_to_get_it() -> None:
    done = run(
        "import sys\n"
        "sys.modules['vllm'] = None\n"
        "from magi_serve.cli import main\n"
        "sys.exit(main(['serve', 'some-model']))\n"
    )
    assert done.returncode == 1
    assert "needs vllm, which is not installed" in done.stderr
    assert "magi-serve[cuda]" in done.stderr and "Traceback" not in done.stderr


def test_a_missing_module_of_our_own_is_not_hidden() -> None:
    done = run(
        "import sys\n"
        "sys.modules['magi_serve.types'] = None\n"
        "from magi_serve.cli import main\n"
        "main(['doctor'])\n"
    )
    assert "ModuleNotFoundError" in done.stderr
