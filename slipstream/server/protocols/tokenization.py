"""`/tokenize`, `/detokenize` and `/v1/messages/count_tokens`: the tokenizer without the model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from slipstream.sampling import SamplingParams
from slipstream.server.errors import ApiError
from slipstream.server.protocols.anthropic import Counted
from slipstream.server.protocols.body import Body
from slipstream.server.protocols.chat import ChatMessage, for_template
from slipstream.server.protocols.fields import ShortText, TokenId
from slipstream.server.service.generation_request import Job
from slipstream.server.service.prompts import ChatPrompt, Prompt, TextPrompt
from slipstream.server.service.service import Service


class TokenizeRequest(Body):
    """One of: `prompt` (or `content`, the same under another name), `messages`."""

    model: ShortText | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None

    def as_prompt(self) -> Prompt:
        given = [each for each in (self.prompt, self.content, self.messages) if each is not None]
        if len(given) != 1:
            raise ApiError(400, "give one of prompt, content and messages", param="prompt")
        if self.messages is not None:
            return ChatPrompt(for_template(self.messages))
        return TextPrompt(str(given[0]), bool(self.add_special_tokens))


class DetokenizeRequest(Body):
    model: ShortText | None = None
    tokens: list[TokenId]


async def tokenize(service: Service, asked: TokenizeRequest) -> dict[str, Any]:
    tokens = (await service.prepare(Job(asked.as_prompt(), SamplingParams()))).tokens
    return {"tokens": list(tokens), "count": len(tokens), "max_model_len": service.loaded().engine.info.max_context}


async def detokenize(service: Service, asked: DetokenizeRequest) -> dict[str, Any]:
    tokenizer = service.loaded().tokenizer
    text = await service.in_thread(lambda: tokenizer.decode(asked.tokens, skip_special=False))
    return {"prompt": text, "content": text}


async def count_tokens(service: Service, asked: Counted) -> dict[str, Any]:
    return {"input_tokens": len((await service.prepare(asked.job(SamplingParams(), {}))).tokens)}
