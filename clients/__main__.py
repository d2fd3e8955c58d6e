"""`python -m clients [NAME ...]`: each client in an environment of its own, against one server; a table at the end."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from clients.kinds import CLIENTS, Client
from clients.setting import ClientFailure, Setting, clients_cache, environment, hub_cache, server


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; default: all")
    names = parser.parse_args().names or list(CLIENTS)
    if unknown := set(names) - set(CLIENTS):
        parser.error(f"there is no client {', '.join(sorted(unknown))}")
    hub = hub_cache()
    rows = []
    with server() as url:
        for name in names:
            began = time.monotonic()
            passed, text = _tried(name, CLIENTS[name], hub, url)
            rows.append((name, passed))
            print(f"{name:14} {'ok' if passed else 'FAILED':6} {time.monotonic() - began:5.0f} s  {text}", flush=True)
    good = sum(passed for _, passed in rows)
    print(f"{good} of {len(rows)} clients")
    return 0 if good == len(rows) else 1


def _tried(name: str, client: Client, hub: Path, url: str) -> tuple[bool, str]:
    try:
        bin = environment(name, client.requirements)
        text = client.run(_setting(name, bin, hub), url)
        if client.drafts_or_not:
            with server("--draft", "off") as plain_url:
                plain = client.run(_setting(f"{name}-plain", bin, hub), plain_url)
            if plain != text:
                return False, f"{text}; without drafts: {plain}"
            text += "; the same without drafts"
        return True, text
    except ClientFailure as error:
        return False, str(error)
    except (KeyError, IndexError, TypeError, ValueError, OSError) as error:
        return False, f"its report is not as expected: {type(error).__name__} {error}"


def _setting(name: str, bin: Path, hub: Path) -> Setting:
    """Its folder is kept after the run: the client's own reports are there."""
    work = clients_cache() / "runs" / name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    return Setting(bin, hub, work)


if __name__ == "__main__":
    sys.exit(main())
