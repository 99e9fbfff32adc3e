"""Texts of TOML: deep nesting is an error like any other, wherever it hides."""

from __future__ import annotations

import pytest

from hetero_mpi.util import toml


def test_values_come_back() -> None:
    assert toml.loads('a = 1\n[b]\nc = [{ d = "x" }]\n') == {"a": 1, "b": {"c": [{"d": "x"}]}}


@pytest.mark.parametrize(
    "text", ["a = ", "= 1", "[a", "a = " + "[" * 20_000, "a = " + "{a=" * 20_000, "a." * 20_000 + "a = 1"]
)
def test_no_toml_and_too_deep_are_one_error(text: str) -> None:
    with pytest.raises(toml.TomlError):
        toml.loads(text)


@pytest.mark.parametrize("text", ["\na = []\nb = 1\n[[a]]\nc = 1", "\na = 1\nb = 2\na = 3", "\n[x.a]\n\n[x.a]\n"])
def test_both_lines_of_a_key_are_named(text: str) -> None:
    with pytest.raises(toml.TomlError, match=r"\b2\b.*\b4\b"):
        toml.loads(text)


def test_the_deepest_that_is_meant() -> None:
    for depth, works in ((toml.MAX_NESTING_DEPTH - 1, True), (toml.MAX_NESTING_DEPTH, False)):
        text = "a = " + "[" * depth + "]" * depth
        if works:
            assert toml.loads(text)
        else:
            with pytest.raises(toml.TomlError, match=str(toml.MAX_NESTING_DEPTH)):
                toml.loads(text)


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = [{ b = 0x" + "f" * 5000 + " }]", "a = 0b" + "1" * 9000])
def test_numbers_that_nobody_can_write_down_are_no_toml(text: str) -> None:
    """Python refuses to turn them into text, and would do so in the middle of an error about them."""
    with pytest.raises(toml.TomlError, match=r"bits|digits"):
        toml.loads(text)
