"""The protocols that generate: request, translation and writer of each."""

from __future__ import annotations

from slipstream.server.protocols.anthropic.messages import MessagesRequest, messages_generation_request
from slipstream.server.protocols.anthropic.writer import MessagesWriter
from slipstream.server.protocols.api_protocol import ApiProtocol
from slipstream.server.protocols.llamacpp.completion import LlamaCompletionRequest, llama_completion_generation_request
from slipstream.server.protocols.llamacpp.completion_writer import LlamaCompletionWriter
from slipstream.server.protocols.ollama.chat import OllamaChatRequest, ollama_chat_generation_request
from slipstream.server.protocols.ollama.generate import OllamaGenerateRequest, ollama_generate_generation_request
from slipstream.server.protocols.ollama.writer import JSON_LINES, OllamaChatWriter, OllamaGenerateWriter
from slipstream.server.protocols.openai.chat import ChatRequest, chat_generation_request
from slipstream.server.protocols.openai.chat_writer import ChatWriter
from slipstream.server.protocols.openai.completions import (
    CompletionRequest,
    CompletionWriter,
    completion_generation_request,
)
from slipstream.server.protocols.openai.responses import ResponsesRequest, responses_generation_request
from slipstream.server.protocols.openai.responses_writer import ResponsesWriter

CHAT = ApiProtocol(ChatRequest, chat_generation_request, ChatWriter)
COMPLETIONS = ApiProtocol(CompletionRequest, completion_generation_request, CompletionWriter)
RESPONSES = ApiProtocol(ResponsesRequest, responses_generation_request, ResponsesWriter)
MESSAGES = ApiProtocol(MessagesRequest, messages_generation_request, MessagesWriter)
LLAMA_COMPLETION = ApiProtocol(LlamaCompletionRequest, llama_completion_generation_request, LlamaCompletionWriter)
OLLAMA_CHAT = ApiProtocol(OllamaChatRequest, ollama_chat_generation_request, OllamaChatWriter, JSON_LINES)
OLLAMA_GENERATE = ApiProtocol(
    OllamaGenerateRequest, ollama_generate_generation_request, OllamaGenerateWriter, JSON_LINES
)
