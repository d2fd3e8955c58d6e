"""Every error Slipstream raises on purpose.

SlipstreamError
├── ConfigError          an option or parameter that cannot be used as given
│   └── ParamsError      a SamplingParams field out of range
├── LoadError            a file that cannot be used: names the file and what was expected
│   ├── CorruptFile      truncated, damaged, or not the format its name claims
│   ├── UnknownModel     an architecture, tensor type or tokenizer we do not have
│   ├── MissingTensor    the checkpoint lacks a tensor the model needs, or it has the wrong shape
│   └── HeadError        an MTP head that does not fit: an error where it was given, a note where it was found
├── DownloadError        a model that could not be fetched, or whose digest is wrong
├── RequestError         a request that can never run: empty, not text
│   ├── PromptTooLong    its prompt does not fit the context
│   ├── GrammarError     a schema, pattern or grammar that cannot be used: says where
│   └── TemplateLimit    its chat takes the model's template too long, or too much memory
├── ConstraintFault      a stream whose constraint cannot be followed any further: it ends, the others go on
├── GrammarsUnavailable  the process that tries grammars cannot be asked: no grammar is at fault
├── TemplatesUnavailable the process that renders chat templates cannot be asked: no request is at fault
└── EngineDead           the engine thread ended; carries what ended it
"""

import unicodedata

UNPRINTABLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, invisible marks, surrogates, line separators


def printable(text: str, keep: str = "") -> str:
    """Without what a terminal acts on or does not show: `\\x1b` for an escape. Model files can hold any character."""
    if text.isprintable():
        return text
    return "".join(each if each in keep else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    hidden = unicodedata.category(character) in UNPRINTABLE
    return character.encode("unicode_escape").decode("ascii") if hidden else character


class SlipstreamError(Exception):
    """Root of the tree."""


class ConfigError(SlipstreamError):
    """An option or parameter that cannot be used as given."""


class ParamsError(ConfigError):
    """A sampling parameter out of range."""


class LoadError(SlipstreamError):
    """A file that cannot be used."""


class CorruptFile(LoadError):
    """Truncated, damaged, or not the format its name claims."""


class UnknownModel(LoadError):
    """An architecture, tensor type or tokenizer we do not have."""


class MissingTensor(LoadError):
    """A tensor is absent or has the wrong shape."""


class HeadError(LoadError):
    """An MTP head that does not fit its target model."""


class DownloadError(SlipstreamError):
    """A model that could not be fetched, or whose digest is wrong."""


class RequestError(SlipstreamError):
    """A request that can never run."""


class PromptTooLong(RequestError):
    """The prompt does not fit the context; says how long it is and what fits."""


class GrammarError(RequestError):
    """A schema, pattern or grammar that cannot be used; says where."""


class TemplateLimit(RequestError):
    """The chat template is over its limits of time, memory or length."""


class ConstraintFault(SlipstreamError):
    """A stream's constraint cannot be followed any further."""


class GrammarsUnavailable(SlipstreamError):
    """The process that tries grammars cannot be asked."""


class TemplatesUnavailable(SlipstreamError):
    """The process that renders chat templates cannot be asked."""


class EngineDead(SlipstreamError):
    """The engine thread ended."""
