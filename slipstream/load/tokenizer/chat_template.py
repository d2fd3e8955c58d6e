"""A model's chat template: messages -> prompt text. Knows nothing of token ids.

A template comes with the model and is not trusted: processes of its own render it, within bounds of time, memory and
length. A failure there is an error of the request, in one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import RequestError, TemplateLimit, TemplatesUnavailable
from slipstream.workers.pool import WorkerPool
from slipstream.workers.process import Crashed, OutOfTime, Unavailable

SECONDS = 5.0  # for one prompt
PROCESSES = 2  # a slow prompt does not hold up the others
QUESTION = ({"role": "user", "content": "Hello"},)


class ChatTemplate:
    """`sources` by name: "default", and possibly "tool_use" for requests with tools. Empty: no template.

    For any thread.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self._fault = ""
        first = {"sources": self.sources, "special_tokens": dict(special_tokens)}
        self._workers = WorkerPool("slipstream.template.worker", first, PROCESSES)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        if not self.sources:
            raise RequestError("The model has no chat template: send a plain prompt instead of messages.")
        if self._fault:
            raise RequestError(self._fault)
        given = {**variables, "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        answer = self._ask(given)
        if "error" not in answer:
            return answer["text"]
        if answer["kind"] == "broken":
            self._fault = answer["error"]
        raise (TemplateLimit if answer["kind"] == "limit" else RequestError)(answer["error"])

    def check(self) -> str:
        """Renders one short question: empty, or why that fails. Blocks for as long as a request may.

        A template that is over its limits even then is not tried again.
        """
        self._workers.start()
        try:
            self.render(QUESTION)
        except TemplateLimit as error:
            self._fault = str(error)
            return self._fault
        except (RequestError, TemplatesUnavailable) as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Ends its processes. A prompt that is being rendered fails; a later one starts them again."""
        self._workers.close()

    def _ask(self, given: dict[str, Any]) -> dict[str, str]:
        try:
            answer: dict[str, str] = self._workers.ask(given, SECONDS)
        except OutOfTime:
            raise TemplateLimit(f"The model's chat template did not finish within {SECONDS:g} seconds.") from None
        except Crashed:
            raise TemplateLimit("The model's chat template crashed the process that renders it.") from None
        except Unavailable as error:
            raise TemplatesUnavailable(f"the process that renders chat templates is not available: {error}") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"The messages are not JSON: {error}.") from error
        return answer
