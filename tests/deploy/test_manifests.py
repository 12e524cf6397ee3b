"""Compose and Kubernetes files: valid by their schemas, locked down, consistent with the code.

`kubectl kustomize` renders the overlays; nothing talks to a cluster. Custom resources are checked
against the small schemas beside this file, which refuse every field that they do not name.
"""

import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from magi_serve import settings
from magi_serve.server import engine

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
OVERLAYS = sorted((DEPLOY / "kubernetes" / "overlays").iterdir())
SCHEMAS = Path(__file__).with_name("schemas")
VERSIONS = ("1.30", "1.37")
"""Of Kubernetes: the oldest that has all that is used (`preStop.sleep`), and the newest known."""

KUSTOMIZE = [shutil.which("kubectl"), "kustomize"]
SERVE_YAML = "/etc/magi-serve/serve.yaml"
NAME = {"app.kubernetes.io/name": "magi-serve"}

Manifest = dict[str, Any]

needs_kubectl = pytest.mark.skipif(
    KUSTOMIZE[0] is None, reason="kubectl, which renders, is missing"
)
overlays = pytest.mark.parametrize("overlay", OVERLAYS, ids=[path.name for path in OVERLAYS])


@functools.cache
def rendered(overlay: Path) -> list[Manifest]:
    """What `overlay` makes of the bases."""
    done = subprocess.run([*KUSTOMIZE, str(overlay)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # warnings
    return list(yaml.safe_load_all(done.stdout))


def of_kind(overlay: Path, kind: str) -> list[Manifest]:
    return [manifest for manifest in rendered(overlay) if manifest["kind"] == kind]


def pod_templates(overlay: Path) -> dict[str, Manifest]:
    """Pod templates by role: ``server``, or ``leader`` and ``worker``."""
    templates = {}
    for manifest in of_kind(overlay, "StatefulSet"):
        templates["server"] = manifest["spec"]["template"]
    for manifest in of_kind(overlay, "LeaderWorkerSet"):
        group = manifest["spec"]["leaderWorkerTemplate"]
        templates |= {"leader": group["leaderTemplate"], "worker": group["workerTemplate"]}
    assert templates
    return templates


def container(template: Manifest) -> Manifest:
    (found,) = template["spec"]["containers"]
    return found  # type: ignore[no-any-return]


def compose() -> Manifest:
    service: Manifest = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return service["magi-serve"]  # type: ignore[no-any-return]


def option(words: list[str], name: str) -> str | None:
    """The value of ``--name=value``."""
    return next((w.partition("=")[2] for w in words if w.startswith(f"--{name}=")), None)


def kubernetes_kinds(manifest: Manifest) -> Iterator[Manifest]:
    """`manifest` if its kind is Kubernetes' own, else what Kubernetes knows of its parts."""
    kind, spec = manifest["kind"], manifest.get("spec", {})
    if kind == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        for name in ("leaderTemplate", "workerTemplate"):
            yield {"apiVersion": "v1", "kind": "PodTemplate", "template": group[name]}
        for claim in group["volumeClaimTemplates"]:
            yield {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim}
    elif kind == "ScaledObject":
        config = spec["advanced"]["horizontalPodAutoscalerConfig"]
        target = {"scaleTargetRef": spec["scaleTargetRef"], "maxReplicas": spec["maxReplicaCount"]}
        scaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler"}
        yield {**scaler, "spec": {**target, **config}}
    elif kind != "ServiceMonitor":
        yield manifest


@pytest.mark.parametrize("version", VERSIONS)
@needs_kubectl
@overlays
def test_kubernetes_own_kinds_fit_its_schemas(overlay: Path, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in rendered(overlay):
        for known in kubernetes_kinds(manifest):
            assert kubernetes_validate.validate(known, version, strict=True) == version


@needs_kubectl
def test_the_schemas_refuse_a_misspelt_field() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in (m for overlay in OVERLAYS for m in rendered(overlay)):
        spoilt = json.loads(json.dumps(manifest))
        if "spec" not in spoilt:
            continue
        spoilt["spec"]["mispelt"] = 1
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            if (own := SCHEMAS / f"{manifest['kind'].lower()}.json").exists():
                jsonschema.validate(spoilt, json.loads(own.read_text()))
            else:
                kubernetes_validate.validate(spoilt, VERSIONS[-1], strict=True)


@needs_kubectl
@overlays
def test_custom_resources_fit_our_schemas(overlay: Path) -> None:
    checked = set()
    for manifest in rendered(overlay):
        if "." in manifest["apiVersion"].removesuffix(".k8s.io/v1").partition("/")[0]:
            schema = json.loads((SCHEMAS / f"{manifest['kind'].lower()}.json").read_text())
            jsonschema.validate(manifest, schema)
            checked.add(manifest["kind"])
    assert checked >= {"ServiceMonitor", "ScaledObject"}


def test_compose_fits_its_specification() -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*command, str(DEPLOY / "compose.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@needs_kubectl
@overlays
def test_pods_are_locked_down(overlay: Path) -> None:
    for template in pod_templates(overlay).values():
        spec, box = template["spec"], container(template)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] >= 10000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False  # they would be MAGI_SERVE_... variables
        assert box["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        mounts = {mount["mountPath"]: mount for mount in box["volumeMounts"]}
        assert {path for path, mount in mounts.items() if not mount.get("readOnly")} == {
            "/cache",
            "/tmp",
            "/dev/shm",
        }
        assert not any("hostPath" in volume for volume in spec["volumes"])


def test_compose_is_locked_down() -> None:
    service = compose()
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "network_mode", "pid", "cap_add"} & set(service)
    assert service["ports"] == ["${ADDRESS:-127.0.0.1}:${PORT:-8000}:8000"]


@needs_kubectl
@overlays
def test_secrets_come_from_secrets(overlay: Path) -> None:
    for role, template in pod_templates(overlay).items():
        box, volumes = container(template), template["spec"]["volumes"]
        for entry in box["env"]:
            assert "secretKeyRef" in entry.get("valueFrom", {}) or "TOKEN" not in entry["name"]
        given = {entry["name"]: entry.get("value") for entry in box["env"]}
        secrets = [volume["secret"] for volume in volumes if "secret" in volume]
        if role == "worker":  # it speaks no HTTP
            assert "MAGI_SERVE_API_KEY_FILE" not in given and not secrets
            continue
        # Not optional: without keys no pod starts, rather than one that serves everybody.
        (secret,) = secrets
        assert not secret.get("optional")
        (mount,) = [m for m in box["volumeMounts"] if m["name"] == "keys"]
        (item,) = secret["items"]
        assert given["MAGI_SERVE_API_KEY_FILE"] == f"{mount['mountPath']}/{item['path']}"
    assert not of_kind(overlay, "Secret")


@needs_kubectl
def test_variables_are_settings_that_exist() -> None:
    fields = {*settings.Settings.model_fields, *settings.ServiceSettings.model_fields}
    boxes = [container(t) for overlay in OVERLAYS for t in pod_templates(overlay).values()]
    given = {entry["name"] for box in boxes for entry in box["env"]} | {*compose()["environment"]}
    ours = {name for name in given if name.startswith(settings.ENV_PREFIX)}
    assert ours == {"MAGI_SERVE_API_KEY", "MAGI_SERVE_API_KEY_FILE"}
    assert {name.removeprefix(settings.ENV_PREFIX).lower() for name in ours} <= fields


@needs_kubectl
@overlays
def test_selectors_meet_the_pods_that_they_are_for(overlay: Path) -> None:
    labels = {role: t["metadata"]["labels"] for role, t in pod_templates(overlay).items()}
    leaders = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}  # its controller labels pods so
    (service,) = of_kind(overlay, "Service")
    assert service["spec"]["selector"] == (NAME if "server" in labels else {**NAME, **leaders})
    assert all(found.items() >= NAME.items() for found in labels.values())
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        for manifest in of_kind(overlay, kind):
            assert manifest["spec"][field] == {"matchLabels": NAME}
    (monitor,) = of_kind(overlay, "ServiceMonitor")
    assert service["metadata"]["labels"].items() >= NAME.items()
    assert monitor["spec"]["selector"] == {"matchLabels": NAME}
    ports = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
    server = labels.keys() & {"server", "leader"}
    (box,) = [container(pod_templates(overlay)[role]) for role in server]
    assert ports[monitor["spec"]["endpoints"][0]["port"]] in {p["name"] for p in box["ports"]}
    (scaler,) = of_kind(overlay, "ScaledObject")
    target = scaler["spec"]["scaleTargetRef"]
    (workload,) = of_kind(overlay, target["kind"])
    assert (workload["apiVersion"], workload["metadata"]["name"]) == (
        target["apiVersion"],
        target["name"],
    )
    # LeaderWorkerSet's controller makes a headless Service of its own name, unless there is one.
    assert not of_kind(overlay, "LeaderWorkerSet") or target["name"] != service["metadata"]["name"]


@needs_kubectl
@overlays
def test_policies_let_dns_and_clients_through_and_keep_the_rest_out(overlay: Path) -> None:
    policies = {m["metadata"]["name"]: m["spec"] for m in of_kind(overlay, "NetworkPolicy")}
    policy = policies.pop("magi-serve")
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (ingress,) = policy["ingress"]
    assert ingress["ports"] == [{"port": "http", "protocol": "TCP"}]
    client = {"matchLabels": {"magi-serve/client": "true"}}
    assert ingress["from"] == [{"podSelector": client}, {"namespaceSelector": client}]
    dns, https = policy["egress"]
    kube_dns = {"matchLabels": {"k8s-app": "kube-dns"}}
    assert dns["to"] == [{"namespaceSelector": {}, "podSelector": kube_dns}]
    assert https["ports"] == [{"port": 443, "protocol": "TCP"}]
    if "leader" in pod_templates(overlay):  # within a group every port is open, to the group
        peers = [{"podSelector": {"matchLabels": NAME}}]
        group = policies.pop("magi-serve-group")
        assert (group["ingress"], group["egress"]) == ([{"from": peers}], [{"to": peers}])
    assert not policies


@needs_kubectl
@overlays
def test_references_are_to_what_is_there(overlay: Path) -> None:
    known = {(m["kind"], m["metadata"]["name"]) for m in rendered(overlay)}
    for template in pod_templates(overlay).values():
        spec, box = template["spec"], container(template)
        assert ("ServiceAccount", spec["serviceAccountName"]) in known
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert ("ConfigMap", volumes["config"]["configMap"]["name"]) in known
        mounted = {mount["name"] for mount in box["volumeMounts"]}
        assert mounted == volumes.keys() | {"cache"}
        assert box["image"] in {"magi-serve:hopper", "magi-serve:blackwell"}


def grace_needed(words: list[str]) -> float:
    """Seconds from SIGTERM to the end: draining, last words to clients, the engine's end."""
    lifecycle = pytest.importorskip("magi_serve.server.lifecycle")
    timeout = option(words, "shutdown-timeout")
    drain = float(lifecycle.SHUTDOWN_TIMEOUT_S if timeout is None else timeout)
    return drain + lifecycle.FINAL_EVENTS_S + lifecycle.ENGINE_STOP_S


@needs_kubectl
@overlays
def test_pods_have_the_time_to_drain(overlay: Path) -> None:
    templates = pod_templates(overlay)
    for role, template in templates.items():
        pre_stop = container(template)["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace = template["spec"]["terminationGracePeriodSeconds"]
        if role == "worker":  # the leader cannot drain without it
            leader = container(templates["leader"])
            leader_pre_stop = leader["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert leader_pre_stop + grace_needed(leader["args"]) <= pre_stop < grace
        else:
            assert pre_stop + grace_needed(container(template)["args"]) + 10 <= grace


def test_compose_leaves_the_time_to_drain() -> None:
    grace = compose()["stop_grace_period"]
    assert float(grace.removesuffix("s")) >= grace_needed(compose()["command"]) + 10


@needs_kubectl
@overlays
def test_one_pod_may_always_be_evicted(overlay: Path) -> None:
    (budget,) = of_kind(overlay, "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert "minAvailable" not in budget["spec"]


@needs_kubectl
@overlays
def test_probes_ask_routes_that_exist(overlay: Path) -> None:
    pytest.importorskip("magi_serve.server.lifecycle")  # came with /startup
    from magi_serve.server.routes import status

    paths = {route.path for route in status.router.routes}  # type: ignore[attr-defined]
    for role, template in pod_templates(overlay).items():
        probes = {kind: container(template).get(f"{kind}Probe") for kind in ("liveness", "startup")}
        probes["readiness"] = container(template).get("readinessProbe")
        if role == "worker":
            assert set(probes.values()) == {None}
            continue
        wanted = {kind: probe["httpGet"]["path"] for kind, probe in probes.items()}
        assert wanted == {"liveness": "/live", "startup": "/startup", "readiness": "/ready"}
        assert set(wanted.values()) <= paths
        # Half an hour is what a large model may take; 1 s would be too short for a busy host.
        startup = probes["startup"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
        assert all(probe["timeoutSeconds"] >= 5 for probe in probes.values())


PARSE = """
import json, sys
from magi_serve.server import engine

said = {}
for name, words in json.loads(sys.argv[1]).items():
    if words[0] == "magi-serve":
        args = engine.parse_args(words[2:])
    else:  # a worker's, by the parser of `vllm serve`
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        parser = FlexibleArgumentParser()
        commands = parser.add_subparsers(dest="subparser")
        engine.vllm_server("make_arg_parser")(commands.add_parser("serve"))
        args = parser.parse_args(words[1:])
    names = ("model", "headless", "nnodes", "node_rank", "master_addr", "tensor_parallel_size",
             "pipeline_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
             "host", "port", "worker_extension_cls")
    said[name] = {name: getattr(args, name) for name in names}
    said[name]["backend"] = engine.chosen_backend(args)
open(sys.argv[2], "w").write(json.dumps(said))
"""


@pytest.fixture(scope="session", autouse=True)
def parsing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Any] | None]:
    """vLLM's own parser over every command, in a process that works while other tests run."""
    if KUSTOMIZE[0] is None or importlib.util.find_spec("vllm") is None:
        yield None
        return
    group = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "leader.group"}
    lines = {}
    for overlay in OVERLAYS:
        for role, template in pod_templates(overlay).items():
            known = {**group, "LWS_WORKER_INDEX": "1" if role == "worker" else "0"}
            lines[f"{overlay.name} {role}"] = [
                re.sub(r"\$\((\w+)\)", lambda found, known=known: known[found[1]], word).replace(
                    SERVE_YAML, str(overlay / "serve.yaml")
                )
                for word in container(template)["args"]
            ]
    words = compose()["command"]
    lines["compose"] = [w.replace(SERVE_YAML, str(OVERLAYS[0] / "serve.yaml")) for w in words]
    file = tmp_path_factory.mktemp("parsed") / "said.json"
    command = [sys.executable, "-c", PARSE, json.dumps(lines), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:

        def result() -> Any:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output[-3000:]
            return json.loads(file.read_text())

        yield result
        process.kill()


@needs_kubectl
@overlays
def test_the_model_is_spread_over_all_gpus_and_its_kernels_are_compiled_ahead(
    overlay: Path,
) -> None:
    values = yaml.safe_load((overlay / "serve.yaml").read_text())
    tensor = values.get("tensor-parallel-size", 1)
    templates = pod_templates(overlay)
    gpus = [int(container(t)["resources"]["limits"]["nvidia.com/gpu"]) for t in templates.values()]
    assert gpus == [tensor] * values.get("pipeline-parallel-size", 1)
    for manifest in of_kind(overlay, "LeaderWorkerSet"):
        assert manifest["spec"]["leaderWorkerTemplate"]["size"] == len(gpus)
    shapes = json.loads((DEPLOY / "shapes.json").read_text())
    assert (values["model"], tensor) in {(s["model"], s["tensor_parallel_size"]) for s in shapes}
    # The limits that deploy/warm_cache.py takes by default.
    assert (values["max-num-seqs"], values["max-num-batched-tokens"]) == (256, 8192)


@needs_kubectl
@overlays
def test_scaling_asks_for_metrics_that_vllm_has(overlay: Path) -> None:
    (scaler,) = of_kind(overlay, "ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in scaler["spec"]["triggers"]]
    named = {name for query in queries for name in re.findall(r"vllm:\w+", query)}
    assert named == {"vllm:num_requests_waiting", "vllm:num_requests_running"}
    if (vllm := importlib.util.find_spec("vllm")) is not None:
        (folder,) = vllm.submodule_search_locations or ()
        source = (Path(folder) / "v1/metrics/loggers.py").read_text()
        assert all(f'"{name}"' in source for name in named)


@pytest.mark.vllm
@needs_kubectl
def test_vllm_takes_every_command_and_the_values_in_it(parsing: Callable[[], Any]) -> None:
    parsed: dict[str, dict[str, Any]] = parsing()
    for name, args in parsed.items():
        overlay = (
            OVERLAYS[0] if name == "compose" else DEPLOY / "kubernetes/overlays" / name.split()[0]
        )
        values = yaml.safe_load((overlay / "serve.yaml").read_text())
        assert {key: args[key.replace("-", "_")] for key in values} == values
        assert args["backend"] == engine.OUR_BACKEND
        assert args["worker_extension_cls"] == engine.WORKER_EXTENSION
        if "worker" not in name:
            assert (args["host"], args["port"], args["headless"]) == ("0.0.0.0", 8000, False)
    leader, worker = parsed["2x8xh200 leader"], parsed["2x8xh200 worker"]
    assert worker["headless"] is True
    assert (leader["node_rank"], worker["node_rank"]) == (0, 1)
    assert leader["nnodes"] == worker["nnodes"] == 2
    assert leader["master_addr"] == worker["master_addr"] == "leader.group"
