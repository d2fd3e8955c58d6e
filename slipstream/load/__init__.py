"""From a path or a name to an opened model: checkpoint, MTP head, tokenizer. No array library but numpy.

The runner reads `OpenedModel.checkpoint` and `.head`; the server reads `.tokenizer`.
"""

from __future__ import annotations

from pathlib import Path

from slipstream.errors import DownloadError, LoadError
from slipstream.load.default_model import SMOLLM2_SAMPLING, default_head_path, default_model_path
from slipstream.load.dequantize import dequantize
from slipstream.load.gguf.file import open_gguf
from slipstream.load.gguf.header import is_gguf
from slipstream.load.gguf_names import models_of, whole_stem
from slipstream.load.head import find_any_head, find_head, open_head, try_head
from slipstream.load.hf.any_folder import open_any
from slipstream.load.hf.folder import open_hf
from slipstream.load.hf.hub import fetch_folder, fetch_gguf, fetch_gguf_head, hub_file, is_hub_id
from slipstream.load.opened import OpenedModel, open_tokenizer
from slipstream.load.spec import GdnSpec, HeadSpec, ModelSpec, MoeSpec, RopeSpec
from slipstream.load.tensor import Checkpoint, RawTensor
from slipstream.load.tokenizer.detokenizer import StreamingDetokenizer
from slipstream.load.tokenizer.tokenizer import Tokenizer

__all__ = [
    "Checkpoint",
    "GdnSpec",
    "HeadSpec",
    "ModelSpec",
    "MoeSpec",
    "OpenedModel",
    "RawTensor",
    "RopeSpec",
    "StreamingDetokenizer",
    "Tokenizer",
    "default_head_path",
    "default_model_path",
    "dequantize",
    "find_head",
    "open_head",
    "open_model",
    "open_tokenizer",
]

DEFAULT_NAME = "SmolLM2-135M-Instruct"
MAX_NAMED = 6  # files in a message


def open_model(model: str | None = None, mtp: str | None = None, *, any_architecture: bool = False) -> OpenedModel:
    """`model`: None for the default one, a folder, a .gguf file, a hub id, or `owner/repository:QUANT`, a GGUF file of
    it. `mtp`: a head in a file of its own. `any_architecture`: the runner loads folders by itself, also those of
    architectures that we do not know."""
    name, path = _resolve(model)
    if path.is_dir() and not (path / "config.json").exists():
        raise LoadError(_what_is_missing(path))
    given = _head_path(model, mtp)
    if any_architecture and path.is_dir():
        folder = open_any(path, name)
        return OpenedModel(name, path, folder, *find_any_head(folder, given))
    checkpoint = open_hf(path, name) if path.is_dir() else open_gguf(path)
    head, reason = find_head(checkpoint, given)
    if head is None and mtp is None:
        head, reason = _head_on_hub(model, path, checkpoint.spec) or (None, reason)
    return OpenedModel(name, path, checkpoint, head, reason, SMOLLM2_SAMPLING if model is None else None)


def _what_is_missing(folder: Path) -> str:
    if any(folder.glob("*.safetensors")):
        return f"{folder} has weights but no config.json: fetch it into the folder, too, or take the model as a GGUF."
    return f"{folder} holds no model: give a folder with config.json and *.safetensors, or a .gguf file."


def _resolve(model: str | None) -> tuple[str, Path]:
    """Its name for clients, and its folder or .gguf file."""
    if model is None:
        return DEFAULT_NAME, default_model_path()
    if not model:
        raise LoadError("The model's name is empty: expected a model folder, a .gguf file, or a hub id.")
    path = Path(model).expanduser()
    if path.is_dir() and not _holds_gguf(path):
        return path.resolve().name, path
    if path.is_dir():
        path = _only_gguf(path)
    if path.is_file():
        if path.suffix == ".safetensors" and not is_gguf(path):
            raise LoadError(f"{model} holds weights alone: give its folder, {path.resolve().parent}")
        return whole_stem(path), path
    if path.exists() or path.is_symlink():
        raise LoadError(
            f"{path} is neither a file nor a folder{': its link leads nowhere' if path.is_symlink() else ''}."
        )
    if (on_hub := hub_file(model)) is not None:
        return model, fetch_gguf(*on_hub)
    if _looks_like_path(model):
        raise LoadError(f"{model} does not exist: expected a model folder, a .gguf file, or a hub id.")
    return model, fetch_folder(model)


def _holds_gguf(folder: Path) -> bool:
    """And not the model of another format: such a folder may have a GGUF beside it, a GGUF a config.json."""
    if not any(folder.glob("*.gguf")):
        return False
    return not ((folder / "config.json").exists() and any(folder.glob("*.safetensors")))


def _only_gguf(folder: Path) -> Path:
    """The first part of the only model in a folder."""
    models = models_of(path.name for path in folder.glob("*.gguf") if not path.is_dir())
    if not models:
        raise LoadError(f"{folder} holds GGUF files, but none of a model: give the model's own file.")
    firsts = [str(folder / model.files[0]) for model in models]
    if len(firsts) > 1:
        more = f" or {len(firsts) - MAX_NAMED} more" if len(firsts) > MAX_NAMED else ""
        raise LoadError(f"{folder} holds GGUF files: give one of {', '.join(firsts[:MAX_NAMED])}{more}.")
    return Path(firsts[0])


def _head_on_hub(model: str | None, file: Path, spec: ModelSpec) -> tuple[Checkpoint | None, str] | None:
    """That of the repository which a GGUF file came from, or why it is not used. None: there is none."""
    on_hub = None if model is None or Path(model).expanduser().exists() else hub_file(model)
    if on_hub is None:
        return None
    try:
        path = fetch_gguf_head(on_hub[0], file.name)
    except DownloadError as error:
        return None, f"no MTP head: {error}"
    return None if path is None else try_head(path, spec)


def _looks_like_path(model: str) -> bool:
    return not is_hub_id(model) or model.endswith((".gguf", ".safetensors"))


def _head_path(model: str | None, mtp: str | None) -> Path | None:
    if mtp is None:
        return default_head_path() if model is None else None
    path = Path(mtp).expanduser()
    if path.is_file() or path.is_dir():
        return path
    what = "is neither a file nor a folder" if path.exists() else "does not exist"
    raise LoadError(f"{mtp}, given as the MTP head, {what}.")
