"""The flags of the commands, in groups. Each has a help text that ends with its default."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any, TypeAlias

from slipstream.commands.arguments import draft_setting, num_bytes
from slipstream.commands.options import SAMPLING_DEFAULTS, SHAPE_NAMES, STORED_NAMES, SWITCH
from slipstream.config import DTYPES, KV_DTYPES, RUNNERS, STATE_DTYPES
from slipstream.sampling import MAX_DEPTH

HELP_COLUMN = 28
HARD_SPACE = "\xa0"
SHORT = 32  # characters
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=HELP_COLUMN)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Neither a flag nor a short default is broken."""
        return [line.replace(HARD_SPACE, " ") for line in textwrap.wrap(text, width, break_on_hyphens=False)]

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """All spellings of a flag, then its value once."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, action.dest.upper())
        return f"{', '.join(action.option_strings)} {value}"


def command_parser(commands: Commands, name: str, summary: str, usage: str = "") -> argparse.ArgumentParser:
    """``usage``: what follows the command; empty: as argparse writes it."""
    return commands.add_parser(
        name.split()[-1],
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        usage=f"slipstream {name} {usage}" if usage else None,
        formatter_class=Formatter,
    )


def flag(
    group: argparse._ActionsContainer, *names: str, help: str, default: Any = None, shown: str = "", **how: Any
) -> None:
    """A flag. ``shown``: its default in words, where the value itself does not say it."""
    if how.get("action") in ("store_true", "store_const"):
        shown = shown or "off"
    if not shown:
        shown = ",".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
    assert shown not in ("", "None"), f"{names[0]}: its default needs words"
    if how.get("action") != "store_true":
        how["default"] = default
    said = f"(default: {shown})"
    if len(said) <= SHORT:
        said = said.replace(" ", HARD_SPACE)
    group.add_argument(*names, help=f"{help} {said}", **how)


def model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"folder, .gguf file, hub id, or hub id:QUANT of a GGUF (default:{HARD_SPACE}SmolLM2-135M-Instruct)",
    )
    flag(group, "--mtp", metavar="PATH", shown="the model's own", help="an MTP head in a safetensors or .gguf file")
    flag(
        group,
        "--dtype",
        default="auto",
        choices=DTYPES,
        metavar="TYPE",
        help=f"how matrices are stored: {', '.join(DTYPES)}; int8, int4 and fp8 quantize at load, int8 on a CPU or a "
        "GPU, the others on a GPU",
    )
    flag(
        group,
        "--fp8-activations",
        default="off",
        choices=SWITCH,
        help="matrices in FP8 on a GPU: products round their activations to FP8, too, where that is faster",
    )
    flag(group, "--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:N")
    flag(group, "--runner", default="auto", choices=RUNNERS, help="auto: mlx on a Mac, torch elsewhere")
    flag(
        group,
        "--shape",
        choices=SHAPE_NAMES,
        metavar="NAME",
        shown="a real model",
        help=f"instead of a model, the shape of one without files: {', '.join(SHAPE_NAMES)}",
    )
    flag(group, "--random-weights", action="store_true", help="make up the weights of a --shape on the device")
    flag(
        group,
        "--stored-as",
        choices=STORED_NAMES,
        metavar="MIX",
        shown="bfloat16",
        help=f"of a --shape: weights in the types of a quantised file, {', '.join(STORED_NAMES)}",
    )
    flag(
        group, "--vocab", type=int, metavar="N", shown="the shape's own", help="of a --shape: a vocabulary of N tokens"
    )


def batch_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory and batch")
    flag(group, "--max-streams", type=int, default=16, metavar="N", help="streams that run at once; others wait")
    flag(
        group,
        "--max-context",
        type=int,
        metavar="N",
        shown="the model's own, if it fits",
        help="tokens of a prompt and its answer together",
    )
    flag(
        group,
        "--memory",
        type=num_bytes,
        metavar="SIZE",
        shown="what is free",
        help="of the device, for weights, caches and everything else, e.g. 24GB",
    )
    flag(
        group,
        "--kv-memory",
        type=num_bytes,
        metavar="SIZE",
        shown="from what is left",
        help="of it, for KV and recurrent states, e.g. 2GiB or 500MB",
    )
    flag(
        group,
        "--kv-dtype",
        default="auto",
        choices=KV_DTYPES,
        help="how keys and values are cached; auto: in the type of activations; fp8: in a byte each, so that twice the "
        "tokens of bfloat16 fit, or four times those of float32",
    )
    states = "how recurrent states are stored on a CUDA GPU: in 16 bits they take half the memory; sums stay in float32"
    flag(group, "--state-dtype", default="float32", choices=STATE_DTYPES, help=states)
    flag(
        group,
        "--max-step-tokens",
        type=int,
        metavar="N",
        shown="512, or room for a full draft of every stream",
        help="tokens a step feeds, prompts and drafts included; on a GPU more where prompts came together",
    )
    flag(
        group,
        "--max-slowdown",
        type=float,
        default=2.0,
        metavar="X",
        help="a step that decodes may take X times as long for the prompt tokens that it reads",
    )
    _prefix_cache_flags(group)


def _prefix_cache_flags(group: argparse._ArgumentGroup) -> None:
    flag(
        group,
        "--prefix-cache",
        default="on",
        choices=SWITCH,
        help="a prompt that begins like an earlier one is read only from where they part",
    )
    flag(
        group,
        "--cache-host",
        type=num_bytes,
        metavar="SIZE",
        shown="none, or enough for --cache-dir",
        help="host memory for cached prompts that the device has no room for",
    )
    flag(
        group,
        "--cache-dir",
        metavar="FOLDER",
        shown="none",
        help="a folder for cached prompts: they are there after a restart",
    )
    flag(group, "--cache-disk", type=num_bytes, metavar="SIZE", shown="20GB", help="of that folder, at most")


def draft_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafting")
    flag(
        group,
        "--draft",
        type=draft_setting,
        default="adaptive",
        metavar="HOW",
        help=f"off, solo (only while a stream is alone), adaptive, or a fixed depth from 0 to {MAX_DEPTH}",
    )
    flag(
        group,
        "--enable-mtp",
        dest="draft",
        action="store_const",
        const="adaptive",
        default="adaptive",
        shown="on",
        help="the same as --draft adaptive",
    )
    flag(
        group,
        "--max-depth",
        "--spec-draft-n-max",
        type=int,
        default=4,
        metavar="N",
        help=f"drafts of a stream in one step, at most {MAX_DEPTH}",
    )
    flag(
        group,
        "--p-min",
        "--spec-draft-p-min",
        type=float,
        default=0.0,
        metavar="P",
        help="stop drafting below this confidence of the head",
    )
    flag(
        group,
        "--draft-vocab",
        type=int,
        metavar="N",
        shown="by the vocabulary's size",
        help="draft among the first N tokens only; 0: all",
    )


def sampling_defaults_flag(group: argparse._ActionsContainer) -> None:
    flag(
        group,
        "--sampling-defaults",
        default="model",
        choices=SAMPLING_DEFAULTS,
        help="where a request or a flag leaves sampling open; model: what the model's files recommend; neutral: "
        "temperature 1 and no more",
    )


def sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    own = "the model's own"
    flag(group, "--temperature", type=float, metavar="T", shown=own, help="0: always the likeliest token")
    flag(group, "--top-k", type=int, metavar="K", shown=own, help="sample among the K likeliest tokens; 0: all")
    flag(group, "--top-p", type=float, metavar="P", shown=own, help="among the likeliest tokens that sum to P")
    flag(group, "--min-p", type=float, metavar="P", shown=own, help="among tokens P times as likely as the likeliest")
    flag(
        group, "--seed", type=int, metavar="N", shown="a new one each time", help="the same seed draws the same tokens"
    )
    flag(
        group,
        "--repetition-penalty",
        type=float,
        metavar="X",
        shown=own,
        help="divides the logits of tokens in prompt and answer; 1: none",
    )
    flag(
        group,
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="taken from the logits of tokens in the answer",
    )
    flag(
        group,
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="the same for each time they occur",
    )
    flag(group, "--max-tokens", type=int, default=512, metavar="N", help="of an answer")
    sampling_defaults_flag(group)


def settings_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings")
    flag(
        group,
        "--config",
        metavar="PATH",
        shown="slipstream.toml here, if there is one",
        help="a file with settings; '': none",
    )
    flag(group, "--print-config", action="store_true", help="print every setting and where it comes from, and leave")
