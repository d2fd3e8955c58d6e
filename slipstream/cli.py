"""argv -> options -> one command; errors of ours become one sentence and exit code 1.

Nothing else parses argv, except bench/arguments.py for `slipstream bench`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from slipstream import __version__
from slipstream.bench.arguments import bench_parsers, run_bench
from slipstream.commands.arguments import draft_setting, num_bytes
from slipstream.commands.options import SAMPLING_DEFAULTS, SHAPE_NAMES, ModelOptions
from slipstream.config import DTYPES, RUNNERS
from slipstream.errors import SlipstreamError, printable
from slipstream.sampling import MAX_DEPTH, SamplingParams
from slipstream.server.service.settings import LOG_FORMATS, LOG_LEVELS, ServerConfig

KEY_VARIABLE = "SLIPSTREAM_API_KEY"


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    try:
        code = run(args)
        sys.stdout.flush()
        return code
    except SlipstreamError as error:
        print(f"slipstream: {printable(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output has left: what is still buffered must not fail once more at exit.
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

            return plan(options, as_json=args.json, free=args.memory)
        case "bench":
            return run_bench(options, args)
        case "selfcheck":
            from slipstream.bench.kinds.selfcheck import selfcheck

            return selfcheck(options, args.tokens)
    raise AssertionError(args.command)


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
    plan.add_argument("--memory", type=num_bytes, help="free bytes of a device that need not be here, e.g. 139G")
    bench = commands.add_parser("bench", help="measure")
    check = commands.add_parser("selfcheck", help="check tokens and speed on this machine; prints a report to share")
    check.add_argument("--tokens", type=int, help="of each stream; default: 48, on a slow machine 8")
    for command in (serve, generate, chat, plan, check, *bench_parsers(bench)):
        _model_arguments(command)
    for command in (generate, chat):
        _sampling_arguments(command)
    for command in (serve, generate, chat):
        command.add_argument(
            "--sampling-defaults",
            default="model",
            choices=SAMPLING_DEFAULTS,
            help="where a request or a flag leaves sampling open: what the model's files recommend, or nothing: "
            "temperature 1 and no more; default: model",
        )
    return parser


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="folder, .gguf file or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--mtp", metavar="PATH", help="an MTP head in a safetensors file of its own")
    parser.add_argument("--shape", choices=SHAPE_NAMES, help="instead of a model: the shape of one, without files")
    parser.add_argument("--random-weights", action="store_true", help="make up the weights of a --shape on the device")
    parser.add_argument("--vocab", type=int, metavar="N", help="of a --shape: a vocabulary of N tokens")
    parser.add_argument("--runner", default="auto", choices=RUNNERS, help="auto: mlx on a Mac, torch elsewhere")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=DTYPES,
        help="how matrices are stored; int8, int4, fp8: quantized at load, int8 on a CPU or a GPU, the others on a GPU",
    )
    parser.add_argument(
        "--draft", type=draft_setting, default="adaptive", help=f"off, solo, adaptive, or 0 to {MAX_DEPTH}"
    )
    parser.add_argument("--enable-mtp", dest="draft", action="store_const", const="adaptive", help="--draft adaptive")
    parser.add_argument("--max-depth", "--spec-draft-n-max", type=int, default=4)
    parser.add_argument(
        "--p-min", "--spec-draft-p-min", type=float, default=0.0, help="stop drafting below this confidence"
    )
    parser.add_argument("--max-streams", type=int, default=16)
    parser.add_argument("--max-step-tokens", type=int, help="tokens a step feeds, prompts and drafts included")
    parser.add_argument("--kv-memory", type=num_bytes, help="for KV and recurrent states, e.g. 2G or 500M")
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--draft-vocab", type=int, help="draft among the first N tokens only; 0: all")
    # The first is offered by benchmarks only, the second by commands that sample as the model recommends.
    parser.set_defaults(simulate_acceptance=(), sampling_defaults="model")


def _server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="an address other than loopback needs --api-key")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument(
        "--api-key",
        action="append",
        help=f"required on every path but /health; or in the environment as {KEY_VARIABLE}; may be repeated",
    )
    parser.add_argument("--allowed-host", action="append", default=[], help="a name clients may call this server by")
    parser.add_argument("--cors-origin", action="append", default=[], help="whose pages may call this server; *: all")
    parser.add_argument("--served-name", action="append", default=[], help="a name clients must use; default: any")
    parser.add_argument("--strict", action="store_true", help="refuse requests with unknown fields")
    parser.add_argument("--queue-limit", type=int, default=256, help="requests that may wait; more get 429")
    parser.add_argument("--max-body", type=num_bytes, default=4 << 20, help="of a request, e.g. 4M")
    parser.add_argument("--keep-alive", type=float, default=10.0, help="seconds of silence before a sign of life")
    parser.add_argument("--drain", type=float, default=30.0, help="seconds that running requests get after SIGTERM")
    parser.add_argument("--max-connections", type=int, default=1024, help="at once; more get 503")
    parser.add_argument(
        "--write-timeout", type=float, default=60.0, help="seconds; who reads nothing so long is closed"
    )
    parser.add_argument("--log-level", default="info", choices=LOG_LEVELS, help="info: a line a request")
    parser.add_argument("--log-format", default="text", choices=LOG_FORMATS)


def server_config(args: argparse.Namespace) -> ServerConfig:
    return ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=tuple(args.api_key or filter(None, [os.environ.get(KEY_VARIABLE)])),
        allowed_hosts=tuple(args.allowed_host),
        cors_origins=tuple(args.cors_origin),
        names=tuple(args.served_name),
        strict=args.strict,
        queue_limit=args.queue_limit,
        max_body=args.max_body,
        keep_alive_seconds=args.keep_alive,
        drain_seconds=args.drain,
        max_connections=args.max_connections,
        write_seconds=args.write_timeout,
        log_level=args.log_level,
        log_format=args.log_format,
    )


def _sampling_arguments(parser: argparse.ArgumentParser) -> None:
    own = "default: the model's own, see --sampling-defaults"
    parser.add_argument("--temperature", type=float, help=f"0: always the likeliest token; {own}")
    parser.add_argument("--top-k", type=int, help=own)
    parser.add_argument("--top-p", type=float, help=own)
    parser.add_argument("--min-p", type=float, help=own)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--repetition-penalty", type=float, help=own)
    parser.add_argument("--presence-penalty", type=float, default=0.0)
    parser.add_argument("--frequency-penalty", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=512)


def model_options(args: argparse.Namespace) -> ModelOptions:
    return ModelOptions(**{name: getattr(args, name) for name in ModelOptions.__slots__})


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given. Raises ParamsError."""
    names = (
        "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "max_tokens",
    )  # fmt: skip
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    SamplingParams(**given)
    return given


if __name__ == "__main__":
    sys.exit(main())
