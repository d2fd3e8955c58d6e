"""`/tokenize`, `/detokenize` and `/v1/messages/count_tokens`: paths that need the tokenizer only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

from pydantic import Field

from slipstream.engine.request import check_vocabulary
from slipstream.errors import PromptTooLong
from slipstream.sampling import SamplingParams
from slipstream.server.errors import ApiError
from slipstream.server.protocols.anthropic.messages import CountTokensRequest
from slipstream.server.protocols.body import Body, SomeItems
from slipstream.server.protocols.fields import ShortText, TokenId
from slipstream.server.protocols.openai.chat import ChatMessage, for_template
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import ChatPrompt, MixedPrompt, Prompt
from slipstream.server.service.service import Service

MAX_TOKENIZED = 1 << 17  # tokens in an answer, or the context if that is more


class TokenizeRequest(Body):
    """Exactly one of `prompt`, `content` (llama.cpp's name of it; may have token ids in between) and `messages`."""

    model: ShortText | None = None
    prompt: str | None = None
    content: str | Annotated[list[str | TokenId], Field(fail_fast=True)] | None = None
    messages: SomeItems[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None  # llama.cpp's name of it
    parse_special: bool | None = None  # false: <|x|> in the text is no token
    with_pieces: bool | None = None

    def as_prompt(self) -> Prompt:
        given = [each for each in (self.prompt, self.content, self.messages) if each is not None]
        if len(given) != 1:
            raise ApiError(400, "give one of prompt, content and messages", param="prompt")
        if self.messages is not None:
            return ChatPrompt(for_template(self.messages))
        parts = self.content if isinstance(self.content, list) else [str(given[0])]
        return MixedPrompt(parts, bool(self.add_special_tokens or self.add_special), self.parse_special is not False)

    def token_ids(self) -> list[int]:
        """Those between texts."""
        return [part for part in self.content if isinstance(part, int)] if isinstance(self.content, list) else []


class DetokenizeRequest(Body):
    model: ShortText | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


async def tokenize(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    info = service.loaded().engine.info
    context = info.max_model_len
    check_vocabulary("content", request.token_ids(), info)
    tokens = await _tokens(service, request.as_prompt(), max(MAX_TOKENIZED, context))
    shown = _with_pieces(service, tokens) if request.with_pieces else list(tokens)
    return {"tokens": shown, "count": len(tokens), "max_model_len": context}


async def _tokens(service: Service, prompt: Prompt, limit: int) -> Sequence[int]:
    """Writing millions of ids would keep all streams waiting."""
    with suppress(PromptTooLong):
        tokens = (await service.prepare(GenerationRequest(prompt, SamplingParams()), limit)).tokens
        if len(tokens) <= limit:
            return tokens
    raise ApiError(400, f"the text has more than {limit} tokens: send it in parts", param="prompt")


def _with_pieces(service: Service, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """A piece that is no valid text, such as half a character, as its bytes."""
    tokenizer = service.loaded().tokenizer
    pieces = [tokenizer.token_bytes(token, skip_special=False) for token in tokens]
    return [{"id": token, "piece": _text_or_bytes(piece)} for token, piece in zip(tokens, pieces)]


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(service: Service, request: DetokenizeRequest) -> dict[str, Any]:
    tokenizer, info = service.loaded().tokenizer, service.loaded().engine.info
    if len(request.tokens) > info.max_context:
        message = f"tokens: {len(request.tokens)} are more than the context of {info.max_context}"
        raise ApiError(400, message, param="tokens")
    check_vocabulary("tokens", request.tokens, info)
    text = await service.in_thread(lambda: tokenizer.decode(request.tokens, skip_special=False))
    return {"prompt": text, "content": text}


async def count_tokens(service: Service, request: CountTokensRequest) -> dict[str, Any]:
    return {"input_tokens": len((await service.prepare(request.generation_request(SamplingParams(), {}))).tokens)}
