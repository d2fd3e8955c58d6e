"""The protocols that generate: request, translation and writer of each."""

from __future__ import annotations

from slipstream.server.protocols.anthropic import MessagesRequest, messages_job
from slipstream.server.protocols.anthropic_writer import MessagesWriter
from slipstream.server.protocols.api_protocol import Protocol
from slipstream.server.protocols.chat import ChatRequest, chat_job
from slipstream.server.protocols.chat_writer import ChatWriter
from slipstream.server.protocols.completions import CompletionRequest, CompletionWriter, completion_job
from slipstream.server.protocols.responses import ResponsesRequest, responses_job
from slipstream.server.protocols.responses_writer import ResponsesWriter

CHAT = Protocol(ChatRequest, chat_job, ChatWriter)
COMPLETIONS = Protocol(CompletionRequest, completion_job, CompletionWriter)
RESPONSES = Protocol(ResponsesRequest, responses_job, ResponsesWriter)
MESSAGES = Protocol(MessagesRequest, messages_job, MessagesWriter)
