"""The check of the project's English finds what it is for (`tests/prose.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prose import faults, twice

METHOD = '''
class Cache:
    def take(self):
        """Take a block.

        Whoever
        """
'''
FAULTY = {
    "page.md": ("A daemon of its own.\n", ["1: 'of its own'"]),
    "module.py": ('"""What it does."""\n', ["1: a docstring begins with 'What'"]),
    "attribute.py": ('"""Settings."""\nlimit = 1\n"""Of all requests."""\n', ["3: a docstring begins with 'Of'"]),
    "method.py": (METHOD, ["6: 'Whoever'"]),
    "comment.py": ("x = 1  # is told so many times\n", ["1: 'is told'", "1: 'so many'"]),
    "words.md": (
        "A copied chain gave 3 tokens behind long texts.\n",
        ["1: 'behind long texts'", "1: 'copied chain'", "1: 'gave'"],
    ),
    "message.py": ('raise ValueError(f"{count} of its own")\n', ["1: 'of its own'"]),
}


@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_found_with_their_lines(name: str, tmp_path: Path) -> None:
    source, expected = FAULTY[name]
    (tmp_path / name).write_text(source)
    assert [fault.removeprefix(f"{tmp_path / name}:") for fault in faults(tmp_path / name)] == expected


def test_code_and_plain_sentences_pass(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text('"""Whether a block is free."""\nwhoever = 1\nHow = 1\n"""Number of blocks."""\n')
    assert list(faults(path)) == []


def test_words_before_a_noun_pass(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("Counts are those of its own path.\nA daemon of its own, and more.\n")
    assert list(faults(path)) == [f"{path}:2: 'of its own'"]


def test_a_second_class_of_one_name_is_found(tmp_path: Path) -> None:
    names = [str(tmp_path / f"{number}.py") for number in range(3)]
    for name, text in zip(
        names, ("class Node:\n    pass\n", "class Leaf:\n    pass\n", "\nclass Node:\n    pass\n"), strict=True
    ):
        Path(name).write_text(text)
    assert list(twice(names)) == [f"{names[2]}:2: {names[0]} has a class 'Node', too"]
