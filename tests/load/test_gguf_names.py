"""Names of GGUF files as repositories have them: which are models, which are parts of one, and how one is chosen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.load.gguf_names import called, choices, heads_for, is_head, models_of

NO_MODELS = [
    "mmproj-Tiny-F16.gguf",
    "mmproj-BF16.gguf",
    "MMPROJ.gguf",
    "Tiny.mmproj-Q8_0.gguf",
    "Tiny-mmproj-f16.gguf",
    "imatrix_Tiny.gguf",
    "Tiny-imatrix.gguf",
    "Tiny.imatrix.gguf",
    "mtp-Tiny-Q8_0.gguf",
    "MTP/mtp-Tiny-Q4_0.gguf",
    "MTP-Tiny-Q4_0.gguf",
    "dflash-Tiny-Q8_0.gguf",
    "Q8_0.md",
    "config.json",
]


def chosen(choice: str, *names: str) -> list[str]:
    """The files that a choice stands for; several models' are all there."""
    return [file for model in called(choice, models_of(names)) for file in model.files]


@pytest.mark.parametrize(
    "name",
    [
        "model-Q8_0.gguf",
        "model_Q8_0.gguf",
        "model.Q8_0.gguf",
        "model.i1-Q8_0.gguf",
        "model-q8_0.gguf",
        "model.q8_0.GGUF",
        "Q8_0.gguf",
        "Q8_0/model.gguf",
        "model-Q8_0/part.gguf",
        "Q8_0/model-Q8_0-00001-of-00001.gguf",
    ],
)
@pytest.mark.parametrize("choice", ["Q8_0", "q8_0"])
def test_a_type_however_the_name_has_it(name: str, choice: str) -> None:
    others = ["model-BF16.gguf", "model-UD-Q8_0.gguf", "model-Q8_0_L.gguf", "mtp-model-Q8_0.gguf", "mmproj-Q8_0.gguf"]
    assert chosen(choice, name, *others) == [name]
    [listed] = choices(models_of([name]), models_of([name, *others]))
    assert listed.lower() == "q8_0"


def test_parts_are_of_one_folder_and_of_one_count() -> None:
    parts = [f"{folder}/m-Q4_K_M-0000{i}-of-00002.gguf" for folder in "ab" for i in (1, 2)]
    assert [model.files for model in models_of(parts)] == [tuple(parts[:2]), tuple(parts[2:])]
    assert chosen("Q4_K_M", *parts) == parts, "two models fit"
    assert chosen("a/m-Q4_K_M", *parts) == chosen("a/m-Q4_K_M-00002-of-00002.gguf", *parts) == parts[:2]
    assert choices(models_of(parts), models_of(parts)) == ["a/m-Q4_K_M", "b/m-Q4_K_M"]
    counts = ["m-00001-of-00002.gguf", "m-00001-of-00003.gguf", "m-00002-of-00002.gguf"]
    assert [(model.files, model.num_parts) for model in models_of(counts)] == [
        ((counts[0], counts[2]), 2),
        ((counts[1],), 3),
    ]
    assert choices(models_of(counts), models_of(counts)) == ["m-00001-of-00002.gguf", "m-00001-of-00003.gguf"]


