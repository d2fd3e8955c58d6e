"""What cannot be compiled: refused with its path, within bounds, at nobody else's cost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.errors import ConstraintFault, GrammarError, GrammarsUnavailable
from slipstream.grammar import Choice, Gbnf, GrammarCompiler, JsonSchema, Lark, Regex, Spec
from slipstream.grammar import compiler as compiler_module
from slipstream.load.random.model import byte_tokenizer
from slipstream.load.tokenizer.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (JsonSchema({"properties": {"a": {"items": {"type": "wat"}}}}), r"^s\.properties\.a\.items: .*wat"),
        (JsonSchema({"anyOf": [{"type": "null"}, {"type": "string", "format": "zz"}]}), r"^s\.anyOf\[1\]: .*zz"),
        (JsonSchema({"type": "array", "uniqueItems": True}), "^s: .*uniqueItems"),
        (JsonSchema({"$ref": "#/$defs/none"}), "^s: .*none"),
        (JsonSchema({"$ref": "#"}), "^s: no text fits"),
        (JsonSchema({"type": "string", "pattern": "a{99999}"}), r"^s\.pattern: repeats .*99999"),
        (JsonSchema({"type": "string", "pattern": "a(?=b)"}), "(?s)^s: .*look-ahead"),
        (JsonSchema({"const": object()}), "^s: .*JSON"),
        (Regex("a(b"), "(?s)^s: .*unclosed group"),
        (Regex(""), "^s: .*empty"),
        (Lark("start: missing"), "(?s)^s: .*missing"),
        (Gbnf("root ::= missing"), "(?s)^s: .*missing"),
        (Choice([]), "^s: "),
        (Choice(["a", ""]), "^s: "),
    ],
)
def test_a_bad_spec_says_where(compiler: GrammarCompiler, spec: Spec, said: str) -> None:
    for _ in range(2):  # what was refused is remembered, not tried again
        with pytest.raises(GrammarError, match=said):
            compiler.compile(spec, "s")


def nested(levels: int, wrap: Callable[[Any], Any]) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = wrap(schema)
    return schema


CHAIN = "root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} "a"' for i in range(9000)) + '\nr9000 ::= "b"'
HOSTILE = {
    "huge": JsonSchema({"enum": ["x" * 300_000]}),
    "deep": JsonSchema(nested(100, lambda inner: {"properties": {"a": inner}})),
    "deeper than Python": JsonSchema(nested(100_000, lambda inner: {"items": inner})),
    "doubling": JsonSchema(nested(17, lambda inner: {"anyOf": [inner, inner]})),
    "many alternatives": JsonSchema({"enum": list(range(20_000))}),
    "many choices": Choice([str(i) for i in range(20_000)]),
    "counted": Regex("a{1000000}"),
    "counted twice": Regex("(a{9000}){9000}"),
    "counted thrice": Regex("((a{1,100}){1,100}){1,100}"),
    "parentheses": Regex("(" * 50_000 + "a" + ")" * 50_000),
    "parentheses in Python": Gbnf("root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "a chain of rules": Gbnf(CHAIN),
}


@pytest.fixture
def without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause after a long trial: that is tested below."""
    monkeypatch.setattr(compiler_module, "PAUSE_FACTOR", 0.0)


@pytest.mark.usefixtures("without_pause")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_specs_are_refused(default_tokenizer: Tokenizer, name: str) -> None:
    compiler = GrammarCompiler(default_tokenizer, seconds=5.0)
    try:
        with pytest.raises(GrammarError):
            compiler.compile(HOSTILE[name])
        compiler.compile(Choice(["still", "here"]))
    finally:
        compiler.close()


def test_a_grammar_that_gets_slower_faults_alone(compiler: GrammarCompiler, default_tokenizer: Tokenizer) -> None:
    """Ambiguous without end: each token makes the next mask dearer, until the stream's own time is spent."""
    constraint = compiler.compile(Lark('start: x\nx: x x x | "" | "a"'))
    matcher = constraint.start(default_tokenizer.vocab_size, default_tokenizer.eos_token_ids)
    [a] = default_tokenizer.encode("a")
    began = time.thread_time()

    def write_on() -> None:
        for _ in range(2000):
            matcher.masks([a])
            matcher.advance([a])

    with pytest.raises(ConstraintFault):
        write_on()
    assert time.thread_time() - began < 60.0
    fresh = constraint.start(default_tokenizer.vocab_size, default_tokenizer.eos_token_ids)
    assert fresh.masks([]), "another stream of the same grammar is not at fault"


