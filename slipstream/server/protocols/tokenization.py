"""`/tokenize`, `/detokenize` and `/v1/messages/count_tokens`: paths that need the tokenizer only."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from slipstream.sampling import SamplingParams
from slipstream.server.errors import ApiError
from slipstream.server.protocols.anthropic import CountTokensRequest
from slipstream.server.protocols.body import Body, SomeItems
from slipstream.server.protocols.chat import ChatMessage, for_template
from slipstream.server.protocols.fields import ShortText, TokenId
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import ChatPrompt, Prompt, TextPrompt
from slipstream.server.service.service import Service

MAX_TOKENIZED = 1 << 20  # tokens in an answer


class TokenizeRequest(Body):
    """Exactly one of `prompt`, `content` (a synonym of it) and `messages`."""

    model: ShortText | None = None
    prompt: str | None = None
    content: str | None = None
    messages: SomeItems[ChatMessage] | None = None
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
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


async def tokenize(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    tokens = (await service.prepare(GenerationRequest(request.as_prompt(), SamplingParams()))).tokens
    if len(tokens) > MAX_TOKENIZED:
        raise ApiError(400, f"the text has {len(tokens)} tokens; at most {MAX_TOKENIZED} are listed", param="prompt")
    return {"tokens": list(tokens), "count": len(tokens), "max_model_len": service.loaded().engine.info.max_model_len}


async def detokenize(service: Service, request: DetokenizeRequest) -> dict[str, Any]:
    tokenizer, max_context = service.loaded().tokenizer, service.loaded().engine.info.max_context
    if len(request.tokens) > max_context:
        raise ApiError(400, f"tokens: {len(request.tokens)} are more than the context of {max_context}", param="tokens")
    text = await service.in_thread(lambda: tokenizer.decode(request.tokens, skip_special=False))
    return {"prompt": text, "content": text}


async def count_tokens(service: Service, request: CountTokensRequest) -> dict[str, Any]:
    return {"input_tokens": len((await service.prepare(request.generation_request(SamplingParams(), {}))).tokens)}
