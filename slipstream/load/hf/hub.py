"""Models on the Hugging Face hub: a repository as a local folder, or one GGUF file of it. Knows no model."""

from __future__ import annotations

import errno
import glob
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TypeGuard, TypeVar

from slipstream.errors import DownloadError
from slipstream.load.gguf_names import GgufModel, called, choices, heads_for, models_of
from slipstream.load.hf.fetch_bars import FetchBars

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "vocab*", "merges.txt"]
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILE = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):(?P<choice>[^:/\\][^:\\]*)")
T = TypeVar("T")


def is_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None


def hub_file(name: str) -> tuple[str, str] | None:
    """`owner/repository:choice` in two; None: it is not of that form."""
    match = HUB_FILE.fullmatch(name)
    return (match["id"], match["choice"]) if match else None


def fetch_folder(hub_id: str) -> Path:
    """Downloads the files that the hub's local cache lacks; raises DownloadError."""
    with _hub_faults(hub_id):
        known = _cached_names(hub_id)
    if not _are_a_folder(known):
        names = _names(hub_id)
        if not _are_a_folder(names) and (models := models_of(names)):
            raise DownloadError(f"{hub_id} holds GGUF files: {_take_one(hub_id, models, models)}.")
    return _fetch(hub_id, PATTERNS)


def _are_a_folder(names: list[str]) -> bool:
    """A model's: weights alone may be a head beside GGUF files."""
    return "config.json" in names and any(name.endswith(".safetensors") for name in names)


def fetch_gguf(hub_id: str, choice: str) -> Path:
    """A GGUF file of a repository, all its parts if it is split; the first part's path. `choice`: a type as in Q4_K_M,
    how the file's name ends, or its whole name."""
    names = _names(hub_id)
    models = models_of(names)
    found = called(choice, models)
    if not found:
        raise DownloadError(f"{_why_none(hub_id, choice, names)}: {_what_it_has(models)}.")
    if len(found) > 1:
        raise DownloadError(f"{hub_id} has {len(found)} models {choice!r}: {_take_one(hub_id, found, models)}.")
    [model] = found
    if len(model.files) < model.num_parts:
        raise DownloadError(
            f"{hub_id}, or its local cache where the hub cannot be reached, has {len(model.files)} of the "
            f"{model.num_parts} parts of {model.name}: all are needed, take another file or try again later."
        )
    return _fetch_files(hub_id, model.files) / model.files[0]


def _why_none(hub_id: str, choice: str, names: Iterable[str]) -> str:
    if any(choice in (name, PurePosixPath(name).name) for name in names):
        return f"{choice} of {hub_id} is not a model in GGUF"
    return f"{hub_id} has no GGUF file {choice!r}"


def _what_it_has(models: list[GgufModel]) -> str:
    return f"it has {', '.join(choices(models, models))}" if models else "it holds no GGUF model"


def _take_one(hub_id: str, found: list[GgufModel], models: list[GgufModel]) -> str:
    first, *more = words = choices(found, models)
    return f"choose one, {hub_id}:{first} or another of {', '.join(words)}" if more else f"take {hub_id}:{first}"


def fetch_gguf_head(hub_id: str, model: str) -> Path | None:
    """The MTP head that a repository has in a file of its own, or None. `model`: the name of the model's file."""
    best = next(iter(heads_for(model, _names(hub_id))), None)
    return None if best is None else _fetch_files(hub_id, [best]) / best


def _names(hub_id: str) -> list[str]:
    """Of the files of a repository; of those in the local cache where the hub cannot be reached."""
    from huggingface_hub import HfApi, errors

    transport_error: type[BaseException] = errors.HfHubHTTPError.__bases__[0]
    with _hub_faults(hub_id):
        try:
            return [each.rfilename for each in _apart(lambda: HfApi().model_info(hub_id)).siblings or []]
        except errors.RepositoryNotFoundError:
            raise
        except (transport_error, OSError) as error:
            if names := _cached_names(hub_id):
                return names
            if isinstance(error, errors.HfHubHTTPError) or _is_the_disks(error):  # the hub can be reached
                raise
            raise _unreachable(hub_id, error) from error


def _cached_names(hub_id: str) -> list[str]:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
    newest = folder / "refs" / "main"
    if not newest.is_file():
        return []
    snapshot = folder / "snapshots" / newest.read_text().strip()
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]


def _fetch_files(hub_id: str, names: Sequence[str]) -> Path:
    """The folder that they are in."""
    return _fetch(hub_id, [glob.escape(name) for name in names])


def _fetch(hub_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # slow to import: only where the hub is needed

    bars = FetchBars(hub_id, as_lines=not sys.stderr.isatty())
    bar_class = bars.bar_class()
    with _hub_faults(hub_id):
        folder = _apart(lambda: snapshot_download(hub_id, allow_patterns=patterns, tqdm_class=bar_class), bars.cancel)
    bars.close()
    return Path(folder)


def _apart(call: Callable[[], T], cancel: Callable[[], None] = lambda: None) -> T:
    """In a thread, so that Ctrl-C ends the wait: the hub's client waits for threads of its own, whatever comes."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="slipstream-fetch", daemon=True).start()
    try:
        return answer.result()
    except BaseException:
        cancel()
        raise


def _is_the_disks(error: BaseException) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and (error.errno in NO_ROOM or error.filename is not None)


def _unreachable(hub_id: str, error: BaseException | None = None) -> DownloadError:
    why = f": {_first_line(error)}" if error is not None else "."
    return DownloadError(
        f"{hub_id} is no file or folder, not in the hub's local cache, and the hub cannot be reached{why}"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def _hub_faults(hub_id: str) -> Iterator[None]:
    """What the hub's client raises as one sentence."""
    from huggingface_hub import errors

    # The root of the errors of whichever HTTP library the hub client is built on.
    transport_error: type[BaseException] = errors.HfHubHTTPError.__bases__[0]
    try:
        yield
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{hub_id} is gated: accept its terms on the hub and log in with 'hf auth login'."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(f"{hub_id} is neither a local path nor a model on the hub that you can see.") from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(hub_id, error.__cause__) from error
    except (errors.EntryNotFoundError, transport_error, OSError, ValueError) as error:
        if _is_the_disks(error):
            place = f" ({error.filename})" if error.filename is not None else ""
            raise DownloadError(f"{hub_id} cannot be stored in the hub's cache{place}: {error.strerror}.") from error
        raise DownloadError(f"{hub_id} could not be fetched from the hub: {_first_line(error)}") from error
