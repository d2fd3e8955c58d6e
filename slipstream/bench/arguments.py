"""The part of the command line that belongs to `slipstream bench`: a parser for each kind, and which function it calls.

What a benchmark imports is imported when it runs: `--help` needs no array library.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from slipstream.commands.arguments import depths, draft_settings, numbers, rates, span, targets
from slipstream.commands.flags import Commands, command_parser, flag
from slipstream.commands.options import ModelOptions, ReportOptions

Kinds = Callable[[str, str], argparse.ArgumentParser]
MODES: list[object] = ["off", "solo", 1, 2, 3, "adaptive"]


def bench_parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="KIND")

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        return command_parser(kinds, f"bench {name}", summary, "[MODEL] [flags]")

    simulating = [_streams(add), _step(add), _load(add), _prefill(add), _turns(add)]
    for each in simulating:
        _simulation_flag(each)
    others = [_prompts(add), _start(add), _grammar(add), _hostile(add), _peer(add), _pause(add), _http(add)]
    for each in (*simulating, *others):
        _report_flags(each, plots=each in simulating[:3])
    _hops(kinds)  # without the flags of a model: it has none
    return [*simulating, *others]


def _simulation_flag(parser: argparse.ArgumentParser) -> None:
    flag(
        parser.add_argument_group("simulation"),
        "--simulate-acceptance",
        type=rates,
        default=(),
        metavar="S1,S2,...",
        shown="compare drafts with samples",
        help="compute everything, accept by chance: the probability that the first 1, 2, ... drafts are all accepted",
    )


def _report_flags(parser: argparse.ArgumentParser, *, plots: bool) -> None:
    group = parser.add_argument_group("result")
    flag(group, "--out", metavar="FILE", shown="the terminal only", help="append the JSON line to this file")
    flag(
        group,
        "--save",
        nargs="?",
        const="",
        metavar="FOLDER",
        shown="not kept",
        help="keep the result in a file of this folder; without a name: bench/results/",
    )
    if plots:
        flag(group, "--plot", metavar="SVG", shown="not drawn", help="draw the result into this file")


def _measurement(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    return parser.add_argument_group("measurement")


def _modes(group: argparse._ArgumentGroup, default: list[object], text: str) -> None:
    flag(group, "--modes", type=draft_settings, default=default, metavar="LIST", help=f"draft modes {text}")


def _count(group: argparse._ArgumentGroup, name: str, default: int, text: str) -> None:
    flag(group, name, type=int, default=default, metavar="N", help=text)


def _counts(group: argparse._ArgumentGroup, name: str, default: list[int], text: str) -> None:
    flag(group, name, type=numbers, default=default, metavar="LIST", help=text)


def _random_prompt(group: argparse._ArgumentGroup) -> None:
    flag(
        group,
        "--prompt",
        type=int,
        metavar="N",
        shown="text, or 128 random ids for a --shape",
        help="prompts of N random token ids",
    )


def _prompts(add: Kinds) -> argparse.ArgumentParser:
    parser = add("prompts", "nine prompts, policies side by side in one run")
    group = _measurement(parser)
    flag(
        group,
        "--policies",
        type=draft_settings,
        default=["off", "adaptive"],
        metavar="LIST",
        help="draft policies to compare",
    )
    _counts(group, "--streams", [1], "streams at once, e.g. 1,8")
    _count(group, "--tokens", 192, "new tokens of each prompt")
    _count(group, "--repeats", 1, "rounds over all policies; the fastest counts")
    flag(group, "--peer", action="store_true", help="llama.cpp beside us, through the package xllamacpp")
    return parser


def _peer(add: Kinds) -> argparse.ArgumentParser:
    parser = add("peer", "llama.cpp beside us on the same weights: decoding and reading prompts")
    group = _measurement(parser)
    _counts(group, "--streams", [1, 4, 8], "streams at once")
    _modes(group, ["off"], "of ours")
    _random_prompt(group)
    _count(group, "--new", 64, "tokens each stream generates")
    _count(group, "--repeats", 5, "turns of both; medians are reported")
    _count(group, "--seed", 0, "of random prompts")
    flag(group, "--apart", action="store_true", help="one after the other: for files that fit into memory once only")
    return parser


def _pause(add: Kinds) -> argparse.ArgumentParser:
    parser = add("pause", "the asyncio loop's worst pause while streams generate")
    group = _measurement(parser)
    _counts(group, "--streams", [8], "streams at once; the first number counts")
    _count(group, "--tokens", 128, "new tokens of each stream")
    return parser


def _http(add: Kinds) -> argparse.ArgumentParser:
    parser = add("http", "the server against its engine called directly")
    group = _measurement(parser)
    _counts(group, "--streams", [1, 16], "streams at once")
    _count(group, "--tokens", 128, "new tokens of each stream")
    _count(group, "--repeats", 5, "turns of both ways")
    return parser


def _hops(commands: Commands) -> argparse.ArgumentParser:
    summary = "what proxies and routers add to each chunk of a stream"
    parser = command_parser(commands, "bench hops", summary, "--target NAME=URL,... [flags]")
    group = _measurement(parser)
    flag(
        group,
        "--target",
        type=targets,
        required=True,
        metavar="NAME=URL,...",
        shown="none, at least one is needed",
        help="addresses of paced servers and of what stands before them; A+B: streams are spread over both",
    )
    _counts(group, "--streams", [16, 64], "streams at once")
    _count(group, "--tokens", 200, "chunks of each stream")
    _count(group, "--repeats", 3, "turns of all targets; medians are reported")
    flag(group, "--api-key", metavar="KEY", shown="none", help="sent to all of them")
    return parser


def _streams(add: Kinds) -> argparse.ArgumentParser:
    parser = add("streams", "output tokens a second by number of streams and draft mode")
    group = _measurement(parser)
    _counts(group, "--streams", [1, 2, 4, 8, 16], "streams at once")
    _modes(group, MODES, "side by side in one run")
    flag(group, "--temperature", type=rates, default=(0.0,), metavar="LIST", help="one or several, e.g. 0,1")
    _random_prompt(group)
    _count(group, "--new", 256, "tokens each stream generates")
    _count(group, "--warm", 48, "new tokens of each setting's unmeasured run")
    _count(group, "--repeats", 1, "rounds over all modes; the fastest counts")
    flag(group, "--mix", action="store_true", help="also: half of the streams plain, half drafting")
    _count(group, "--seed", 0, "of prompts, sampling and simulated acceptance")
    return parser


def _step(add: Kinds) -> argparse.ArgumentParser:
    parser = add("step", "time of a step by rows and depth; fraction of the bandwidth limit")
    group = _measurement(parser)
    _counts(group, "--rows", [1, 2, 4, 8, 16], "rows of a step")
    flag(group, "--depths", type=depths, default=[0, 1, 2, 3], metavar="LIST", help="drafts a row verifies")
    _count(group, "--context", 128, "tokens in each row's cache")
    _count(group, "--steps", 20, "steps timed of each kind")
    return parser


def _load(add: Kinds) -> argparse.ArgumentParser:
    parser = add("load", "Poisson arrivals: time to first token and between tokens")
    group = _measurement(parser)
    flag(group, "--rate", type=rates, default=(1.0,), metavar="LIST", help="requests a second, one or several")
    _modes(group, ["off", "adaptive"], "one after the other")
    _count(group, "--requests", 64, "sent at most, for each rate and mode")
    flag(group, "--seconds", type=float, default=60.0, metavar="X", help="no requests are sent later")
    for name, what in (("--prompt", "of each prompt"), ("--new", "that each request generates")):
        flag(group, name, type=span, default=(64, 256), metavar="A-B", shown="64-256", help=f"tokens {what}, a range")
    flag(group, "--temperature", type=float, default=0.0, metavar="T", help="of every request")
    _count(group, "--seed", 0, "of arrivals and lengths")
    return parser


def _prefill(add: Kinds) -> argparse.ArgumentParser:
    parser = add("prefill", "speed of reading prompts, the head's share, and what running streams feel")
    group = _measurement(parser)
    _counts(group, "--lengths", [1024, 16384], "tokens of the prompts")
    _modes(group, ["off", "adaptive"], "of the running streams")
    _count(group, "--streams", 8, "that run while the longest prompt is read")
    _count(group, "--quiet-steps", 100, "steps measured before it comes")
    _count(group, "--repeats", 3, "of each prompt; the fastest counts")
    return parser


def _turns(add: Kinds) -> argparse.ArgumentParser:
    parser = add("turns", "prompts that begin like earlier ones: time to first token with the prefix cache and without")
    group = _measurement(parser)
    flag(
        group,
        "--scenarios",
        type=lambda text: tuple(text.split(",")),
        metavar="LIST",
        shown="turns,edit,fan-out,agents,cold",
        help="what is measured",
    )
    _count(group, "--prompt", 2048, "tokens of the first prompt and of the shared prefix")
    _count(group, "--turns", 10, "of the conversation; at every fifth the thinking before it is left out")
    flag(
        group,
        "--added",
        type=span,
        default=(100, 300),
        metavar="A-B",
        shown="100-300",
        help="tokens a turn adds, a range",
    )
    _count(group, "--new", 32, "tokens of each answer")
    _count(group, "--streams", 8, "requests at once in fan-out and cold")
    _count(group, "--sessions", 4, "of recorded agents at once")
    _count(group, "--requests", 8, "of each of these sessions")
    _count(group, "--shrink", 16, "divides the tokens of the recorded prompts")
    _count(group, "--repeats", 3, "rounds of fan-out and cold; medians are reported")
    flag(group, "--peer", action="store_true", help="llama.cpp with its prompt cache beside us, in turns")
    _count(group, "--seed", 0, "of all that is made up")
    return parser


def _start(add: Kinds) -> argparse.ArgumentParser:
    parser = add("start", "seconds from process start to the first token")
    group = _measurement(parser)
    _count(group, "--repeats", 2, "processes started; the first may meet cold files")
    flag(group, "--timeout", type=float, default=600.0, metavar="SECONDS", help="for one process")
    return parser


def _grammar(add: Kinds) -> argparse.ArgumentParser:
    parser = add("grammar", "constrained streams: cost of masks, acceptance, what plain neighbours feel")
    group = _measurement(parser)
    _count(group, "--streams", 8, "at once, half of them constrained")
    _count(group, "--depth", 2, "drafts of every stream")
    flag(group, "--temperature", type=float, default=1.0, metavar="T", help="of every stream")
    _count(group, "--new", 128, "tokens each stream generates")
    _count(group, "--repeats", 3, "rounds of both batches; medians are reported")
    return parser


def _hostile(add: Kinds) -> argparse.ArgumentParser:
    parser = add("hostile", "a server's streams while others send grammars made to do harm")
    group = _measurement(parser)
    _count(group, "--streams", 4, "at once")
    flag(group, "--seconds", type=float, default=20.0, metavar="X", help="of each stretch")
    _count(group, "--repeats", 3, "rounds; medians are reported")
    return parser


def run_bench(options: ModelOptions, args: argparse.Namespace) -> int:
    to = ReportOptions(tuple(args.argv), *(getattr(args, name, None) for name in ("out", "save", "plot")))
    if args.what == "turns":
        return _run_turns(options, args, to)
    if args.what == "hops":
        return _run_hops(args)
    return _run(_without_prefix_cache(options), args, to)


def _without_prefix_cache(options: ModelOptions) -> ModelOptions:
    """The same prompts come again, to be read again, whatever the settings of this place say about caches."""
    return replace(options, prefix_cache="off", cache_host=None, cache_dir=None, cache_disk=None)


def _run_turns(options: ModelOptions, args: argparse.Namespace, to: ReportOptions) -> int:
    from slipstream.bench.conversations.settings import SCENARIOS, TurnsSettings
    from slipstream.bench.kinds.turns import bench_turns

    sizes = (args.prompt, args.turns, args.added, args.new, args.streams, args.sessions, args.requests)
    more = (args.shrink, args.repeats, args.peer, args.seed)
    return bench_turns(options, TurnsSettings(args.scenarios or SCENARIOS, *sizes, *more), to)


def _run_hops(args: argparse.Namespace) -> int:
    from slipstream.bench.kinds.hops import HopsSettings, hops

    return hops(HopsSettings(args.target, args.streams, args.tokens, args.repeats, args.api_key))


def _run(options: ModelOptions, args: argparse.Namespace, to: ReportOptions) -> int:
    match args.what:
        case "prompts":
            from slipstream.bench.kinds.prompts import prompts

            return prompts(options, args.policies, args.streams, args.tokens, args.repeats, to, peer=args.peer)
        case "peer":
            from slipstream.bench.kinds.peer import PeerSettings, peer

            peer_settings = PeerSettings(
                args.streams, args.modes, args.prompt, args.new, args.repeats, args.seed, args.apart
            )
            return peer(options, peer_settings, to)
        case "pause":
            from slipstream.bench.kinds.pause import pause

            return pause(options, args.streams[0], args.tokens, to)
        case "http":
            from slipstream.bench.kinds.http import http

            return http(options, args.streams, args.tokens, args.repeats, to)
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
