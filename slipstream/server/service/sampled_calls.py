"""Tool calls as the model wrote them, by the ids that clients know them by: the newest ones, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from slipstream.server.text.markup.calls import SampledCall

MAX_CALLS = 1 << 14
MAX_CHARACTERS = 1 << 24  # of all of them


class SampledCalls:
    """For any thread. Callers with different salts do not see each other's."""

    def __init__(self, max_calls: int = MAX_CALLS, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_calls, self._max_characters = max_calls, max_characters
        self._calls: OrderedDict[tuple[str, str], SampledCall] = OrderedDict()  # the newest last
        self._num_characters = 0
        self._lock = Lock()

    def remember(self, salt: str, call: SampledCall) -> None:
        with self._lock:
            self._calls[salt, call.id] = call
            self._num_characters += call.size
            while len(self._calls) > self._max_calls or self._num_characters > self._max_characters:
                _, oldest = self._calls.popitem(last=False)
                self._num_characters -= oldest.size

    def recall(self, salt: str, call_id: str) -> SampledCall | None:
        """``call_id``: with the prefix of any protocol. One that is asked for stays longer."""
        key = salt, call_id.rpartition("_")[2]
        with self._lock:
            found = self._calls.get(key)
            if found is not None:
                self._calls.move_to_end(key)
            return found
