# SPDX-License-Identifier: Apache-2.0
"""What the environment variables ask for, and what they may not ask."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from attnquant_common.settings import (
    VARIABLES,
    Settings,
    SettingsError,
    cache_dir,
    default_cache_dir,
    from_environment,
    matches,
)
from hypothesis import given
from hypothesis import strategies as st

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "attnquant.md"

FULL = {
    "ATTNQUANT": "1",
    "ATTNQUANT_QUANT": "nvfp4",
    "ATTNQUANT_QUANT_IGNORE": "self_attn, *layers.0.mlp*",
    "ATTNQUANT_SCALES": "sweep",
    "ATTNQUANT_BLOCKS": "3",
    "ATTNQUANT_RANK": "4",
    "ATTNQUANT_PRECOMPUTE_OUTSIDE": "1",
    "ATTNQUANT_CACHE_DIR": "/cache",
    "ATTNQUANT_CACHE_LIMIT": "20",
}
RUNTIME = {
    "ATTNQUANT_BLOCKS": "3",
    "ATTNQUANT_RANK": "4",
    "ATTNQUANT_PRECOMPUTE_OUTSIDE": "0",
}


def ask(**variables: str) -> Settings:
    settings = from_environment(variables)
    assert settings is not None
    return settings


def test_every_variable_is_followed() -> None:
    """All that can be set together is what the settings say."""
    assert ask(PATH="/bin", **FULL) == Settings(
        quant="nvfp4",
        ignore=("self_attn", "*layers.0.mlp*"),
        scales="sweep",
        blocks=3,
        rank=4,
        precompute_outside=True,
        gemm=None,
        cache_dir=Path("/cache"),
        cache_limit=20,
    )


@pytest.mark.parametrize(
    ("text", "gemm"), [("0", False), ("1", True), ("auto", None)]
)
def test_runtime_path_takes_a_form(text: str, gemm: bool | None) -> None:
    """The graph's way to rebuild weights is asked for, or left open."""
    settings = ask(**RUNTIME, ATTNQUANT_GEMM=text)
    assert not settings.precompute_outside
    assert settings.gemm is gemm


@pytest.mark.parametrize(
    "variables",
    [{}, {"PATH": "/bin"}, {"ATTNQUANT": "0"}, {**FULL, "ATTNQUANT": "0"}],
)
def test_off(variables: dict[str, str]) -> None:
    """Without a variable, or with ATTNQUANT=0, AttnQuant is off."""
    assert from_environment(variables) is None


def test_off_outweighs_mistakes() -> None:
    """ATTNQUANT=0 is the way out of a server that does not start."""
    variables = {"ATTNQUANT": "0", "ATTNQUANT_BLOCK": "?"}
    assert from_environment(variables) is None


@pytest.mark.parametrize(
    "variables",
    [
        {"ATTNQUANT": "1"},
        {"ATTNQUANT_QUANT": "nvfp4"},
        {"ATTNQUANT_BLOCKS": "1"},
        {"ATTNQUANT_PRECOMPUTE_OUTSIDE": "1"},
        {"ATTNQUANT_CACHE_DIR": "/cache"},
    ],
)
def test_any_variable_switches_on(variables: dict[str, str]) -> None:
    """Each variable that can stand alone switches AttnQuant on."""
    assert from_environment(variables) is not None


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("ATTNQUANT", "", "0 or 1"),
        ("ATTNQUANT", "true", "0 or 1"),
        ("ATTNQUANT_QUANT", "NVFP4", "nvfp4"),
        ("ATTNQUANT_QUANT", "fp8", "nvfp4"),
        ("ATTNQUANT_QUANT_IGNORE", "", "patterns"),
        ("ATTNQUANT_QUANT_IGNORE", "self_attn,,mlp", "patterns"),
        ("ATTNQUANT_SCALES", "best", "rtn or sweep"),
        ("ATTNQUANT_BLOCKS", "0", "a whole number, 1 or more"),
        ("ATTNQUANT_BLOCKS", "-1", "a whole number, 1 or more"),
        ("ATTNQUANT_BLOCKS", "1_0", "a whole number, 1 or more"),
        ("ATTNQUANT_BLOCKS", "٣", "a whole number, 1 or more"),
        ("ATTNQUANT_BLOCKS", "9" * 5000, "a whole number, 1 or more"),
        ("ATTNQUANT_RANK", "4.0", "a whole number, 0 or more"),
        ("ATTNQUANT_RANK", " 4", "a whole number, 0 or more"),
        ("ATTNQUANT_PRECOMPUTE_OUTSIDE", "yes", "0 or 1"),
        ("ATTNQUANT_GEMM", "2", "0 or 1 or auto"),
        ("ATTNQUANT_CACHE_DIR", "", "a folder"),
        ("ATTNQUANT_CACHE_LIMIT", "0", "a whole number, 1 or more"),
        ("ATTNQUANT_CACHE_DIR", "~nosuchuser/x", "a folder"),
    ],
)
def test_a_wrong_value_names_the_choices(
    name: str, value: str, choices: str
) -> None:
    """The error has the variable, the value and what it may be."""
    with pytest.raises(SettingsError) as error:
        from_environment({**FULL, name: value})
    message = str(error.value)
    assert f"{name}={value!r}: expected {choices}" in message
    assert "ATTNQUANT=0" in message


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("ATTNQUANT_BLOCK", "ATTNQUANT_BLOCKS"),
        ("ATTNQUANT_IGNORE", "ATTNQUANT_QUANT_IGNORE"),
        ("ATTNQUANT_PRECOMPUTE", "ATTNQUANT_PRECOMPUTE_OUTSIDE"),
        ("ATTNQUANTRANK", "ATTNQUANT_RANK"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name: str, nearest: str) -> None:
    """A mistyped name is an error with the name that was likely meant."""
    with pytest.raises(SettingsError) as error:
        from_environment({name: "1"})
    assert f"{name} is not" in str(error.value)
    assert f"did you mean {nearest}?" in str(error.value)


