"""What the names of GGUF files say: which are models, which are parts of one, and how a user chooses one of several.

Reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath

PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")  # of a split file, without the ending
HEAD = "mtp-"  # how the name of an MTP head begins
HEAD_TYPES = ("q8_0", "q6_k", "q5_k", "q4_k", "q4_0")  # the best first; a head is small
NO_MODEL = re.compile(
    rf"({HEAD}|dflash-|dspark-|eagle3-|imatrix|mmproj)|.*[-._](mmproj([-._].*)?|imatrix)$", re.IGNORECASE
)
# A type at the end of a name. UD- belongs to it: those are other mixtures.
TYPE = re.compile(
    r"(?:^|[-._])(?P<type>(?:UD[-_])?(?:I?Q\d\w*|P?TQ\d\w*|MXFP4\w*|NVFP4\w*|BF16|FP?16|FP?32))$", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model by the names of its files."""

    name: str  # of its file or its parts, with the folder, without the ending and the number of a part
    files: tuple[str, ...]  # in their order
    num_parts: int = 1  # that it should have

    @property
    def type(self) -> str:
        """At the end of its name, or of its folder's; empty: neither says it."""
        path = PurePosixPath(self.name)
        found = TYPE.search(path.name) or TYPE.search(path.parent.name)
        return found["type"] if found is not None else ""

    @property
    def paths(self) -> list[str]:
        """The ways to write its whole name."""
        return [self.name, *self.files]

    @property
    def names(self) -> list[str]:
        """The same without the folder."""
        return [PurePosixPath(path).name for path in self.paths]


def whole_stem(path: PurePath) -> str:
    """A file's name without its ending and the number of a part."""
    part = PART.fullmatch(path.stem)
    return part["stem"] if part is not None else path.stem


def is_head(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix.lower() == ".gguf" and path.name.lower().startswith(HEAD)


def heads_for(model: str, names: Iterable[str]) -> list[str]:
    """The heads among those files, the likeliest first: named as the model's file is, then of the best type."""
    found = [name for name in names if is_head(name)]
    return sorted(found, key=lambda name: (-_kinship(name, model), _rank(name), name))


def _kinship(head: str, model: str) -> float:
    """How much of the model's name a head's says, without their types; 1 is all of it, 0 another's."""
    own, wanted = (_without_type(whole_stem(PurePosixPath(name))).lower() for name in (head, model))
    short, long = sorted((own.removeprefix(HEAD), wanted), key=len)
    belongs = long == short or (long.startswith(short) and long[len(short)] in "-._")
    return len(short) / len(long) if belongs else 0.0


def _without_type(stem: str) -> str:
    return stem[: found.start()] if (found := TYPE.search(stem)) is not None else stem


def _rank(name: str) -> int:
    return next((i for i, kind in enumerate(HEAD_TYPES) if kind in name.lower()), len(HEAD_TYPES))


def models_of(names: Iterable[str]) -> list[GgufModel]:
    """The models among those files. Parts of one are in one folder, and agree how many they are."""
    found: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix.lower() == ".gguf" and NO_MODEL.match(path.stem) is None:
            part = PART.fullmatch(path.stem)
            count = int(part["count"]) if part is not None else 1
            found.setdefault((str(path.with_name(whole_stem(path))), count), []).append(name)
    return [GgufModel(name, tuple(files), count) for (name, count), files in found.items()]


def called(choice: str, models: Iterable[GgufModel]) -> list[GgufModel]:
    """The models that a choice may mean: by a whole name, else by a type, else by the end of a name."""
    low = choice.lower()
    is_type = TYPE.fullmatch(choice) is not None  # Q4_K_M is not UD-Q4_K_M, though that ends so
    ways: list[Callable[[GgufModel], bool]] = [
        lambda model: choice in model.paths,
        lambda model: choice in model.names,
        lambda model: low in map(str.lower, [*model.paths, *model.names]),
        lambda model: low == model.type.lower(),
        lambda model: not is_type and model.name.lower().endswith((f"-{low}", f".{low}")),
    ]
    every = list(models)
    return next((fit for way in ways if (fit := [model for model in every if way(model)])), [])


def choices(models: Iterable[GgufModel], among: Iterable[GgufModel]) -> list[str]:
    """What each of the models is chosen by among all of them: its type where it is alone with it, else a name."""
    every = list(among)
    return sorted(_choice(model, every) for model in models)


def _choice(model: GgufModel, among: list[GgufModel]) -> str:
    return next(word for word in (model.type, model.names[0], *model.paths) if word and called(word, among) == [model])
