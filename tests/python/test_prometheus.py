"""Prometheus scrapes a job; its numbers are the job's own."""

import contextlib
import json
import logging
import re
import shutil
import socket
import subprocess
import threading
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import torch
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc import observe
from torchrpc.testing import free_port, run_ranks, workers

prometheus_client = pytest.importorskip("prometheus_client")
from prometheus_client import parser  # noqa: E402
from prometheus_client.openmetrics import parser as openmetrics_parser  # noqa: E402

DASHBOARD = Path(observe.__file__).with_name("grafana_dashboard.json")


def triple(x):
    return 3 * x


def fail():
    raise ValueError("no")


NAME = f"{__name__}."


def get(url, accept="text/plain"):
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode()


def scrape(url):
    """{(sample, sorted labels): value} of a scrape."""
    families = parser.text_string_to_metric_families(get(url))
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def labels(**values):
    return tuple(sorted(values.items()))


def serve_here():
    """Serve the metrics of this worker; return where."""
    server = observe.serve_metrics()
    return server.url


def make_some_calls():
    for i in range(7):
        rpc.rpc_sync("worker1", triple, args=(i,))
    for _ in range(2):
        with pytest.raises(ValueError):
            rpc.rpc_sync("worker1", fail)


def test_a_scrape_has_the_numbers_of_the_worker():
    with workers(2, metrics=True):
        make_some_calls()
        server = observe.serve_metrics()
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        found = scrape(server.url)
        pair = labels(worker="worker0", function=NAME + "triple", peer="worker1", side="out")
        [row] = [row for row in observe.functions() if row.function == NAME + "triple"]
        assert found["torchrpc_calls_total", pair] == row.calls == 7
        assert found["torchrpc_request_bytes_total", pair] == row.request_bytes
        assert found["torchrpc_reply_bytes_total", pair] == row.reply_bytes
        assert found["torchrpc_calls_in_flight", pair] == 0
        assert found["torchrpc_call_latency_seconds_count", pair] == 7
        assert found["torchrpc_call_latency_seconds_sum", pair] == pytest.approx(row.total_s)
        assert found["torchrpc_call_latency_seconds_bucket", tuple(sorted((*pair, ("le", "+Inf"))))] == 7
        errors = labels(worker="worker0", function=NAME + "fail", peer="worker1", side="out", code="user exception")
        assert found["torchrpc_call_errors_total", errors] == 2
        me = labels(worker="worker0")
        assert (found["torchrpc_workers", me], found["torchrpc_lost_workers", me]) == (2, 0)
        assert found["torchrpc_pool_size", me] >= 1
        assert found["torchrpc_owned_rrefs", me] == 0
        assert found["process_resident_memory_bytes", ()] > 1e6
        server.close()
        with pytest.raises(OSError):
            scrape(server.url)


def test_buckets_are_cumulative_and_lose_no_call():
    with workers(2, metrics=True):
        make_some_calls()
        [row] = [row for row in observe.functions() if row.function == NAME + "triple"]
        server = observe.serve_metrics()
        found = scrape(server.url)
        server.close()
        buckets = sorted(
            (float(dict(pairs)["le"]), value)
            for (name, pairs), value in found.items()
            if name == "torchrpc_call_latency_seconds_bucket" and dict(pairs)["function"] == NAME + "triple"
        )
        for end, value in buckets:
            assert value == sum(count for bucket_end, count in row.buckets if bucket_end <= end * 1.000001)


def test_openmetrics_is_spoken_too():
    with workers(1, metrics=True):
        rpc.rpc_sync("worker0", triple, args=(1,))
        server = observe.serve_metrics()
        text = get(server.url, "application/openmetrics-text; version=1.0.0")
        server.close()
        assert text.endswith("# EOF\n")
        families = {family.name for family in openmetrics_parser.text_string_to_metric_families(text)}
        assert {"torchrpc_calls", "torchrpc_call_latency_seconds"} <= families


def test_serving_turns_metrics_on_and_outlives_the_worker():
    server = None
    with workers(1):
        server = observe.serve_metrics()
        rpc.rpc_sync("worker0", triple, args=(1,))
        assert any(name == "torchrpc_calls_total" for name, _ in scrape(server.url))
    assert not any(name.startswith("torchrpc") for name, _ in scrape(server.url))
    server.close()


@pytest.mark.parametrize("port", [-1, 65536, "9000", True])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(ValueError, match="serve_metrics: port must be a number from 0 to 65535"):
        observe.serve_metrics(port)


def served_by_environment(_):
    from torchrpc.observe import _prometheus

    rpc.rpc_sync("worker0", triple, args=(1,))
    return bool(_prometheus._served) and scrape(_prometheus._served.url) != {}


