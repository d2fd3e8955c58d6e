"""Ollama's `/api/tags`, `/api/ps`, `/api/show` and `/api/version`: the one model of this server."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from slipstream.server.protocols.body import Body
from slipstream.server.protocols.fields import ShortText
from slipstream.server.service.service import Service

API_VERSION = "0.12.11"  # of Ollama: clients ask for a minimum
NEVER = "9999-12-31T23:59:59Z"


class OllamaShowRequest(Body):
    ignored = frozenset({"options", "system", "template", "verbose"})

    model: ShortText | None = None
    name: ShortText | None = None  # another name of `model`


def version(service: Service) -> dict[str, Any]:
    return {"version": API_VERSION}


def tags(service: Service) -> dict[str, Any]:
    listed = {"modified_at": _modified(service), "capabilities": _capabilities(service)}
    return {"models": [_entry(service, name) | listed for name in _names(service)]}


def running(service: Service) -> dict[str, Any]:
    name, *_ = _names(service)
    memory = service.monitor.memory()
    size = memory["weight_bytes"] + memory["kv_bytes"] + memory["state_bytes"]
    on_cpu = service.loaded().engine.info.note.startswith("cpu")
    state = {"expires_at": NEVER, "size_vram": 0 if on_cpu else size, "context_length": _context(service)}
    return {"models": [_entry(service, name) | {"size": size} | state]}


async def show(service: Service, request: OllamaShowRequest) -> dict[str, Any]:
    loaded = service.loaded()
    architecture = loaded.facts.architecture
    return {
        "modelfile": f"FROM {loaded.facts.name}\n",
        "parameters": "",
        "template": loaded.tokenizer.template_text,
        "details": _details(service),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": loaded.facts.name,
            f"{architecture}.context_length": _context(service),
            f"{architecture}.vocab_size": loaded.engine.info.vocab_size,
        },
        "capabilities": _capabilities(service),
        "modified_at": _modified(service),
    }


def _names(service: Service) -> list[str]:
    return list(dict.fromkeys((service.loaded().facts.name, *service.config.names)))


def _entry(service: Service, name: str) -> dict[str, Any]:
    facts = service.loaded().facts
    digest = hashlib.sha256(f"{facts.name} {facts.format} {facts.weight_bytes}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "size": facts.weight_bytes,
        "digest": digest,  # identifies the model among others; not a digest of its files
        "details": _details(service),
    }


def _details(service: Service) -> dict[str, Any]:
    facts = service.loaded().facts
    container, _, stored = facts.format.partition(", ")
    return {
        "parent_model": "",
        "format": container.lower(),
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": "",
        "quantization_level": stored,
    }


def _capabilities(service: Service) -> list[str]:
    chat_format = service.chat_format
    found = {"completion": True, "tools": chat_format.reads_calls, "thinking": chat_format.thinks}
    return [name for name, has in found.items() if has]


def _context(service: Service) -> int:
    return service.loaded().engine.info.max_model_len


def _modified(service: Service) -> str:
    return datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
