"""Prepare the cache volume, then become the command: ``entrypoint.py COMMAND [ARGUMENT ...]``.

Everything that is written while serving goes under one folder, ``CACHE_DIR``: nothing else of the
image needs to be writable but ``/tmp`` and ``/dev/shm``. Kernels compiled when the image was built
are copied there once, entry by entry, so that several containers may share a volume.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

FOLDERS = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "TRITON_CACHE_DIR",
           "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "CUDA_CACHE_PATH")  # fmt: skip
"""Variables whose folders are made where they do not exist."""


def prepare(cache: Path, kernels: Path) -> None:
    """Make the folders, and give Triton's cache the entries of `kernels` that it lacks.

    Raises:
        OSError: `cache` cannot be written.
    """
    for name in FOLDERS:
        Path(os.environ.get(name, cache)).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=cache):  # a folder that exists may still be another user's
        pass
    target = Path(os.environ["TRITON_CACHE_DIR"])
    for entry in sorted(kernels.iterdir()) if kernels.is_dir() else []:
        if (target / entry.name).exists():
            continue
        # Whole entries appear at once: others may be reading.
        with tempfile.TemporaryDirectory(dir=target, prefix=".copy-") as folder:
            copy = Path(folder) / entry.name
            shutil.copytree(entry, copy, copy_function=shutil.copyfile)
            try:
                copy.rename(target / entry.name)
            except OSError:
                if not (target / entry.name).exists():  # else another container was faster
                    raise


def main(command: list[str]) -> None:
    if not command:
        sys.exit("entrypoint: no command; try: magi-serve doctor")
    cache = Path(os.environ["CACHE_DIR"])
    try:
        prepare(cache, Path(os.environ["WARM_KERNELS_DIR"]))
    except OSError as error:
        sys.exit(
            f"entrypoint: user {os.getuid()} (groups {os.getgroups()}) cannot write {cache}, where "
            f"models and compiled kernels are kept: {error}. Mount a volume there that this user "
            "may write: with Docker a named volume, in Kubernetes one with fsGroup"
        )
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"entrypoint: cannot run {command[0]}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