def test_all_mistakes_are_said_at_once() -> None:
    """One start is enough to learn of every wrong name and value."""
    with pytest.raises(SettingsError) as error:
        from_environment({"ATTNQUANT_RANKS": "4", "ATTNQUANT_QUANT": "int4"})
    assert "ATTNQUANT_RANKS" in str(error.value)
    assert "'int4'" in str(error.value)


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        (
            {"ATTNQUANT_RANK": "4"},
            "ATTNQUANT_RANK means nothing without ATTNQUANT_BLOCKS",
        ),
        (
            {"ATTNQUANT_QUANT_IGNORE": "self_attn"},
            "IGNORE means nothing without ATTNQUANT_QUANT",
        ),
        (
            {"ATTNQUANT_SCALES": "rtn"},
            "SCALES means nothing without ATTNQUANT_QUANT",
        ),
        (
            {"ATTNQUANT_GEMM": "auto"},
            "only with ATTNQUANT_PRECOMPUTE_OUTSIDE=0",
        ),
        (
            {**FULL, "ATTNQUANT_GEMM": "1"},
            "only with ATTNQUANT_PRECOMPUTE_OUTSIDE=0",
        ),
        (
            {**RUNTIME, "ATTNQUANT_QUANT": "nvfp4"},
            "needs ATTNQUANT_PRECOMPUTE_OUTSIDE=1",
        ),
    ],
)
def test_a_contradiction_is_an_error(
    variables: dict[str, str], error: str
) -> None:
    """What could not have an effect, or has none together, is refused."""
    with pytest.raises(SettingsError, match=error):
        from_environment(variables)


@given(
    st.dictionaries(
        st.one_of(st.sampled_from(sorted(VARIABLES)), st.text()),
        st.one_of(st.sampled_from(["0", "1", "nvfp4", "auto"]), st.text()),
    )
)
def test_parsing_ends_in_settings_or_a_settings_error(
    variables: dict[str, str],
) -> None:
    """No environment ends in another error."""
    with suppress(SettingsError):
        from_environment(variables)


def test_layers_without_bands_keep_their_weights() -> None:
    """No bands, or as many as layers, is a decomposition of nothing."""
    assert Settings().decomposition(26) == (26, 0)
    assert Settings(blocks=26).decomposition(26) == (26, 0)
    assert Settings(blocks=26, rank=4).decomposition(26) == (26, 0)
    assert Settings(blocks=13, rank=4).decomposition(26) == (13, 4)
    assert Settings(blocks=13, rank=0).decomposition(26) == (13, 0)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (Settings(blocks=7, rank=4), "BLOCKS=7: the model has 6 .* 1 to 6"),
        (Settings(blocks=3), "BLOCKS=3 on 6 layers needs ATTNQUANT_RANK"),
        (
            Settings(precompute_outside=False),
            "nothing to rebuild: set ATTNQUANT_BLOCKS, or serve a bundle",
        ),
    ],
)
def test_bands_must_fit_the_model(settings: Settings, error: str) -> None:
    """What only the model can tell is an error that tells it."""
    with pytest.raises(SettingsError, match=error):
        settings.decomposition(6)


