"""Pages list the served fields, metrics, families, flags and commands, and links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from engine.models.wrappers import WRAPPERS
from engine.start.architectures import FITTING_MODEL_TYPES
from engine.start.refusals import REASONS
from server.openai.responses import ResponsesRequest
from server.settings import foreign_flags
from server.settings.flags import parse_flags
from server.settings.settings import Serve
from server.wire import foreign_fields
from server.wire.answers import Metrics, SpeculativeDecoding
from server.wire.fields import ChatRequest, CompletionRequest, SpeculationFields

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OTHERS = ("tests/README.md", "server/demo/MODEL_CARD.md")
FIELDS = (DOCS / "fields.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / name for name in OTHERS)])
# Names that mean where a request goes or what it says, not how it is answered.
WHERE_AND_WHAT = frozenset({"model", "messages", "prompt", "input", "instructions", "text", "max_output_tokens"})


def table_names(section: str) -> frozenset[str]:
    """Return the names in the first column of the tables of one section of the page of fields."""
    text = FIELDS[FIELDS.index(f"\n## {section}") :].removeprefix("\n").partition("\n## ")[0]
    columns = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    return frozenset(re.findall(r"[a-z_]+", " ".join(columns))) - {"field"}


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest, ResponsesRequest])
def test_every_request_field_is_on_the_page(body: type) -> None:
    rows = table_names("Request fields") | table_names("Fields that are known")
    assert not sorted(set(body.model_fields) - rows - WHERE_AND_WHAT)  # type: ignore[attr-defined]


def test_every_setting_of_speculation_is_on_the_page() -> None:
    assert not sorted(set(SpeculationFields.model_fields) - frozenset(re.findall(r"[a-z_]+", FIELDS)))


@pytest.mark.parametrize("part", [Metrics, SpeculativeDecoding])
def test_every_metric_of_an_answer_is_on_the_page(part: type) -> None:
    page = (DOCS / "observability.md").read_text()
    rows = frozenset(re.findall(r"^\| ([a-z_]+) \|", page, re.MULTILINE))
    assert not sorted(set(part.__struct_fields__) - rows)  # type: ignore[attr-defined]


def test_families_on_the_page_are_served_and_refused() -> None:
    page = (DOCS / "models.md").read_text()
    section = page[page.index("\n### Text models") :].partition("\n## Dialogues")[0]
    texts, wrappers, refused = section.split("\n### ")[1:]
    assert frozenset(re.findall(r"[a-z0-9_-]+", texts.partition("\n")[2])) == FITTING_MODEL_TYPES
    assert frozenset(re.findall(r"[a-z0-9_-]+", wrappers.partition("\n")[2])) == WRAPPERS.keys()
    rows = re.findall(r"^\| (.+) \| (.+) \|$", refused, re.MULTILINE)[2:]
    assert {why: types.split(", ") for why, types in rows} == {why: types.split() for why, types in REASONS.items()}
    types = [name for names in REASONS.values() for name in names.split()]
    assert len(types) == len(set(types))
    assert FITTING_MODEL_TYPES.isdisjoint(types)
    assert WRAPPERS.keys().isdisjoint(types)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, link


def serve_commands(page: Path) -> list[list[str]]:
    """Return the arguments of each `polydraft serve` in the page's blocks of shell commands."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^(?:\S*/)?polydraft serve (.*)$", "\n".join(blocks).replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(command, comments=True) for command in commands]


@pytest.mark.parametrize("page", [page for page in PAGES if serve_commands(page)], ids=lambda page: page.stem)
def test_serve_commands_of_pages_are_understood(page: Path) -> None:
    for command in serve_commands(page):
        parse_flags([word for word in command if word not in ("&", "...")])


def cells_of(page: str, head: str) -> list[list[str]]:
    """Return the cells of the table that begins with `head`."""
    rows = page[page.index(head) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def flags_in(text: str) -> list[str]:
    """Return the names of the flags in a text, as settings are spelt."""
    return [flag.lstrip("-").replace("-", "_") for flag in re.findall(r"`(--?[a-z-]+)`", text)]


@pytest.mark.parametrize("name", ["tuning", "cuda", "text-drafts"])
def test_flags_of_pages_exist(name: str) -> None:
    flags = re.findall(r"`--(?:no-)?([a-z-]+)", (DOCS / f"{name}.md").read_text())
    assert flags
    assert not sorted({flag.replace("-", "_") for flag in flags} - set(Serve.model_fields))


def test_flags_of_other_servers_are_translated_as_the_page_says() -> None:
    page = (DOCS / "coming-from.md").read_text()
    for here, *elsewhere in cells_of(page, "| here | vLLM"):
        ours = {name.removeprefix("no_") for name in flags_in(here)} or {"model"}
        for flag in flags_in(" ".join(elsewhere)):
            name = foreign_flags.OPPOSITE.get(flag, foreign_flags.SAME.get(flag, flag)).removeprefix("no_")
            assert name in ours | {"speculative_config"}, flag
    ignored = page[page.index("**Without effect**") : page.index("**Refused**")]
    refused = " ".join(cells[0] for cells in cells_of(page, "| flag | instead"))
    for text, is_refused in ((ignored, False), (refused, True)):
        for flag in set(flags_in(text)) - {"speculative_config"}:
            assert foreign_flags.FOREIGN[flag].is_refused == is_refused, flag


def test_commands_of_other_servers_start_the_same_daemon() -> None:
    page = (DOCS / "coming-from.md").read_text()
    block = re.search(r"```sh\n(.*?)```", page, re.DOTALL)
    ours = re.search(r"the same daemon as `polydraft serve ([^`]*)`", page)
    assert block is not None
    assert ours is not None
    wanted = parse_flags(ours[1].split())
    commands = [shlex.split(line) for line in block[1].splitlines()]
    assert len(commands) == 3
    assert all(parse_flags(command[2:]) == wanted for command in commands)


def test_fields_of_other_servers_are_answered_as_the_page_says() -> None:
    page = (DOCS / "coming-from.md").read_text()
    for elsewhere, send in cells_of(page, "| elsewhere | send"):
        for name in re.findall(r"`(\w+)`", elsewhere):
            word = re.findall(r"`(\w+)`|leave it out", send)[0] or "leave it out"
            assert word in foreign_fields.FOREIGN[name].way_out, name
