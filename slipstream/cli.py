"""argv -> options -> one command; errors of ours become one sentence and exit code 1.

The flags are in commands/flags.py and bench/arguments.py; commands/configuration.py adds environment and file.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from slipstream import __version__
from slipstream.bench.arguments import bench_parsers, run_bench
from slipstream.commands.completion import SHELLS, completion_script
from slipstream.commands.configuration import parse
from slipstream.commands.flags import (
    Commands,
    Formatter,
    batch_flags,
    command_parser,
    draft_flags,
    flag,
    model_flags,
    sampling_defaults_flag,
    sampling_flags,
    settings_flags,
)
from slipstream.commands.options import ModelOptions
from slipstream.commands.progress import clear_line
from slipstream.commands.server_flags import access_flags, log_flags, server_flags
from slipstream.errors import SlipstreamError, printable
from slipstream.sampling import SamplingParams
from slipstream.server.service.settings import ServerConfig

OUTLIVE = ("slipstream-engine", "slipstream-load", "slipstream-fetch")  # threads that may still run when we leave


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parse(build_parser(), argv)
        args.argv = sys.argv[1:] if argv is None else argv
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
        clear_line()
        return 130


def entry() -> int:
    """`main` for a process of its own: it does not wait for threads that still fetch, load or compute."""
    code = main()
    # Native code aborts a process whose interpreter is gone: that some of our threads are in, and MLX's own threads.
    if "mlx.core" in sys.modules or any(thread.name in OUTLIVE for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def run(args: argparse.Namespace) -> int:
    """Commands are imported here: `--help` needs no array library."""
    options = model_options(args)
    match args.command:
        case "generate":
            from slipstream.commands.generate import generate

            return generate(options, args.prompt or [], sampling(args), raw=args.raw, as_json=args.json)
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
            return run_bench(options, args)
        case "selfcheck":
            from slipstream.bench.kinds.selfcheck import selfcheck

            return selfcheck(options, args.tokens)
        case "completion":
            print(completion_script(build_parser(), args.shell))
            return 0
    raise AssertionError(args.command)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "slipstream",
        description="LLM inference in which every stream drafts.",
        epilog="`slipstream COMMAND --help` lists a command's flags. Each may also stand in the environment or in "
        "slipstream.toml.",
        formatter_class=Formatter,
    )
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    serve = command_parser(commands, "serve", "the HTTP server and its page", "[MODEL] [flags]")
    model_commands = [
        serve,
        _generate(commands),
        _chat(commands),
        _plan(commands),
        _selfcheck(commands),
        *bench_parsers(command_parser(commands, "bench", "measure")),
    ]
    for command in model_commands:
        model_flags(command)
        batch_flags(command)
        draft_flags(command)
    sampling_defaults_flag(serve.add_argument_group("sampling"))
    server_flags(serve)
    access_flags(serve)
    log_flags(serve)
    for command in model_commands:
        settings_flags(command)
    _completion(commands)
    return parser


def _generate(commands: Commands) -> argparse.ArgumentParser:
    parser = command_parser(commands, "generate", "answer prompts and leave", "--prompt TEXT [MODEL] [flags]")
    group = parser.add_argument_group("prompts and answers")
    flag(
        group,
        "--prompt",
        action="append",
        metavar="TEXT",
        shown="none, one is needed",
        help="what to answer; -: read it from standard input; may be repeated",
    )
    flag(group, "--raw", action="store_true", help="continue the text; do not apply the chat template")
    flag(group, "--json", action="store_true", help="one JSON object per prompt: text, tokens, stats")
    sampling_flags(parser)
    return parser


def _chat(commands: Commands) -> argparse.ArgumentParser:
    parser = command_parser(commands, "chat", "talk in the terminal", "[MODEL] [flags]")
    flag(parser.add_argument_group("conversation"), "--system", metavar="TEXT", shown="none", help="system prompt")
    sampling_flags(parser)
    return parser


def _plan(commands: Commands) -> argparse.ArgumentParser:
    summary = "print the memory a model takes, without loading it"
    parser = command_parser(commands, "plan", summary, "[MODEL] [flags]")
    group = parser.add_argument_group("plan")
    flag(group, "--json", action="store_true", help="as one JSON object")
    return parser


def _selfcheck(commands: Commands) -> argparse.ArgumentParser:
    summary = "check tokens and speed on this machine; prints a report to share"
    parser = command_parser(commands, "selfcheck", summary, "[MODEL] [flags]")
    flag(
        parser.add_argument_group("check"),
        "--tokens",
        type=int,
        metavar="N",
        shown="48, on a slow machine 8",
        help="of each stream",
    )
    return parser


def _completion(commands: Commands) -> argparse.ArgumentParser:
    summary = "print a script that completes commands and flags in your shell"
    parser = command_parser(commands, "completion", summary)
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to read it")
    return parser


def server_config(args: argparse.Namespace) -> ServerConfig:
    return ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=tuple(args.api_key),
        metrics_without_key=args.metrics_without_key,
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
        sleep_idle_seconds=args.sleep_idle,
    )


def model_options(args: argparse.Namespace) -> ModelOptions:
    return ModelOptions(**{name: getattr(args, name) for name in ModelOptions.__slots__ if hasattr(args, name)})


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
    sys.exit(entry())
