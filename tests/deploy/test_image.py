"""What can be known of the image without building it: lint, rules, and its programs as run here.

The entry point runs as it would in a container that is read-only and whose user has no name: in a
mount namespace of its own, where only a volume can be written. That needs root, as CI has.
"""

import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
ENTRYPOINT = DEPLOY / "entrypoint.py"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
USER = "12345"

# Everything but /proc, /sys, /dev and the volume becomes read-only, then the user changes.
CONFINE = """
set -e
mount --make-rprivate /
mount --bind "$VOLUME" "$VOLUME"
for at in $(findmnt --raw --noheadings --output TARGET); do
    case "$at" in
        /proc*|/sys*|/dev*|"$VOLUME") ;;
        *) mount -o remount,bind,ro "$at" 2>/dev/null || true ;;
    esac
done
exec setpriv --reuid "$USER_ID" --regid "$USER_ID" --clear-groups --bounding-set=-all \\
    --no-new-privs "$@"
"""


def instructions() -> list[str]:
    """The Dockerfile's instructions, continued lines joined, without comments."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    return [line for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines() if line]


def stage(name: str) -> list[str]:
    """The instructions of one stage, and before them those of the stages that it is made from."""
    found: list[str] = []
    parent, current = "", ""
    for line in instructions():
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            parent, current = match.groups()
            if current == name:
                found = stage(parent) if "$" not in parent else []
        elif current == name:
            found.append(line)
    assert found, name
    return found


def environment(name: str) -> dict[str, str]:
    lines = [line.removeprefix("ENV ") for line in stage(name) if line.startswith("ENV ")]
    return dict(re.findall(r'(\w+)="?([^"\s]+)"?', " ".join(lines)))


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed: make setup")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["hopper", "blackwell"])
def test_images_run_as_nobody_in_particular_with_one_folder_to_write(name: str) -> None:
    lines = stage(name)
    (user,) = [line for line in lines if line.startswith("USER ")]
    assert re.fullmatch(r"USER [1-9]\d{3,}:0", user)  # a number: Kubernetes cannot check a name
    assert [line for line in lines if line.startswith("VOLUME")] == ["VOLUME /cache"]
    variables = environment(name)
    folders = {k: v for k, v in variables.items() if k.endswith(("_CACHE_DIR", "HOME", "_ROOT"))}
    assert {"HOME", "HF_HOME", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"} <= folders.keys()
    assert all(path.startswith("/cache/") for path in folders.values()), folders
    assert 'ENTRYPOINT ["tini", "--", "python", "/opt/magi-serve/entrypoint.py"]' in lines
    assert "STOPSIGNAL SIGTERM" in lines
    assert any(line.startswith("HEALTHCHECK") and "healthcheck.py" in line for line in lines)
    sbom = "/usr/share/sbom/magi-serve.cdx.json"
    assert any(
        line.startswith("LABEL") and f'magi-serve.sbom.path="{sbom}"' in line for line in lines
    )
    assert any(line.startswith("RUN") and f"sbom.py > {sbom}" in line for line in lines)


def test_each_image_has_the_kernels_of_its_gpus() -> None:
    copied = {name: " ".join(stage(name)) for name in ("hopper", "blackwell")}
    for name, architectures in (("hopper", {"90"}), ("blackwell", {"100", "103"})):
        assert f"COPY --from=kernels-{name} /cache/triton/ /opt/magi-serve/kernels/" in copied[name]
        warmed = " ".join(stage(f"kernels-{name}"))
        assert set(re.findall(r"warm_cache.py (\d+)", warmed)) == architectures
        assert environment(f"kernels-{name}")["TRITON_CACHE_DIR"] == "/cache/triton"
        assert environment(name)["WARM_KERNELS_DIR"] == "/opt/magi-serve/kernels"


def test_no_secret_can_get_into_a_layer() -> None:
    for line in instructions():
        if line.startswith(("ARG ", "ENV ", "LABEL ")):
            assert not re.search(r"key|token|password|secret|credential", line, re.IGNORECASE), line
    secrets = [line for line in instructions() if "type=secret" in line]
    assert secrets and all(line.startswith("RUN --mount") for line in secrets)
    # The build sees nothing but what is copied: not .git, no keys beside the sources.
    rules = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [rule for rule in rules if rule and not rule.startswith("#")]
    assert rules[0] == "*"
    allowed = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    copied = [
        source
        for line in instructions()
        if line.startswith("COPY ") and "--from=" not in line
        for source in line.split()[1:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(Path(source).match(rule) for rule in allowed), source


# --- programs ------------------------------------------------------------------------------------


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A volume as a container gets it: anybody may write."""
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume").chmod(0o1777)
    return tmp_path / "volume"


