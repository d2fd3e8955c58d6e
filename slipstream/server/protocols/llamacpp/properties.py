"""llama.cpp's `/props`, `/slots`, `/lora-adapters` and `/apply-template`: what its clients ask about the server."""

from __future__ import annotations

from typing import Any

from slipstream import __version__
from slipstream.engine.stats import StreamSnapshot
from slipstream.sampling import SamplingParams
from slipstream.server.protocols.llamacpp.settings import sampling_settings
from slipstream.server.protocols.openai.chat import ChatRequest
from slipstream.server.service.service import Service


def props(service: Service) -> dict[str, Any]:
    loaded = service.loaded()
    tokenizer, chat_format, name = loaded.tokenizer, service.chat_format, loaded.facts.name
    defaults = service.engine_config.sampling_defaults.merged({})
    settings = sampling_settings(SamplingParams(**{"max_tokens": None, **defaults}))
    has_tools = chat_format.reads_calls
    return {
        "default_generation_settings": {"params": settings, "n_ctx": loaded.engine.info.max_model_len},
        "total_slots": service.engine_config.max_streams,
        "model_alias": name,
        "model_path": name,
        "model_ftype": loaded.facts.format,
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": tokenizer.template_text,
        "chat_template_caps": {"supports_tools": has_tools, "supports_tool_calls": has_tools},
        "bos_token": _text(service, tokenizer.bos_token_id),
        "eos_token": _text(service, next(iter(tokenizer.eos_token_ids), None)),
        "build_info": f"slipstream-{__version__}",
        "is_sleeping": False,
    }


def slots(service: Service) -> list[dict[str, Any]]:
    """One a stream that may run; the running ones first."""
    engine = service.loaded().engine
    can_draft = min(engine.info.max_depth, engine.config.max_depth) > 0
    same = {"n_ctx": engine.info.max_model_len, "speculative": can_draft}
    running = engine.streams()
    count = max(engine.config.max_streams, len(running))
    return [
        {"id": index, **same, **({"is_processing": False} if index >= len(running) else _busy(running[index]))}
        for index in range(count)
    ]


def _busy(stream: StreamSnapshot) -> dict[str, Any]:
    return {
        "is_processing": True,
        "id_task": stream.id,
        "n_prompt_tokens": stream.prompt_tokens,
        "next_token": [{"has_next_token": True, "n_decoded": stream.output_tokens}],
        "draft_n": stream.draft_tokens,
        "draft_n_accepted": stream.accepted_tokens,
    }


def lora_adapters(service: Service) -> list[dict[str, Any]]:
    return []


async def apply_template(service: Service, request: ChatRequest) -> dict[str, Any]:
    return {"prompt": await service.render(request.prompt(), request.tool_use())}


def _text(service: Service, token: int | None) -> str:
    raw = b"" if token is None else service.loaded().tokenizer.token_bytes(token, skip_special=False)
    return raw.decode("utf-8", "replace")