def test_what_holds_its_worker_is_ended_and_holds_nobody_else(
    default_tokenizer: Tokenizer,
) -> None:
    compiler = GrammarCompiler(default_tokenizer, seconds=4.0)
    ready = compiler.compile(Choice(["a", "b"]))
    failed: list[GrammarError] = []

    def compile_slowly() -> None:
        try:
            compiler.compile(Gbnf(CHAIN))
        except GrammarError as error:
            failed.append(error)

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    while thread.is_alive():  # what is compiled already is there at once
        assert compiler.compile(Choice(["a", "b"])) is ready
        time.sleep(0.01)
    thread.join()
    assert "too complex" in str(failed[0])
    compiler.close()


def test_compiled_grammars_are_cached_up_to_a_number(
    default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(default_tokenizer, max_cached=2)
    made: list[str] = []
    real = compiler_module.compiled
    monkeypatch.setattr(compiler_module, "compiled", lambda tokens, text: made.append(text) or real(tokens, text))
    for option in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(Choice([option]))
    assert len(made) == 4, "a, b, c, and b once more"
    compiler.close()


def test_lenient_schemas_pass_over_what_we_cannot_enforce(compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"oneOf": [{"type": "integer"}, {"type": "null"}]}}
    with pytest.raises(GrammarError):
        compiler.compile(JsonSchema(schema))
    assert compiler.compile(JsonSchema(schema, lenient=True))


def test_a_process_that_does_not_start_is_nobodys_grammar(
    default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = GrammarCompiler(default_tokenizer)
    with monkeypatch.context() as broken:
        broken.setattr("slipstream.workers.process.sys.executable", "/bin/false")
        with pytest.raises(GrammarsUnavailable, match="does not start"):
            mine.compile(Regex("a+"))
    mine.compile(Regex("a+"))  # and nothing of it was remembered
    mine.close()


def test_a_long_trial_is_followed_by_a_pause(default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached spec does not wait, a new one does; closing ends the pause."""
    monkeypatch.setattr("slipstream.grammar.compiler.LONG_SECONDS", 0.0)
    monkeypatch.setattr("slipstream.grammar.compiler.PAUSE_FACTOR", 1e6)
    compiler = GrammarCompiler(default_tokenizer)
    ready = compiler.compile(Choice(["a", "b"]))
    waiting = threading.Thread(target=lambda: compiler.compile(Choice(["c", "d"])))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    assert compiler.compile(Choice(["a", "b"])) is ready
    compiler.close()
    waiting.join(300.0)
    assert not waiting.is_alive()
    compiler.close()


def kill_worker(compiler: GrammarCompiler, but: int = 0) -> int:
    """As the system does when memory is short. ``but``: one that was killed before, so that this is the next."""
    end = time.monotonic() + 300.0
    while (pid := (compiler._trial and compiler._trial.pid) or 0) in (0, but):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_worker_killed_from_outside_is_nobodys_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "LONG_SECONDS", 5.0)
    compiler = GrammarCompiler(byte_tokenizer())
    compiler.compile(Choice(["a", "b"]))
    kill_worker(compiler)
    assert compiler.compile(Regex("[d-f]{3,9}")), "another process has tried it"
    assert compiler._pause_until == 0.0, "the ten seconds of a trial that were not spent are not paid for"
    compiler.close()


@pytest.mark.usefixtures("without_pause")
def test_a_worker_that_is_killed_again_and_again() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), seconds=300.0)
    compiler.compile(Choice(["a", "b"]))
    said: list[str] = []

    def compile_slowly() -> None:
        try:
            compiler.compile(Gbnf(CHAIN))
        except GrammarsUnavailable as error:
            said.append(str(error))

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    first = kill_worker(compiler)
    kill_worker(compiler, but=first)
    thread.join(300.0)
    assert "ended from outside" in said[0]
    compiler.compile(Choice(["c", "d"]))
    compiler.close()


def test_closing_does_not_wait_for_a_trial() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), seconds=3000.0)
    compiler.compile(Choice(["a", "b"]))
    said: list[str] = []

    def compile_slowly() -> None:
        try:
            compiler.compile(Gbnf(CHAIN))
        except GrammarsUnavailable as error:
            said.append(str(error))

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    thread.join(0.5)
    compiler.close()
    thread.join(300.0)
    assert "closed" in said[0]
