"""Settings of an application on Ray, and the environment that Ray reads."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from slipstream.ray import environment
from slipstream.ray.environment import CONNECTIONS, FLAGS, HAPROXY, few_connections, missing_flags, starts_a_cluster
from slipstream.ray.settings import settings_from

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*FLAGS, CONNECTIONS):
        monkeypatch.delenv(name, raising=False)


def test_settings_of_serve_by_name_as_values_or_texts() -> None:
    values = {"model": "some/model", "max_streams": 4, "queue-limit": 10, "strict": True, "draft": "off", "drain": 7}
    for given in (values, {name: str(value) for name, value in values.items()}):
        found = settings_from(given)
        assert (found.model.model, found.model.max_streams, found.model.draft) == ("some/model", 4, "off")
        assert (found.server.queue_limit, found.server.strict, found.server.drain_seconds) == (10, True, 7.0)
        assert found.max_ongoing > 14
        assert found.shutdown_seconds > 7


def test_the_environment_counts_where_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_MAX_STREAMS", "3")
    assert settings_from({}).model.max_streams == 3
    assert settings_from({"max_streams": 5}).model.max_streams == 5


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_stream": 4}, "max_stream is no setting of serve; is max-streams meant?"),
        ({"max_streams": "many"}, "max_streams must be a whole number, not 'many'"),
        ({"replicas": "two"}, "replicas must be a number, not 'two'"),
        ({"replicas": 0}, "replicas must be at least 1, not 0"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas must not be more than max_replicas"),
        ({"gpus_per_replica": 0.5}, "replicas share a GPU: say how much of its memory each may use"),
    ],
)
def test_errors_say_what_is_wrong(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        settings_from(values)


def test_an_open_port_demands_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's HAProxy listens on every address, whatever host is asked for."""
    monkeypatch.setenv(HAPROXY, "1")
    with pytest.raises(ConfigError, match="needs an API key"):
        settings_from({"host": "127.0.0.1"})
    assert settings_from({"api_key": "secret"}).server.api_keys == ("secret",)
    assert settings_from({}, own_cluster=True).server.host == "127.0.0.1"


def test_replicas_that_share_a_gpu_share_its_memory() -> None:
    found = settings_from({"gpus_per_replica": 0.5, "memory": "40GB"})
    assert (found.num_gpus, found.model.memory) == (0.5, 40 * 10**9)


def test_one_replica_has_no_router() -> None:
    assert not settings_from({}).replicas.routes
    assert settings_from({"replicas": 2}).replicas.routes
    assert settings_from({"max_replicas": 2}).replicas.routes
    assert not settings_from({"replicas": 2, "affinity": "off"}).replicas.routes


def test_flags_are_set_unless_somebody_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.sys, "platform", "linux")
    monkeypatch.setattr(environment, "max_open_files", lambda: None)
    assert missing_flags({}) == FLAGS
    assert HAPROXY not in missing_flags({HAPROXY: "1"})
    assert missing_flags({HAPROXY: "0"}) == {}
    monkeypatch.setattr(environment.sys, "platform", "darwin")
    assert missing_flags({}) == {}


def test_haproxy_starts_where_few_files_may_be_open() -> None:
    """It opens five for every two connections, and some more."""
    assert few_connections(None) == few_connections(20_000) == {}
    assert 1000 < int(few_connections(4096)[CONNECTIONS]) <= (4096 - 36) / 2.5


def test_only_a_serve_run_that_starts_a_cluster_is_run_again() -> None:
    run = ["/somewhere/bin/serve", "run", "slipstream.ray:app"]
    assert starts_a_cluster(run, {})
    assert not starts_a_cluster([*run, "--address=1.2.3.4:6379"], {})
    assert not starts_a_cluster(run, {"RAY_ADDRESS": "auto"})
    assert not starts_a_cluster(["/somewhere/bin/serve", "deploy", "x.yaml"], {})
    assert not starts_a_cluster(["/somewhere/pytest"], {})


def test_the_file_for_ray_start_has_the_flags() -> None:
    lines = (ROOT / "deploy" / "ray" / "environment").read_text().splitlines()
    words = [shlex.split(line)[0] for line in lines if line and not line.startswith("#")]
    assert dict(word.split("=", 1) for word in words) == FLAGS
