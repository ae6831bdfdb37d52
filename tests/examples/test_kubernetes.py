"""The manifests of ``examples/kubernetes``, judged by Kubernetes' own schemas and Kubeflow's own models.

No pod was ever scheduled by these tests. A field that is not known is an error, and each test misspells one to show it.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli import in_kubernetes
from tests.cli.test_torchrun import options_of_run

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
VERSION = "1.37"
Document = dict[str, Any]


def documents() -> list[Document]:
    return [each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]


def of(*kinds: str) -> list[Document]:
    return [each for each in documents() if each["kind"] in kinds]


def job_of(replicated: Document) -> Document:
    """A replicated job of a JobSet as the Job that it makes."""
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **replicated["template"]}
    return {**job, "metadata": {"name": "job", **job["metadata"]}}


def kubernetes_own() -> list[Document]:
    """What Kubernetes itself knows, and the Jobs that JobSet makes of the others."""
    own = of("Service", "PodDisruptionBudget", "StatefulSet", "PersistentVolumeClaim")
    jobs = [job for each in of("JobSet") for job in each["spec"]["replicatedJobs"]]
    jobs += [job for each in of("TrainingRuntime") for job in each["spec"]["template"]["spec"]["replicatedJobs"]]
    return own + [job_of(job) for job in jobs]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all fields."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        if isinstance(value, dict):
            yield (*path, name)
        yield from leaves(inner, (*path, name))


def misspelt(document: Document, path: tuple[Any, ...]) -> Document:
    """The same with one field's name misspelt."""
    changed = copy.deepcopy(document)
    holder: Any = changed
    for name in path[:-1]:
        holder = holder[name]
    holder[path[-1] + "x"] = holder.pop(path[-1])
    return changed


FREE = {"labels", "selector", "requests", "limits"}  # whose fields are the user's


def assert_misspellings_are_found(document: Document, finds: Callable[[Document], bool]) -> None:
    """The controls: one of every few fields. All of them would take a minute."""
    fields = [path for path in leaves(document) if path[0] == "spec" and not FREE & set(path[:-1])]
    for path in {fields[0], fields[-1], *fields[:: len(fields) // 4 + 1]}:
        assert finds(misspelt(document, path)), path


@pytest.mark.parametrize("document", kubernetes_own(), ids=lambda document: document["kind"])
def test_kubernetes_knows_every_field(document: Document) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")

    def is_refused(changed: Document) -> bool:
        try:
            validator.validate(changed, VERSION, strict=True)
        except validator.ValidationError:
            return True
        return False

    assert not is_refused(document)
    assert_misspellings_are_found(document, is_refused)


@pytest.mark.parametrize("document", of("JobSet", "TrainJob", "TrainingRuntime"), ids=lambda document: document["kind"])
def test_kubeflow_knows_every_field(document: Document) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    name = {"JobSet": "JobsetV1alpha2JobSet"}.get(document["kind"], f"TrainerV1alpha1{document['kind']}")

    def is_refused(changed: Document) -> bool:
        try:
            made = getattr(models, name).from_dict(copy.deepcopy(changed))
        except ValueError:
            return True
        return bool(made.to_dict() != changed)  # it drops silently what it does not know

    assert not is_refused(document)
    assert_misspellings_are_found(document, is_refused)


def containers() -> list[Document]:
    pods = [each["spec"]["template"]["spec"] for each in kubernetes_own() if "template" in each["spec"]]
    return [pod | pod["containers"][0] for pod in pods]


def test_commands_grace_and_probes_fit_together() -> None:
    options = options_of_run()
    assert len(containers()) == 3
    for pod in containers():
        words = [*pod["command"], *pod.get("args", [])]
        assert words[:2] == ["holdfast", "run"], shlex.join(words)
        assert [word for word in words if word.startswith("-") and word not in options] == []
        given = {entry["name"]: entry.get("value", "") for entry in pod["env"]}
        assert float(given["HOLDFAST_GRACE"]) < pod["terminationGracePeriodSeconds"]
        port = given["HOLDFAST_HEALTH"].rpartition(":")[2]
        assert {"name": "health", "containerPort": int(port), "protocol": "TCP"} in pod["ports"]
        paths = [pod[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")]
        assert paths == ["/healthz", "/readyz"]
    (service,) = of("Service")
    assert service["spec"]["ports"][0]["port"] == in_kubernetes.PORT
    assert service["spec"]["publishNotReadyAddresses"]
