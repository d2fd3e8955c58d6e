"""The part of the command line that belongs to `slipstream bench`: a parser for each kind, and which function it calls.

What a benchmark imports is imported when it runs: `--help` needs no array library.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from slipstream.commands.arguments import depths, draft_settings, numbers, rates, span
from slipstream.commands.options import ModelOptions, ReportOptions

Kinds = Callable[..., argparse.ArgumentParser]
MODES = ["off", "solo", 1, 2, 3, "adaptive"]


def bench_parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    add = parser.add_subparsers(dest="what", required=True).add_parser
    simulating = [_streams(add), _step(add), _load(add), _prefill(add)]
    for each in simulating:
        _simulation_argument(each)
    reporting = [*simulating, _prompts(add), _start(add), _grammar(add), _hostile(add), _peer(add)]
    for each in reporting:
        _report_arguments(each)
    return [*reporting, _pause(add), _http(add)]


def _simulation_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--simulate-acceptance",
        type=rates,
        default=argparse.SUPPRESS,
        metavar="S1,S2,...",
        help="compute everything, accept by chance: the probability that the first 1, 2, ... drafts are all accepted",
    )


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", help="append the JSON line to this file")
    parser.add_argument(
        "--save", nargs="?", const="", metavar="FOLDER", help="keep the result; default: bench/results/"
    )


def _modes(parser: argparse.ArgumentParser, default: list[object], text: str) -> None:
    shown = ",".join(map(str, default))
    parser.add_argument("--modes", type=draft_settings, default=default, help=f"draft modes {text}, default {shown}")


def _prompts(add: Kinds) -> argparse.ArgumentParser:
    parser = add("prompts", help="nine prompts, policies side by side in one run")
    parser.add_argument("--policies", type=draft_settings, default=["off", "adaptive"], help="default: off,adaptive")
    parser.add_argument("--streams", type=numbers, default=[1], help="streams at once, default 1; e.g. 1,8")
    parser.add_argument("--tokens", type=int, default=192, help="per prompt")
    parser.add_argument("--repeats", type=int, default=1, help="rounds over all policies; the fastest counts")
    parser.add_argument("--peer", action="store_true", help="llama.cpp beside us, through the package xllamacpp")
    return parser


def _peer(add: Kinds) -> argparse.ArgumentParser:
    parser = add("peer", help="llama.cpp beside us on the same weights: decoding and reading prompts")
    parser.add_argument("--streams", type=numbers, default=[1, 4, 8], help="default 1,4,8")
    _modes(parser, ["off"], "of ours")
    parser.add_argument("--prompt", type=int, help="random token ids; default: text, or 128 ids for a --shape")
    parser.add_argument("--new", type=int, default=64, help="tokens each stream generates")
    parser.add_argument("--repeats", type=int, default=5, help="turns of both; medians are reported")
    parser.add_argument("--seed", type=int, default=0, help="of random prompts")
    return parser


def _pause(add: Kinds) -> argparse.ArgumentParser:
    parser = add("pause", help="the asyncio loop's worst pause while streams generate")
    parser.add_argument("--streams", type=numbers, default=[8])
    parser.add_argument("--tokens", type=int, default=128, help="per stream")
    return parser


def _http(add: Kinds) -> argparse.ArgumentParser:
    parser = add("http", help="the server against its engine called directly")
    parser.add_argument("--streams", type=numbers, default=[1, 16], help="default 1,16")
    parser.add_argument("--tokens", type=int, default=128, help="per stream")
    parser.add_argument("--repeats", type=int, default=5, help="turns of both ways")
    return parser


def _streams(add: Kinds) -> argparse.ArgumentParser:
    parser = add("streams", help="output tokens a second by number of streams and draft mode")
    parser.add_argument("--streams", type=numbers, default=[1, 2, 4, 8, 16], help="default 1,2,4,8,16")
    _modes(parser, MODES, "side by side in one run")
    parser.add_argument("--temperature", type=rates, default=(0.0,), help="one or several, e.g. 0,1; default 0")
    parser.add_argument("--prompt", type=int, help="random token ids; default: text, or 128 ids for a --shape")
    parser.add_argument("--new", type=int, default=256, help="tokens each stream generates")
    parser.add_argument("--warm", type=int, default=48, help="new tokens of each setting's unmeasured run")
    parser.add_argument("--repeats", type=int, default=1, help="rounds over all modes; the fastest counts")
    parser.add_argument("--mix", action="store_true", help="also: half of the streams plain, half drafting")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, sampling and simulated acceptance")
    parser.add_argument("--plot", metavar="SVG", help="draw streams against tokens a second")
    return parser


def _step(add: Kinds) -> argparse.ArgumentParser:
    parser = add("step", help="time of a step by rows and depth; fraction of the bandwidth limit")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16], help="default 1,2,4,8,16")
    parser.add_argument("--depths", type=depths, default=[0, 1, 2, 3], help="drafts a row verifies, default 0,1,2,3")
    parser.add_argument("--context", type=int, default=128, help="tokens in each row's cache")
    parser.add_argument("--steps", type=int, default=20, help="steps timed of each kind")
    parser.add_argument("--plot", metavar="SVG", help="draw rows against the time of a step")
    return parser


def _load(add: Kinds) -> argparse.ArgumentParser:
    parser = add("load", help="Poisson arrivals: time to first token and between tokens")
    parser.add_argument("--rate", type=rates, default=(1.0,), help="requests a second, one or several; default 1")
    _modes(parser, ["off", "adaptive"], "one after the other")
    parser.add_argument("--requests", type=int, default=64, help="sent at most, for each rate and mode")
    parser.add_argument("--seconds", type=float, default=60.0, help="no requests are sent later")
    parser.add_argument("--prompt", type=span, default=(64, 256), help="tokens, a range; default 64-256")
    parser.add_argument("--new", type=span, default=(64, 256), help="tokens, a range; default 64-256")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    parser.add_argument("--plot", metavar="SVG", help="draw the rate against the time per token")
    return parser


def _prefill(add: Kinds) -> argparse.ArgumentParser:
    parser = add("prefill", help="speed of reading prompts, the head's share, and what running streams feel")
    parser.add_argument("--lengths", type=numbers, default=[1024, 16384], help="tokens, default 1024,16384")
    _modes(parser, ["off", "adaptive"], "of the running streams")
    parser.add_argument("--streams", type=int, default=8, help="that run while the longest prompt is read")
    parser.add_argument("--quiet-steps", type=int, default=100, help="steps measured before it comes")
    parser.add_argument("--repeats", type=int, default=3, help="of each prompt; the fastest counts")
    return parser


def _start(add: Kinds) -> argparse.ArgumentParser:
    parser = add("start", help="seconds from process start to the first token")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0)
    return parser


def _grammar(add: Kinds) -> argparse.ArgumentParser:
    parser = add("grammar", help="constrained streams: cost of masks, acceptance, what plain neighbours feel")
    parser.add_argument("--streams", type=int, default=8, help="half of them constrained, default 8")
    parser.add_argument("--depth", type=int, default=2, help="drafts of every stream, default 2")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--new", type=int, default=128, help="tokens each stream generates")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of both batches; medians are reported")
    return parser


def _hostile(add: Kinds) -> argparse.ArgumentParser:
    parser = add("hostile", help="a server's streams while others send grammars made to do harm")
    parser.add_argument("--streams", type=int, default=4, help="default 4")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each stretch, default 20")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; medians are reported")
    return parser


def run_bench(options: ModelOptions, args: argparse.Namespace) -> int:
    to = ReportOptions(tuple(args.argv), *(getattr(args, name, None) for name in ("out", "save", "plot")))
    match args.what:
        case "prompts":
            from slipstream.bench.kinds.prompts import prompts

            return prompts(options, args.policies, args.streams, args.tokens, args.repeats, to, peer=args.peer)
        case "peer":
            from slipstream.bench.kinds.peer import PeerSettings, peer

            peer_settings = PeerSettings(args.streams, args.modes, args.prompt, args.new, args.repeats, args.seed)
            return peer(options, peer_settings, to)
        case "pause":
            from slipstream.bench.kinds.pause import pause

            return pause(options, args.streams[0], args.tokens)
        case "http":
            from slipstream.bench.kinds.http import http

            return http(options, args.streams, args.tokens, args.repeats)
        case "streams":
            from slipstream.bench.kinds.streams import StreamsSettings, streams

            settings = (args.streams, args.modes, args.temperature, args.prompt, args.new, args.warm, args.repeats)
            return streams(options, StreamsSettings(*settings, args.mix, args.seed), to)
        case "step":
            from slipstream.bench.kinds.step import StepSettings, step

            return step(options, StepSettings(args.rows, args.depths, args.context, args.steps), to)
        case "load":
            from slipstream.bench.kinds.load import LoadSettings, load

            spans = (args.requests, args.seconds, args.prompt, args.new, args.temperature, args.seed)
            return load(options, LoadSettings(args.rate, args.modes, *spans), to)
        case "prefill":
            from slipstream.bench.kinds.prefill import PrefillSettings, prefill

            counts = (args.streams, args.quiet_steps, args.repeats)
            return prefill(options, PrefillSettings(args.lengths, args.modes, *counts), to)
        case "start":
            from slipstream.bench.kinds.start import StartSettings, start

            return start(options, StartSettings(args.repeats, args.timeout), to)
        case "grammar":
            from slipstream.bench.kinds.grammar import GrammarSettings, grammar

            grammar_settings = GrammarSettings(args.streams, args.depth, args.temperature, args.new, args.repeats)
            return grammar(options, grammar_settings, to)
        case "hostile":
            from slipstream.bench.kinds.hostile import HostileSettings, hostile

            return hostile(options, HostileSettings(args.streams, args.seconds, args.repeats), to)
    raise AssertionError(args.what)