Q = "model.layers.3.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("self_attn", Q, True),
        ("q_proj", Q, True),
        ("[qk]_proj", Q, True),
        ("*_proj", Q, True),
        ("*self_attn*", Q, True),
        ("*.self_attn.*", Q, True),
        ("model.layers.3.self_attn", Q, True),
        ("model.layers.3.*", Q, True),
        ("model.layers.3*", "model.layers.30.mlp.up_proj", True),
        ("*", Q, True),
        ("self_att", Q, False),
        ("Self_Attn", Q, False),
        ("mlp", Q, False),
        ("layers.3.self_attn", Q, False),
        ("model.layers.3.*", "model.layers.30.mlp.up_proj", False),
        ("lm_head", Q, False),
    ],
)
def test_ignore_patterns(pattern: str, module: str, expected: bool) -> None:
    """ModelOpt's wildcards on the path, and bare names within it."""
    assert matches(pattern, module) is expected
    assert Settings(ignore=(pattern,)).ignores(module) is expected


def test_a_pattern_without_a_match_is_an_error() -> None:
    """A mistyped pattern would quantize what was to be kept."""
    Settings(ignore=("self_attn",)).check_ignored([Q])
    with pytest.raises(SettingsError, match="'self_atn' matches none of the 1"):
        Settings(ignore=("self_attn", "self_atn")).check_ignored([Q])


@pytest.mark.parametrize(
    ("target", "rank", "expected"),
    [
        ("sm_90a", 4, False),
        ("sm_90a", 16, False),
        ("sm_90a", 17, True),
        ("sm_100a", 4, True),
        ("hip", 4, True),
        ("cpu", 4, True),
        ("metal", 512, False),
    ],
)
def test_auto_picks_by_device_and_rank(
    target: str, rank: int, expected: bool
) -> None:
    """The op on Metal, and at low ranks on Hopper; else what was asked for."""
    assert Settings().uses_gemm(target, rank) is expected
    assert Settings(gemm=True).uses_gemm(target, rank)
    assert not Settings(gemm=False).uses_gemm(target, rank)


def test_a_form_without_anything_to_rebuild_is_an_error() -> None:
    """At rank 0 there are the means alone."""
    with pytest.raises(SettingsError, match="leaves nothing to rebuild"):
        ask(
            ATTNQUANT_BLOCKS="2",
            ATTNQUANT_RANK="0",
            ATTNQUANT_PRECOMPUTE_OUTSIDE="0",
            ATTNQUANT_GEMM="1",
        )


@pytest.mark.parametrize("name", ["", "~nosuchuser/cache"])
def test_a_cache_that_is_no_folder_is_an_error(name: str) -> None:
    """For the tools as for a start."""
    with pytest.raises(SettingsError, match="expected a folder"):
        cache_dir({"ATTNQUANT_CACHE_DIR": name})


def test_identity_has_what_weights_depend_on() -> None:
    """Order of patterns, cache folder and form of the graph are not in it."""
    one = ask(**FULL)
    other = ask(
        **FULL
        | {
            "ATTNQUANT_QUANT_IGNORE": "*layers.0.mlp*,self_attn",
            "ATTNQUANT_CACHE_DIR": "/other",
            "ATTNQUANT_CACHE_LIMIT": "1",
        }
    )
    assert json.dumps(one.identity()) == json.dumps(other.identity())
    for name, value in [
        ("ATTNQUANT_QUANT_IGNORE", "self_attn"),
        ("ATTNQUANT_SCALES", "rtn"),
        ("ATTNQUANT_BLOCKS", "2"),
        ("ATTNQUANT_RANK", "5"),
    ]:
        assert ask(**FULL | {name: value}).identity() != one.identity()
    assert Settings().identity() != Settings(quant="nvfp4").identity()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache lies in the user's cache folder; "~" is the home."""
    monkeypatch.setenv("HOME", "/home/me")
    assert default_cache_dir({}) == Path("/home/me/.cache/attnquant")
    xdg = {"XDG_CACHE_HOME": "/x"}
    assert default_cache_dir(xdg) == Path("/x/attnquant")
    relative = {"XDG_CACHE_HOME": "x"}
    assert default_cache_dir(relative) == Path("/home/me/.cache/attnquant")
    settings = ask(ATTNQUANT_CACHE_DIR="~/c")
    assert settings.cache_dir == Path("/home/me/c")
    relative = ask(ATTNQUANT_CACHE_DIR="c")
    assert relative.cache_dir == Path.cwd() / "c"


def test_no_home_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home is told what to set."""

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(SettingsError, match="set ATTNQUANT_CACHE_DIR"):
        default_cache_dir({})


def test_the_document_lists_every_variable() -> None:
    """docs/attnquant.md has a row for each variable, and for no other."""
    rows = [
        line.split("`")[1].split("=")[0]
        for line in DOCUMENT.read_text().splitlines()
        if line.startswith("| `ATTNQUANT")
    ]
    assert rows == list(VARIABLES)
