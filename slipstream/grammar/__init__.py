"""Structured output: formats of the text, compiled into constraints by llguidance.

GrammarCompiler(tokenizer).compile(JsonSchema({...})) -> a Constraint for SamplingParams
"""

from slipstream.grammar.compiler import GrammarCompiler
from slipstream.grammar.specs import Choice, Gbnf, JsonObject, JsonSchema, Lark, Regex, Spec

__all__ = ["Choice", "Gbnf", "GrammarCompiler", "JsonObject", "JsonSchema", "Lark", "Regex", "Spec"]
