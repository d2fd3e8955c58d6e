"""`/v1/status` of several replicas as one, for the page's panel.

Pure: reports to a report. Counts are added up; what cannot be added is that of the busiest replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from slipstream.engine.stats import draft_share, mean_accepted_length, tokens_per_step

Report = dict[str, Any]
ADDED = {
    "load": [
        "running",
        "waiting",
        "max_streams",
        "queue_limit",
        "tokens_per_second",
        "generated_tokens",
        "prompt_tokens",
        "steps",
        "requests",
    ],
    "speculation": [
        "drafts",
        "draft_tokens",
        "accepted_tokens",
        "accepted_per_position",
        "drafted_per_position",
        "plain_row_steps",
    ],
    "prefix_cache": ["queried_tokens", "found_tokens", "blocks", "states_used", "states_total"],
    "memory": ["kv_blocks_total", "kv_blocks_used", "kv_bytes", "weight_bytes", "state_bytes", "rss_bytes"],
}


def merged_status(reports: Mapping[str, Report]) -> Report:
    """``reports``: by the replicas' names."""
    loaded = [report for report in reports.values() if "load" in report]
    if not loaded:
        return next(iter(reports.values()))
    merged = dict(max(loaded, key=lambda report: report["load"]["running"]))
    for section, names in ADDED.items():
        added = {name: _sum([report[section][name] for report in loaded]) for name in names}
        merged[section] = {**merged[section], **added}
    merged["speculation"] |= _means(merged["speculation"], merged["load"]["generated_tokens"])
    merged["load"]["tokens_per_second"] = round(merged["load"]["tokens_per_second"], 1)
    merged["streams"] = [stream for report in loaded for stream in report["streams"]]
    merged["replicas"] = [_replica(name, report) for name, report in sorted(reports.items())]
    return merged


def _sum(values: Sequence[Any]) -> Any:
    """Of numbers; of lists and objects place by place."""
    first = values[0]
    if isinstance(first, list):
        return [sum(each) for each in zip_longest(*values, fillvalue=0)]
    if isinstance(first, dict):
        return {name: sum(value[name] for value in values) for name in first}
    return sum(values)


def _means(counts: Report, num_tokens: int) -> Report:
    drafts, plain = counts["drafts"], counts["plain_row_steps"]
    return {
        "mean_accepted_length": round(mean_accepted_length(counts["accepted_tokens"], drafts), 3),
        "tokens_per_step": round(tokens_per_step(num_tokens, drafts, plain), 3),
        "draft_share": round(draft_share(drafts, plain), 3),
    }


def _replica(name: str, report: Report) -> Report:
    load = report.get("load", {})
    return {"id": name, "state": report["state"], "running": load.get("running"), "waiting": load.get("waiting")}
