"""A fake runner whose model says what a script says, with drafts that are right or wrong where a test wants them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from fake_server import END
from fakes import FakeRunner, Row, make_info

from slipstream.engine.contract import RowJoin, RowStep
from slipstream.load import Tokenizer

Script = Callable[[str], str]  # the prompt's text -> the answer's; the end token follows it


class ScriptedRunner(FakeRunner):
    """``wrong``: positions in the output whose drafts are wrong; all others are right."""

    def __init__(self, tokenizer: Tokenizer, script: Script, wrong: Collection[int] = (), **info: object) -> None:
        size = {"max_context": 2048, "num_blocks": 2048, "vocab_size": tokenizer.vocab_size}
        super().__init__(make_info(**(size | info)))
        self.prompts: list[str] = []
        self._tokenizer, self._script, self._wrong = tokenizer, script, wrong
        self._outputs: dict[int, tuple[int, list[int]]] = {}  # by row: where its output begins, what it will be

    def _join(self, join: RowJoin) -> None:
        super()._join(join)
        prompt = self._tokenizer.decode(join.tokens[: join.num_prompt], skip_special=False)
        self.prompts.append(prompt)
        answer = [*self._tokenizer.encode(self._script(prompt)), END]
        self._outputs[id(self.rows[join.slot])] = join.num_prompt, answer

    def _said(self, row: Row, position: int) -> int:
        start, answer = self._outputs[id(row)]
        return answer[position - start] if position - start < len(answer) else END

    def _sample(self, row: Row, drafts: tuple[int, ...]) -> tuple[int, ...]:
        committed: list[int] = []
        for draft in (*drafts, None):
            committed.append(self._said(row, len(row.tokens)))
            row.push(committed[-1])
            if committed[-1] != draft:
                break
        return tuple(committed)

    def _propose(self, row: Row, step: RowStep) -> tuple[tuple[int, ...], tuple[float, ...]]:
        start, _ = self._outputs[id(row)]
        positions = range(len(row.tokens), len(row.tokens) + step.draft.depth)
        return tuple(self._said(row, at) if at - start not in self._wrong else 0 for at in positions), ()