def test_clients_that_send_nothing_cost_few_threads_and_hold_up_no_scrape():
    with workers(1):
        server = observe.serve_metrics()
        before = threading.active_count()
        with contextlib.ExitStack() as idle:
            for _ in range(200):
                idle.enter_context(socket.create_connection((server.addr, server.port), timeout=20))
            assert scrape(server.url)[("torchrpc_workers", labels(worker="worker0"))] == 1
            eventually(lambda: threading.active_count() - before < 50)
        server.close()


def test_the_environment_serves_on_the_first_free_port_of_a_range():
    port = free_port()
    # Both processes are on this machine, and have the same variable.
    found = run_ranks(served_by_environment, 2, env={"TORCHRPC_METRICS_PORT": f"{port}-{port + 20}"})
    assert found == [True, True]


def test_a_wrong_variable_warns_and_does_not_stop_the_job(monkeypatch, caplog):
    from torchrpc.observe import _prometheus

    monkeypatch.setattr(_prometheus, "_served", None)
    for text in ("http", "5-4", "70000"):
        monkeypatch.setenv("TORCHRPC_METRICS_PORT", text)
        with caplog.at_level(logging.WARNING, "torchrpc"):
            _prometheus.serve_by_environment("worker7")
        assert f"worker7: TORCHRPC_METRICS_PORT must be a port or a range of ports, but is '{text}'" in caplog.text


# --- the dashboard ---


def test_each_expression_of_the_dashboard_names_metrics_of_a_scrape():
    with workers(2, metrics=True):
        make_some_calls()
        server = observe.serve_metrics()
        found = {name for name, _ in scrape(server.url)}
        server.close()
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(expressions) >= 10
    for expression in expressions:
        used = set(re.findall(r"\b(?:torchrpc|process)_\w+", expression))
        assert used and used <= found, expression


# --- the real Prometheus ---


class Prometheus:
    """The Debian package's server, which scrapes these addresses twice a second."""

    def __init__(self, folder, targets):
        config = {
            "global": {"scrape_interval": "500ms"},
            "scrape_configs": [{"job_name": "torchrpc", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self.port = free_port()
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stderr=subprocess.DEVNULL,
        )

    def query(self, expression):
        """{sorted labels: value}, of the latest scrapes."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        answer = json.loads(get(url))
        assert answer["status"] == "success", answer
        return [(sample["metric"], float(sample["value"][1])) for sample in answer["data"]["result"]]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()


@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs the Debian package prometheus")
def test_prometheus_has_the_numbers_of_a_job_of_four_workers(tmp_path):
    with workers(4, metrics=True) as names:
        urls = {name: rpc.rpc_sync(name, serve_here) for name in names}
        with Prometheus(tmp_path, [urllib.parse.urlparse(url).netloc for url in urls.values()]) as prometheus:
            for name in names:
                for i in range(10 + names.index(name)):
                    rpc.rpc_sync(name, triple, args=(i,))
                    rpc.rpc_sync(name, torch.add, args=(torch.ones(10), i))
            mine = {(row.function, row.peer): row for row in observe.functions() if row.side == "out"}
            wanted = {name: 10 + names.index(name) for name in names}
            expression = f'torchrpc_calls_total{{worker="worker0",side="out",function="{NAME}triple"}}'

            def counts():
                with contextlib.suppress(OSError):  # it does not listen yet
                    return {labels["peer"]: value for labels, value in prometheus.query(expression)}

            def values(expression):
                """Without those of a worker whose last scrape took too long, on a busy machine."""
                return [pytest.approx(value) for _, value in prometheus.query(expression)]

            eventually(lambda: counts() == wanted)
            served = f'torchrpc_calls_total{{side="in",function="{NAME}triple",peer="worker0"}}'
            eventually(lambda: {labels["worker"]: value for labels, value in prometheus.query(served)} == wanted)
            for name in names:
                row = mine[NAME + "triple", name]
                pair = f'{{worker="worker0",side="out",function="{NAME}triple",peer="{name}"}}'
                for metric, number in (
                    ("torchrpc_request_bytes_total", row.request_bytes),
                    ("torchrpc_reply_bytes_total", row.reply_bytes),
                    ("torchrpc_call_latency_seconds_count", row.calls),
                    ("torchrpc_call_latency_seconds_sum", row.total_s),
                ):
                    eventually(lambda metric=metric, pair=pair, number=number: values(metric + pair) == [number])
            eventually(lambda: {labels["worker"] for labels, _ in prometheus.query("torchrpc_workers")} == set(names))
            eventually(lambda: values("torchrpc_lost_workers") == [0] * 4)
            # Prometheus understands each expression of the dashboard.
            dashboard = json.loads(DASHBOARD.read_text())
            for panel in dashboard["panels"]:
                for target in panel.get("targets", ()):
                    prometheus.query(target["expr"].replace("$__rate_interval", "5s").replace("$worker", ".*"))
