"""A Hugging Face hub id -> a local folder with its configuration, tokenizer and safetensors. Knows no model."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from slipstream.errors import DownloadError

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "vocab*", "merges.txt"]
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None


def fetch_folder(hub_id: str) -> Path:
    """Downloads the files that the hub's local cache lacks; raises DownloadError."""
    from huggingface_hub import errors, snapshot_download  # slow to import: only where the hub is needed

    # The root of the errors of whichever HTTP library the hub client is built on.
    transport_error: type[BaseException] = errors.HfHubHTTPError.__bases__[0]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=PATTERNS))
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{hub_id} is gated: accept its terms on the hub and log in with 'hf auth login'."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(f"{hub_id} is neither a local path nor a model on the hub that you can see.") from error
    except errors.LocalEntryNotFoundError as error:
        raise DownloadError(f"{hub_id} is not in the local cache and the hub cannot be reached.") from error
    except (errors.EntryNotFoundError, transport_error, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise DownloadError(f"{hub_id} cannot be stored in the hub's cache: {error.strerror}.") from error
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise DownloadError(f"{hub_id} could not be fetched from the hub: {first_line}") from error