def test_a_type_is_whole() -> None:
    names = ["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "m-BF16.gguf", "m-IQ4_XS.gguf", "m-fp16.gguf"]
    assert chosen("Q4_K_M", *names) == ["m-Q4_K_M.gguf"]
    assert chosen("ud-q4_k_m", *names) == ["m-UD-Q4_K_M.gguf"]
    for part in ("Q4_K_XL", "XL", "K_M", "Q4_K", "Q4_XS", "F16", "16", "M", "gguf", "m-"):
        assert chosen(part, *names) == [], part
    assert choices(models_of(names), models_of(names)) == [
        "BF16",
        "IQ4_XS",
        "Q4_K_M",
        "UD-Q4_K_M",
        "UD-Q4_K_XL",
        "fp16",
    ]


def test_names_without_a_type_are_chosen_by_their_end_or_whole() -> None:
    names = ["tiny-base.gguf", "tiny-chat.gguf", "tiny-chat-Q8_0.gguf"]
    for choice in ("chat", "tiny-chat", "TINY-CHAT.gguf"):
        assert chosen(choice, *names) == ["tiny-chat.gguf"]
    assert choices(models_of(names), models_of(names)) == ["Q8_0", "tiny-base", "tiny-chat"]


def test_names_that_differ_in_capitals() -> None:
    names = ["tiny-Q8_0.gguf", "tiny-q8_0.gguf"]
    assert chosen("Q8_0", *names) == names
    assert choices(models_of(names), models_of(names)) == ["tiny-Q8_0", "tiny-q8_0"]
    assert chosen("tiny-q8_0", *names) == ["tiny-q8_0.gguf"]


@pytest.mark.parametrize("name", NO_MODELS)
def test_other_files_are_no_models(name: str) -> None:
    assert models_of([name]) == []
    assert is_head(name) == name.lower().rpartition("/")[2].startswith("mtp-")


@pytest.mark.parametrize("name", ["m-MTP-Q8_0.gguf", "m-imatrix-Q8_0.gguf", "Mtp.gguf", "MTP/m-Q8_0.gguf"])
def test_models_whose_names_only_look_so(name: str) -> None:
    assert [model.files for model in models_of([name])] == [(name,)]
    assert not is_head(name)


FOLDERS = st.sampled_from(["", "a/", "b/", "Q8_0/", "BF16/", "MTP/"])
STEMS = st.sampled_from(["m", "M", "m-chat", "mtp-m", "Q8_0", "UD"])
TYPES = st.sampled_from(["", "-Q8_0", "_Q8_0", ".q8_0", "-UD-Q8_0", "-BF16", "-f16", ".i1-Q4_K_M"])
PARTS = st.sampled_from(["", "-00001-of-00002", "-00002-of-00002", "-00001-of-00003"])
NAMES = st.builds("{}{}{}{}.gguf".format, FOLDERS, STEMS, TYPES, PARTS)


@given(st.lists(NAMES, unique=True, max_size=12))
def test_what_is_listed_can_be_chosen(names: list[str]) -> None:
    models = models_of(names)
    for model in models:
        [choice] = choices([model], models)
        assert called(choice, models) == [model]


def test_the_head_of_the_chosen_model_comes_first() -> None:
    """Its name, then its type; a head of a name that the model's begins with is before those of other models."""
    names = ["Qwen-9B-Q8_0.gguf", "mtp-Qwen-9B-Q4_0.gguf", "MTP/mtp-Qwen-27B-Q8_0.gguf", "mtp-Qwen-9B-IQ4_XS.gguf"]
    of_nine, others = ["mtp-Qwen-9B-Q4_0.gguf", "mtp-Qwen-9B-IQ4_XS.gguf"], ["MTP/mtp-Qwen-27B-Q8_0.gguf"]
    for model in (
        "Qwen-9B-Q8_0.gguf",
        "qwen-9b-UD-Q4_K_XL-00001-of-00002.gguf",
        "Qwen-9B.gguf",
        "Qwen-9B-Chat-F16.gguf",
    ):
        assert heads_for(model, names) == [*of_nine, *others]
    for model in ("Qwen-27B-Q4_0.gguf", "Other-Q4_0.gguf", "Qwen-9B2-Q4_0.gguf"):  # of the last two: by type alone
        assert heads_for(model, names) == [*others, *of_nine]
    longer = [*names, "mtp-Qwen-9B-Chat-Q4_0.gguf"]
    assert heads_for("Qwen-9B-Chat-BF16.gguf", longer)[0] == longer[-1]
    assert heads_for("Qwen-9B-BF16.gguf", longer)[0] == of_nine[0]
