"""The status of several replicas as one report."""

from __future__ import annotations

from typing import Any

from fake_server import FakeServer

from slipstream.ray.status import ADDED, merged_status


def report_of_a_server() -> dict[str, Any]:
    with FakeServer() as server:
        for prompt in ("Once", "Upon"):
            server.post("/v1/completions", prompt=prompt, max_tokens=8).raise_for_status()
        return dict(server.get("/v1/status").json())


def test_counts_are_added_up_and_the_form_stays() -> None:
    own = report_of_a_server()
    merged = merged_status({"a": own, "b": own})
    assert set(merged) == {*own, "replicas"}
    for section, names in ADDED.items():
        assert set(merged[section]) == set(own[section])
        for name in names:
            before, after = own[section][name], merged[section][name]
            if isinstance(before, dict):
                assert after == {key: 2 * value for key, value in before.items()}
            elif isinstance(before, list):
                assert after == [2 * value for value in before]
            else:
                assert after == 2 * before
    assert merged["load"]["generated_tokens"] == 2 * own["load"]["generated_tokens"] > 0
    assert merged["speculation"]["draft_share"] == own["speculation"]["draft_share"]
    assert [each["id"] for each in merged["replicas"]] == ["a", "b"]


def test_means_come_from_the_sums_and_the_busiest_speaks_for_the_rest() -> None:
    own = report_of_a_server()
    plain = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "plain_row_steps": own["speculation"]["drafts"]}
    busy = {
        **own,
        "load": {**own["load"], "running": 3},
        "speculation": {**own["speculation"], **plain, "reason": "busy"},
    }
    merged = merged_status({"a": own, "b": busy})["speculation"]
    assert merged["reason"] == "busy"
    assert merged["mean_accepted_length"] == own["speculation"]["mean_accepted_length"] > 1.0
    drafts, others = own["speculation"]["drafts"], own["speculation"]["plain_row_steps"]
    assert merged["draft_share"] == round(drafts / (2 * drafts + others), 3)


def test_a_replica_that_is_not_loaded_yet() -> None:
    own, empty = report_of_a_server(), {"version": "1", "state": "failed", "uptime_s": 1.0}
    merged = merged_status({"a": own, "b": empty})
    assert merged["load"] == own["load"]
    assert [each["state"] for each in merged["replicas"]] == ["ready", "failed"]
    assert merged_status({"b": empty}) == empty
