"""The manifests of tutorials/kubernetes: they are valid, and workers with the environment that they give form a group.

A pod is a network namespace here, with its own hosts file, host name and mounts, and an address that no other pod has.
"""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from network_hosts import REASON, Hosts
from waiting import eventually

FOLDER = Path(__file__).resolve().parents[2] / "tutorials" / "kubernetes"
TUTORIAL = FOLDER.parent / "parameter_server.py"
LIMIT_S = 100


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def job_of(name):
    """The Job in a manifest; that of a JobSet's replicated Job."""
    found = next(each for each in documents(name) if each["kind"] in ("Job", "JobSet"))
    if found["kind"] == "Job":
        return found
    (replicated,) = found["spec"]["replicatedJobs"]
    metadata = {"name": f"{found['metadata']['name']}-{replicated['name']}-0"}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, **replicated["template"]}


def container_of(job):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def variables_of(container):
    return {each["name"]: each["value"] for each in container["env"]}


@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None,
    reason="the official schemas are not installed (pip install kubernetes-validate)",
)
@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
def test_manifests_agree_with_the_official_schemas(name):
    import kubernetes_validate

    # A JobSet is no part of Kubernetes: the schema covers the Job in it.
    checked = [each for each in documents(name) if each["kind"] != "JobSet"] + [job_of(name)]
    for each in checked:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    broken = job_of(name)
    broken["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
def test_names_ports_and_numbers_of_a_manifest_agree(name):
    job, variables = job_of(name), variables_of(container_of(job_of(name)))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and pod["restartPolicy"] == "Never"
    assert int(variables["WORLD_SIZE"]) == spec["completions"] == spec["parallelism"]
    ports = {str(each["containerPort"]) for each in container_of(job)["ports"]}
    assert {variables["MASTER_PORT"], variables["TORCHRPC_PORT"]} == ports
    mounts = {each["name"]: each["mountPath"] for each in container_of(job)["volumeMounts"]}
    assert str(Path(variables["TORCHRPC_SECRET_FILE"]).parent) == mounts["secret"]
    assert {each["name"] for each in pod["volumes"]} == set(mounts)
    if name == "job.yaml":
        (service,) = (each for each in documents(name) if each["kind"] == "Service")
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
        domain = service["metadata"]["name"]
        assert pod["subdomain"] == domain
    else:
        (jobset,) = documents(name)
        domain = jobset["spec"]["network"]["subdomain"]
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{domain}"


# --- Workers with that environment ---


class Cluster:
    """Starts pods of job.yaml; `publish` and `withdraw` are its DNS."""

    def __init__(self, folder, pods):
        self.folder, self.hosts = folder, Hosts(pods)
        self.job = job_of("job.yaml")
        self.container = container_of(self.job)
        self.names = {}  # {address: name}
        self.own_names = {}  # {number of the host: names of its pod}
        (folder / "shared").mkdir()
        secret = folder / "secret"
        secret.write_text(os.urandom(32).hex())
        secret.chmod(0o400)

    def __enter__(self):
        for number, name in enumerate(self.hosts.names):
            Path("/etc/netns", name).mkdir(parents=True)
            self._write(number)
        self.hosts.__enter__()
        return self

    def __exit__(self, *_):
        self.hosts.__exit__()
        for name in self.hosts.names:
            (Path("/etc/netns") / name / "hosts").unlink()
            (Path("/etc/netns") / name).rmdir()

    def _write(self, number):
        # In place: the file is mounted where pods run. A pod knows its own name, as kubelet writes it.
        lines = ["127.0.0.1 localhost", *(f"{address} {names}" for address, names in self.names.items())]
        if number in self.own_names:
            lines.append(f"{self.hosts.address(number)} {self.own_names[number]}")
        Path("/etc/netns", self.hosts.names[number], "hosts").write_text("\n".join(lines) + "\n")

    def _write_all(self):
        for number in range(len(self.hosts.names)):
            self._write(number)

    def hostname(self, index):
        return f"{self.job['metadata']['name']}-{index}"

    def start(self, number, index):
        """Start the container of that index on a host. Others do not find its name yet."""
        host = self.hostname(index)
        domain = self.job["spec"]["template"]["spec"]["subdomain"]
        self.own_names[number] = f"{host}.{domain} {host}"
        self._write(number)
        mounts = {each["name"]: each["mountPath"] for each in self.container["volumeMounts"]}
        script = f"""
        set -e
        hostname {host}
        mount -t tmpfs none /run && mkdir -p {mounts["secret"]} && cp -p {self.folder}/secret {mounts["secret"]}
        mount -t tmpfs none /mnt && mkdir -p {mounts["shared"]} && mount --bind {self.folder}/shared {mounts["shared"]}
        exec "$@"
        """
        command = [*self.container["command"], *self.container["args"], "--epochs=4", "--images=800", "--lr=0.05"]
        command = [{"python": sys.executable, "/app/parameter_server.py": TUTORIAL}.get(word, word) for word in command]
        # What Kubernetes adds, and what this machine needs.
        added = {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        env = variables_of(self.container) | added
        env |= {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (self.folder / "output").open("a") as output:
            isolated = ["unshare", "--uts", "--mount", "bash", "-c", script, "pod", *command]
            return self.hosts.spawn(number, *isolated, env=env, stdout=output, stderr=subprocess.STDOUT)

    def publish(self, number, index):
        host = self.hostname(index)
        self.names[self.hosts.address(number)] = f"{host}.{self.job['spec']['template']['spec']['subdomain']}"
        self._write_all()

    def withdraw(self, number):
        del self.names[self.hosts.address(number)]
        self._write_all()

    def probe(self, pod, kind):
        """Run a probe in a pod, as kubelet does; return whether it succeeds."""
        probe = self.container[kind]
        command = ["nsenter", f"--target={pod.pid}", "--net", "--uts", "--mount", sys.executable, "-m"]
        env = {**os.environ, **variables_of(self.container)}
        assert probe["exec"]["command"][0] == "torchrpc"
        command += probe["exec"]["command"]
        return subprocess.run(command, env=env, timeout=20, capture_output=True).returncode == 0

    def output(self):
        return (self.folder / "output").read_text(errors="replace")

    def step(self):
        with contextlib.suppress(FileNotFoundError):
            return torch.load(self.folder / "shared" / "server.pt")["step"]
        return -1


@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.timeout(2 * LIMIT_S + 40)
def test_pods_that_start_late_form_a_group_and_a_replaced_one_of_rank_0_has_another_address(tmp_path):
    with Cluster(tmp_path, 4) as cluster:
        pods = [None, cluster.start(1, 1), None]
        time.sleep(3)  # index 1 looks for a name that is not there
        pods[0] = cluster.start(0, 0)
        assert not cluster.probe(pods[0], "readinessProbe")
        cluster.publish(0, 0)
        time.sleep(2)  # index 2 starts late
        pods[2] = cluster.start(2, 2)
        eventually(lambda: cluster.step() >= 25, LIMIT_S)
        for pod in pods:
            assert cluster.probe(pod, "readinessProbe") and cluster.probe(pod, "livenessProbe")

        cluster.hosts.kill_all(0)
        cluster.withdraw(0)
        pods[0].wait(10)
        pods[0] = cluster.start(3, 0)
        cluster.publish(3, 0)
        for pod in pods:
            pod.wait(LIMIT_S)
            assert pod.returncode == 0, cluster.output()
        printed = cluster.output()
    assert "the server goes on at step" in printed
    assert printed.count("waits for parameter_server to be started again") == 2
    assert "a connection was refused" not in printed  # the probes are no news
    assert float(re.search(r"accuracy ([\d.]+)%", printed)[1]) > 75, printed
    assert cluster.step() == 100
