"""argv -> options -> one command. Nothing else parses argv; errors of ours become one sentence and exit code 1."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from slipstream import __version__
from slipstream.commands.options import ModelOptions
from slipstream.config import DTYPES
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.sampling import MAX_DEPTH, DraftSetting, SamplingParams, check_draft
from slipstream.server.settings import ServerConfig

KEY_VARIABLE = "SLIPSTREAM_API_KEY"


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        code = run(args)
        sys.stdout.flush()
        return code
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read us has left; what is still buffered must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def run(args: argparse.Namespace) -> int:
    """Commands are imported here: `--help` needs no array library."""
    options = model_options(args)
    match args.command:
        case "generate":
            from slipstream.commands.generate import generate

            return generate(options, args.prompt, sampling(args), raw=args.raw, as_json=args.json)
        case "chat":
            from slipstream.commands.chat import chat

            return chat(options, sampling(args), args.system)
        case "serve":
            from slipstream.commands.serve import serve

            return serve(options, server_config(args))
        case "plan":
            from slipstream.commands.plan import plan

            return plan(options, as_json=args.json)
        case "bench":
            return bench(options, args)
    raise AssertionError(args.command)


def bench(options: ModelOptions, args: argparse.Namespace) -> int:
    if args.what == "pause":
        from slipstream.bench.pause import pause

        return pause(options, args.streams[0], args.tokens)
    if args.what == "http":
        from slipstream.bench.http import http

        return http(options, args.streams, args.tokens, args.repeats)
    from slipstream.bench.prompts import prompts

    return prompts(options, args.policies, args.streams, args.tokens, args.repeats, peer=args.peer, out=args.out)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slipstream", description="LLM inference in which every stream drafts.")
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", help="answer prompts and leave")
    generate.add_argument("--prompt", action="append", required=True, help="may be given several times")
    generate.add_argument("--raw", action="store_true", help="continue the text; do not apply the chat template")
    generate.add_argument("--json", action="store_true", help="one JSON object per prompt: text, tokens, stats")
    serve = commands.add_parser("serve", help="the HTTP server and its page")
    _server_arguments(serve)
    chat = commands.add_parser("chat", help="talk in the terminal")
    chat.add_argument("--system", help="system prompt")
    plan = commands.add_parser("plan", help="print the memory a model takes, without loading it")
    plan.add_argument("--json", action="store_true")
    bench = _bench_parser(commands.add_parser("bench", help="measure"))
    for command in (serve, generate, chat, plan, *bench):
        _model_arguments(command)
    for command in (generate, chat):
        _sampling_arguments(command)
    return parser


def _bench_parser(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    kinds = parser.add_subparsers(dest="what", required=True)
    prompts = kinds.add_parser("prompts", help="nine prompts, policies side by side in one run")
    prompts.add_argument("--policies", type=_policies, default=["off", "adaptive"], help="default: off,adaptive")
    prompts.add_argument("--streams", type=_numbers, default=[1], help="streams at once, default 1; e.g. 1,8")
    prompts.add_argument("--tokens", type=int, default=192, help="per prompt")
    prompts.add_argument("--repeats", type=int, default=1, help="rounds over all policies; the fastest counts")
    prompts.add_argument("--peer", action="store_true", help="llama.cpp beside us, through the package xllamacpp")
    prompts.add_argument("--out", help="append the JSON line to this file")
    pause = kinds.add_parser("pause", help="the asyncio loop's worst pause while streams generate")
    pause.add_argument("--streams", type=_numbers, default=[8])
    pause.add_argument("--tokens", type=int, default=128, help="per stream")
    http = kinds.add_parser("http", help="the server against its engine called directly")
    http.add_argument("--streams", type=_numbers, default=[1, 16], help="default 1,16")
    http.add_argument("--tokens", type=int, default=128, help="per stream")
    http.add_argument("--repeats", type=int, default=5, help="turns of both ways")
    return [prompts, pause, http]


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="folder, .gguf file or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--mtp", metavar="PATH", help="an MTP head in a safetensors file of its own")
    parser.add_argument("--runner", default="torch", choices=["torch"])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="how matrices are stored")
    parser.add_argument("--draft", type=_draft, default="adaptive", help=f"off, solo, adaptive, or 0 to {MAX_DEPTH}")
    parser.add_argument("--enable-mtp", dest="draft", action="store_const", const="adaptive", help="--draft adaptive")
    parser.add_argument("--max-depth", "--spec-draft-n-max", type=int, default=4)
    parser.add_argument(
        "--p-min", "--spec-draft-p-min", type=float, default=0.0, help="stop drafting below this confidence"
    )
    parser.add_argument("--max-streams", type=int, default=16)
    parser.add_argument("--kv-memory", type=_bytes, help="for KV and recurrent states, e.g. 2G or 500M")
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--draft-vocab", type=int, help="draft among the first N tokens only; 0: all")


def _server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="any address but the machine's own needs --api-key")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--api-key", help=f"guards every path but /health; or in the environment as {KEY_VARIABLE}")
    parser.add_argument("--allowed-host", action="append", default=[], help="a name clients may call this server by")
    parser.add_argument("--served-name", action="append", default=[], help="a further name of the model for clients")
    parser.add_argument("--queue-limit", type=int, default=256, help="requests that may wait; more get 429")
    parser.add_argument("--max-body", type=_bytes, default=4 << 20, help="of a request, e.g. 4M")
    parser.add_argument("--keep-alive", type=float, default=10.0, help="seconds of silence before a sign of life")
    parser.add_argument("--drain", type=float, default=30.0, help="seconds that running requests get after SIGTERM")


def server_config(args: argparse.Namespace) -> ServerConfig:
    return ServerConfig(
        host=args.host,
        port=args.port,
        api_key=args.api_key or os.environ.get(KEY_VARIABLE) or None,
        allowed_hosts=tuple(args.allowed_host),
        names=tuple(args.served_name),
        queue_limit=args.queue_limit,
        max_body=args.max_body,
        keep_alive_seconds=args.keep_alive,
        drain_seconds=args.drain,
    )


def _sampling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--presence-penalty", type=float, default=0.0)
    parser.add_argument("--frequency-penalty", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=512)


def model_options(args: argparse.Namespace) -> ModelOptions:
    return ModelOptions(**{name: getattr(args, name) for name in ModelOptions.__slots__})


def sampling(args: argparse.Namespace) -> SamplingParams:
    names = (
        "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "max_tokens",
    )  # fmt: skip
    return SamplingParams(**{name: getattr(args, name) for name in names})


def _draft(text: str) -> DraftSetting:
    try:
        return check_draft(int(text) if text.lstrip("-").isdigit() else text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _policies(text: str) -> list[DraftSetting]:
    return [_draft(part) for part in text.split(",")]


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"whole numbers with commas between, not {text!r}") from error
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return numbers


def _bytes(text: str) -> int:
    units = {"K": 10**3, "M": 10**6, "G": 10**9}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    try:
        return int(float(number) * unit)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"a size such as 500M or 2G, not {text!r}") from error


if __name__ == "__main__":
    sys.exit(main())