def variables(volume: Path, kernels: Path | str = "/nonexistent") -> dict[str, str]:
    """The image's environment, with its volume elsewhere."""
    image = {k: v.replace("/cache", str(volume)) for k, v in environment("hopper").items()}
    image["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**image, "WARM_KERNELS_DIR": str(kernels)}


def kernels_in(folder: Path) -> Path:
    for name in ("AAA", "BBB"):
        (folder / name).mkdir(parents=True)
        (folder / name / "kernel.cubin").write_text(name)
    return folder


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user can look into, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def confine() -> list[str]:
    """A command prefix that runs what follows read-only, as a user without a name."""
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", CONFINE, "sh"]
    if os.getuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "findmnt"))):
        pytest.skip("needs root, unshare, setpriv and findmnt to make a namespace")
    probe = {**os.environ, "VOLUME": "/mnt", "USER_ID": USER}
    tried = subprocess.run([*command, "sh", "-c", "! touch /tmp/x 2>/dev/null"], env=probe)
    if tried.returncode:
        pytest.skip("namespaces, or read-only mounts in them, are not allowed here")
    return command


SHOW = """
import getpass, json, os, pathlib, tempfile
def writable(path):
    try:
        tempfile.TemporaryFile(dir=path).close()
        return True
    except OSError:
        return False
volume = os.environ["CACHE_DIR"]
kernels = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
print(json.dumps({
    "user": os.getuid(), "groups": os.getgroups(), "name": getpass.getuser(),
    "volume": writable(volume), "home": writable(os.environ["HOME"]),
    "elsewhere": [path for path in ("/", "/opt", "/usr", "/var", "/tmp") if writable(path)],
    "kernels": {str(p.relative_to(kernels)): p.read_text() for p in kernels.glob("*/*")},
}))
"""


def test_entry_point_runs_read_only_as_a_user_without_a_name(
    confine: list[str], public: Path
) -> None:
    volume, kernels = public / "volume", kernels_in(public / "image")
    volume.mkdir()
    volume.chmod(0o1777)
    env = {**variables(volume, kernels), "VOLUME": str(volume), "USER_ID": USER}
    # The interpreter that everybody can read: a checkout's may lie in somebody's home.
    script = volume / "entrypoint.py"
    shutil.copy(ENTRYPOINT, script)
    python = next(p for p in ("/usr/bin/python3", sys.executable) if Path(p).exists())
    command = [*confine, python, str(script), python, "-c", SHOW]
    for _ in range(2):  # the second time the volume is in use already
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {
            "user": int(USER),
            "groups": [],
            "name": "magi-serve",
            "volume": True,
            "home": True,
            "elsewhere": [],
            "kernels": {"AAA/kernel.cubin": "AAA", "BBB/kernel.cubin": "BBB"},
        }


def test_entry_point_keeps_what_the_volume_has(volume: Path, tmp_path: Path) -> None:
    kernels = kernels_in(tmp_path / "image")
    own = volume / "triton" / "AAA"
    own.mkdir(parents=True)
    (own / "kernel.cubin").write_text("newer")
    env = variables(volume, kernels)
    subprocess.run([sys.executable, ENTRYPOINT, "true"], env=env, check=True)
    found = {p.parent.name: p.read_text() for p in (volume / "triton").glob("*/kernel.cubin")}
    assert found == {"AAA": "newer", "BBB": "BBB"}
    assert not list((volume / "triton").glob(".*"))


