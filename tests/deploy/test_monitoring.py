"""Dashboard and alerts ask for metrics that the server has; Prometheus reads the files and scrapes the server."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fake_server import FakeServer, until
from free_ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from queries import (
    ALERTS,
    CONFIG,
    DASHBOARD,
    METRIC,
    alerts,
    dashboard_queries,
    grouped_labels,
    panels,
    selected_labels,
)

from slipstream.server.service.settings import ServerConfig

DOCS = Path(__file__).parent.parent.parent / "docs"
KEY = "the-key"
ADDED_BY_PROMETHEUS = {"job", "instance"}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
WAIT = 300.0


def need(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(config=ServerConfig(port=0, api_keys=(KEY,))) as server:
        yield server


def ask(server: FakeServer) -> None:
    """What fills every metric: an answer with drafts, one without, an error."""
    headers = {"authorization": f"Bearer {KEY}"}
    for more in ({"seed": 1}, {"speculative": {"enabled": False}}, {"temperature": "hot"}):
        httpx.post(f"{server.url}/v1/chat/completions", json=CHAT | more, headers=headers, timeout=WAIT)


@pytest.fixture(scope="module")
def exported(server: FakeServer) -> dict[str, set[str]]:
    """The names of all samples, with their labels."""
    ask(server)
    text = server.get("/metrics", authorization=f"Bearer {KEY}").text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


QUERIES = {f"panel {number}": query for number, query in enumerate(dashboard_queries())} | {
    name: rule["expr"] for name, rule in alerts().items()
}


@pytest.mark.parametrize("name", QUERIES)
def test_what_is_asked_for_is_exported(exported: dict[str, set[str]], name: str) -> None:
    query = QUERIES[name]
    used = set(METRIC.findall(query))
    assert used or "up{" in query
    assert not used - set(exported)
    wrong = [
        (metric, label)
        for metric, label in selected_labels(query)
        if label not in exported[metric] | ADDED_BY_PROMETHEUS
    ]
    assert not wrong
    assert grouped_labels(query) <= set().union(*(exported[metric] for metric in used)) | ADDED_BY_PROMETHEUS


@pytest.mark.parametrize("document", ["server.md", "deploy.md"])
def test_metrics_in_the_documents_are_exported(exported: dict[str, set[str]], document: str) -> None:
    """A name that ends with a line (`process_*`) is the beginning of others."""
    named = set(METRIC.findall((DOCS / document).read_text()))
    known = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported} | set(exported)
    assert named
    assert not {
        name for name in named - known if not (name.endswith("_") and any(each.startswith(name) for each in known))
    }


def test_the_dashboard_shows_what_it_is_for() -> None:
    asked = {name for query in dashboard_queries() for name in METRIC.findall(query)}
    assert {
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_hits_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "slipstream_draft_depth",
        "vllm:iteration_tokens_total_bucket",
        "slipstream_http_requests_total",
    } <= asked


def test_the_dashboard_is_well_formed() -> None:
    shown = panels()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert len({panel["title"] for panel in shown}) >= len(shown) - 2  # some stand above as a number, below as a curve
    assert all(panel["description"] and panel["targets"] for panel in shown)
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", str(DASHBOARD["panels"]))) - {"__rate_interval"}
    assert used == variables == {"datasource", "job", "instance"}
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24


def own_config(folder: Path, server: FakeServer) -> Path:
    """Ours, with this server's address, a key file that is there, and scrapes every second."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = dict.fromkeys(config["global"], "1s")
    [job] = config["scrape_configs"]
    (folder / "key").write_text(f"{KEY}\n")
    job["authorization"]["credentials_file"] = str(folder / "key")
    job["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    shutil.copy(ALERTS, folder)
    path = folder / CONFIG.name
    path.write_text(yaml.safe_dump(config))
    return path


def test_promtool_reads_the_files(server: FakeServer, tmp_path: Path) -> None:
    config = own_config(tmp_path, server)
    for command in (["check", "config", str(config)], ["check", "rules", str(ALERTS)]):
        done = subprocess.run([need("promtool"), *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_where_it_should(tmp_path: Path) -> None:
    cases = Path(__file__).parent / "alerts_test.yml"
    for path in (cases, ALERTS):
        shutil.copy(path, tmp_path)
    command = [need("promtool"), "test", "rules", str(tmp_path / cases.name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case() -> None:
    cases = yaml.safe_load((Path(__file__).parent / "alerts_test.yml").read_text())
    fires = {each["alertname"] for test in cases["tests"] for each in test["alert_rule_test"] if each["exp_alerts"]}
    assert fires == set(alerts())


class Prometheus:
    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def is_up(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.ConnectError:
            return False

    def query(self, text: str) -> list[float]:
        answer = self._client.get("/api/v1/query", params={"query": text}).json()
        assert answer["status"] == "success", answer
        return [float(each["value"][1]) for each in answer["data"]["result"]]

    def rules(self) -> dict[str, str]:
        [group] = self._client.get("/api/v1/rules").json()["data"]["groups"]
        return {rule["name"]: rule["health"] for rule in group["rules"]}


@contextmanager
def prometheus(folder: Path, config: Path) -> Iterator[Prometheus]:
    port = free_port()
    command = [need("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT) as client:
            yield Prometheus(client)
    finally:
        process.terminate()
        process.wait(WAIT)


@contextmanager
def traffic(server: FakeServer) -> Iterator[None]:
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.1):
            ask(server)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(WAIT)


def filled_in(query: str) -> str:
    variables = {"$__rate_interval": "10s", "$job": "slipstream", "$instance": ".*"}
    for name, value in variables.items():
        query = query.replace(name, value)
    return query


def test_prometheus_scrapes_it_and_every_panel_shows_something(server: FakeServer, tmp_path: Path) -> None:
    need("prometheus")
    config = own_config(tmp_path, server)
    with traffic(server), prometheus(tmp_path, config) as scraping:
        until(scraping.is_up, WAIT)
        until(lambda: scraping.query('up{job="slipstream"}') == [1.0], WAIT)
        for query in dashboard_queries():
            until(lambda query=query: shows_something(scraping, query), WAIT)
        until(lambda: set(scraping.rules().values()) == {"ok"}, WAIT)
        assert set(scraping.rules()) == set(alerts())
        (tmp_path / "key").write_text("wrong")
        until(lambda: scraping.query('up{job="slipstream"} == 0') == [0.0], WAIT)


def shows_something(scraping: Prometheus, query: str) -> bool:
    values: list[Any] = scraping.query(filled_in(query))
    return bool(values) and not all(math.isnan(value) for value in values)
