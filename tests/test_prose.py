"""The check of the project's English finds what it is for (`tests/prose.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prose import bad_names, bare_pronouns, faults, further_faults, room_of, twice

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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Return the tokens that the adaptive ones of these would draft.", ["'these'"]),
        ("Whether those in which adaptive requests draft are not.", ["'those'"]),
        ("Number of these, from the beginning of the text.", ["'these'"]),
        ("Masks differ from those of the others.", ["'those of the others'"]),
        ("The distribution of a token, given those\n    before it.", ["'those'"]),
        ("The first row waits for one of\n    them.", ["'one of them'"]),
        ("Models have logits. It returns those of the target.", ["'those'"]),
        ("Return work with these rows, for those requests.", []),
        ("Logits differ from those of the model.", []),
        ("Times are those of the device.", []),
        ("The other end, one after the other, for all of them.", []),
    ],
)
def test_pronouns_have_nouns(text: str, expected: list[str]) -> None:
    for source in (f'def f():\n    """{text}"""\n', "# " + text.replace("\n   ", "\n#") + "\n"):
        pronouns = [fault.removesuffix(" without a noun") for _, fault in sorted(bare_pronouns(source))]
        assert sorted(pronouns) == sorted(expected)


def test_lines_of_pronouns_are_named() -> None:
    source = '"""A module.\n\nIt has these.\n"""\nlimit = 1\n\n# A comment, and\n# these.\n'
    assert sorted(line for line, _ in bare_pronouns(source)) == [3, 8]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("found = 1", ["'found' is a name outside of a comprehension"]),
        ("found_XD = 1", ["'found_XD' is a name outside of a comprehension"]),
        ("for one in rows: pass", ["'one' is a name outside of a comprehension"]),
        ("def f(some): ...", ["'some' is a name outside of a comprehension"]),
        ("self.mine = 1", ["'mine' is a name outside of a comprehension"]),
        ("rows = [one for one in rows]; f = lambda one: one", []),
        ("rows = list(one for one, some in pairs)", []),
        ("def of_row(): ...", ["'of_row' begins with a preposition"]),
        ("_of_row = 1", ["'_of_row' begins with a preposition"]),
        ("def of(plan): ...\nsize_of_row = 1", []),
        ("def test_what_is_read(): ...", ["'test_what_is_read' does not say what holds"]),
        ("def test_whole_texts_are_read(): ...", []),
        ("class BlockManager: ...", ["'BlockManager' has the word 'manager'"]),
        ("num_told = 1", ["'num_told' has the word 'told'"]),
        ("log.info(data, handler=handler, information=1)", []),
        ("node_laws = 1", ["'node_laws' has the word 'laws'"]),
    ],
)
def test_names_are_nouns(source: str, expected: list[str]) -> None:
    assert [fault for _, fault in bad_names(source, "engine/step")] == expected


def test_proofs_have_laws() -> None:
    assert list(bad_names("node_laws = 1", "engine/speculation")) == []


def test_rooms_are_folders_of_a_package() -> None:
    paths = ("engine/plan.py", "engine/models/rope.py", "engine/models/gguf/file.py")
    assert [room_of(path) for path in paths] == ["engine", "engine/models", "engine/models"]


def test_further_faults_have_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.py"
    path.write_text('"""Rows, and these."""\nfound = 1\n')
    assert further_faults(str(path)) == [
        f"{path}:1: 'these' without a noun",
        f"{path}:2: 'found' is a name outside of a comprehension",
    ]