def test_entry_point_says_which_user_cannot_write_where(tmp_path: Path) -> None:
    env = variables(tmp_path / "file")
    (tmp_path / "file").write_text("not a folder")
    done = subprocess.run(
        [sys.executable, ENTRYPOINT, "true"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"user {os.getuid()} " in done.stderr and str(tmp_path / "file") in done.stderr
    assert "Traceback" not in done.stderr


WAIT = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
"""
ORPHAN = """
shell = subprocess.run(["sh", "-c", "sleep 0.2 & echo $!"], stdout=subprocess.PIPE, text=True)
orphan = "/proc/" + shell.stdout.strip()
deadline = time.monotonic() + 10
while os.path.exists(orphan) and time.monotonic() < deadline:
    time.sleep(0.05)
collected = not os.path.exists(orphan)
"""


def test_entry_point_becomes_the_command_and_passes_on_its_end(volume: Path) -> None:
    env = variables(volume)
    command = [sys.executable, str(ENTRYPOINT)]
    waits = WAIT + "print('on', flush=True)\nsignal.pause()"
    with subprocess.Popen(
        [*command, sys.executable, "-c", waits], env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGTERM)  # to the one process that there is
        assert process.wait(timeout=10) == 7
    for words, said in (([], "no command"), (["no-such-program"], "cannot run no-such-program")):
        done = subprocess.run([*command, *words], env=env, capture_output=True, text=True)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


def test_pid_1_passes_signals_on_and_collects_orphans(volume: Path) -> None:
    if os.getuid() != 0 or not all(map(shutil.which, ("tini", "unshare"))):
        pytest.skip("needs tini, unshare and root")
    waits = WAIT + ORPHAN + "print(os.getpid(), collected, flush=True)\nsignal.pause()"
    command = ["unshare", "--pid", "--fork", "--mount-proc", "tini", "--"]
    command += [sys.executable, str(ENTRYPOINT), sys.executable, "-c", waits]
    with subprocess.Popen(
        command, env=variables(volume), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "2 True\n"
        (tini,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(tini), signal.SIGTERM)
        assert process.wait(timeout=10) == 7


@pytest.fixture
def server() -> Iterator[tuple[str, list[int]]]:
    """An address, and the status that it answers with."""
    status = [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0] if self.path == "/ready" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}/ready", status
        listening.shutdown()


def test_health_is_what_ready_says(server: tuple[str, list[int]]) -> None:
    url, status = server
    command = [sys.executable, str(DEPLOY / "healthcheck.py")]

    def check(url: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HEALTH_URL": url, "http_proxy": "http://127.0.0.1:9"}
        return subprocess.run(command, env=env, capture_output=True, text=True)

    assert check(url).returncode == 0
    status[0] = 503
    assert check(url).returncode == 1
    assert check("http://127.0.0.1:9/ready").returncode == 1
    assert "Traceback" not in check(url).stderr


def test_the_list_of_contents_names_every_package_once() -> None:
    command = [sys.executable, str(DEPLOY / "sbom.py")]
    bom = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    component = {
        "type": "object",
        "required": ["type", "name", "version", "purl", "bom-ref"],
        "properties": {"purl": {"pattern": r"^pkg:(pypi|deb)/[^\s]+@[^\s]+$"}},
    }
    parts = {"type": "array", "minItems": 1, "items": component}
    fixed = {"bomFormat": {"const": "CycloneDX"}, "specVersion": {"const": "1.6"}}
    jsonschema.validate(
        bom, {"properties": {**fixed, "components": parts}, "required": list(fixed)}
    )
    purls = [entry["purl"] for entry in bom["components"]]
    assert len(purls) == len(set(purls))
    names = {entry["name"] for entry in bom["components"]}
    assert {"magi-serve", "torch", "triton"} <= names
