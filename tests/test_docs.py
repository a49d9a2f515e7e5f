"""The pages of docs/ are complete and short: fields, metrics and families are on them, links lead
somewhere.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from engine.start.architectures import FITTING_MODEL_TYPES
from research.analysis.__main__ import ANALYSES
from server.openai.responses import ResponsesRequest
from server.settings import foreign_flags
from server.settings.flags import parse_flags
from server.settings.settings import Serve
from server.wire import foreign_fields
from server.wire.answers import Metrics, SpeculativeDecoding
from server.wire.fields import ChatRequest, CompletionRequest, SpeculationFields

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FIELDS = (DOCS / "fields.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), DOCS / "results" / "papers.md", ROOT / "tests" / "README.md"])
# Tests that show each group of request fields under speculation: for a field, at least one test
# names it.
SHOWN_BY = {
    "temperature top_p top_k min_p seed": "engine/test_output_distribution engine/test_independence",
    "logit_bias presence_penalty frequency_penalty repetition_penalty bad_words allowed_token_ids": (
        "engine/test_output_distribution server/openai/test_edited_logits"
    ),
    "repeat_penalty": "server/wire/test_unknown_fields",
    "min_tokens stop_token_ids ignore_eos max_tokens max_completion_tokens": (
        "engine/test_output_distribution engine/test_independence server/openai/test_edited_logits "
        "server/wire/test_bad_requests"
    ),
    "stop include_stop_str_in_output": "server/text/test_stop_cut server/openai/test_stop_strings",
    "suffix random_seed": "server/openai/test_suffix",
    "skip_special_tokens": "server/openai/test_logprobs",
    "logprobs top_logprobs echo prompt_logprobs": "engine/test_logprobs server/openai/test_logprobs",
    "response_format structured_outputs": "server/openai/test_structured",
    "guided_json guided_regex guided_choice guided_grammar": "server/openai/test_structured",
    "n stream stream_options metrics": "server/openai/test_openai_client server/openai/test_speculation_answers",
    "user metadata safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options client_metadata": (
        "server/wire/test_extra_fields"
    ),
    "store service_tier verbosity include max_tool_calls": (
        "server/wire/test_extra_fields server/wire/test_unknown_fields"
    ),
    "truncate_prompt_tokens truncation_side add_special_tokens return_token_ids": "server/wire/test_extra_fields",
    "priority": "scheduling/test_scheduler engine/test_independence",
    "seed_stable": "engine/test_seed_stable server/openai/test_edited_logits",
    "cache_salt": "engine/test_prefix_cache",
    "prediction": "engine/test_text_drafts server/openai/test_predictions",
    "tools tool_choice parallel_tool_calls": "server/openai/test_tools server/text/test_tool_calls",
    "chat_template_kwargs continue_final_message add_generation_prompt documents": (
        "server/text/test_tokenizer server/openai/test_openai_client server/wire/test_extra_fields"
    ),
    "reasoning_effort reasoning enable_thinking thinking": "server/text/test_reasoning server/anthropic/test_messages",
    "thinking_token_budget": "server/openai/test_thinking_budget",
    "speculation": "server/openai/test_trees_and_bias server/openai/test_return_drafts",
}
# Names that mean where a request goes or what it says, not how it is answered.
WHERE_AND_WHAT = frozenset({"model", "messages", "prompt", "input", "instructions", "text", "max_output_tokens"})


def table_names(section: str) -> frozenset[str]:
    """Return the names in the first column of the tables of one section of the page of fields."""
    text = FIELDS[FIELDS.index(f"\n## {section}") :].removeprefix("\n").partition("\n## ")[0]
    columns = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    return frozenset(re.findall(r"[a-z_]+", " ".join(columns))) - {"field"}


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest, ResponsesRequest])
def test_every_field_of_a_request_has_its_row(body: type) -> None:
    rows = table_names("Request fields") | table_names("Fields that are known")
    assert not sorted(set(body.model_fields) - rows - WHERE_AND_WHAT)  # type: ignore[attr-defined]


def test_every_setting_of_speculation_is_on_the_page() -> None:
    assert not sorted(set(SpeculationFields.model_fields) - frozenset(re.findall(r"[a-z_]+", FIELDS)))


def test_every_served_field_has_tests_that_name_it() -> None:
    tests = {name: tests for names, tests in SHOWN_BY.items() for name in names.split()}
    assert sorted(table_names("Request fields") - set(tests)) == ["output_config"], "a field of messages"
    for name, files in tests.items():
        texts = [(ROOT / "tests" / f"{file}.py").read_text() for file in files.split()]
        assert any(re.search(rf"\b{name}\b", text) for text in texts), name


@pytest.mark.parametrize("part", [Metrics, SpeculativeDecoding])
def test_every_field_of_the_metrics_has_its_row(part: type) -> None:
    page = (DOCS / "observability.md").read_text()
    rows = frozenset(re.findall(r"^\| ([a-z_]+) \|", page, re.MULTILINE))
    assert not sorted(set(part.__struct_fields__) - rows)  # type: ignore[attr-defined]


def test_the_families_on_the_page_are_those_that_are_served() -> None:
    page = (DOCS / "models.md").read_text()
    section = page[page.index("\n## Families") :].partition("\n## Where")[0]
    lists = re.findall(r":((?:\s+[a-z0-9_-]+,?)+)\.", section)
    assert frozenset(re.findall(r"[a-z0-9_-]+", " ".join(lists))) == FITTING_MODEL_TYPES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
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


@pytest.mark.parametrize("folder", ["engine", "server", "research", "loadtest", "docs"])
def test_modules_that_texts_name_exist(folder: str) -> None:
    """In backticks, with any part of the path before the name; the log may name what is gone."""
    tops = ("polydraft", "engine", "server", "research", "loadtest", "tests", "deploy", "docs")
    modules = " ".join(f"/{path.relative_to(ROOT)}" for top in tops for path in (ROOT / top).rglob("*.py")) + " "
    texts = [path for ending in ("py", "md") for path in (ROOT / folder).rglob(f"*.{ending}") if path.name != "log.md"]
    assert texts
    for path in texts:
        for name in re.findall(r"`([\w/]+\.py)`", path.read_text()):
            assert f"/{name} " in modules, (path.name, name)


def test_pages_name_every_analysis_and_no_other() -> None:
    """One verb after `polydraft analyze`, or several with commas."""
    named = [
        verb
        for page in PAGES
        for verbs in re.findall(r"polydraft analyze\s+([a-z-]+(?:`,\s+`[a-z]+(?=`))*)", page.read_text())
        for verb in re.findall(r"[a-z-]+", verbs)
    ]
    assert set(named) == set(ANALYSES)


def test_pages_are_short() -> None:
    """Bars between the cells of tables count as words."""
    most = {"performance.md": 3500, "performance-details.md": 3500}
    lengths = {page.name: len(page.read_text().split()) for page in DOCS.glob("*.md")}
    long = {name for name, words in lengths.items() if words > most.get(name, 1500)}
    assert long == {"log.md"}, "only the log may be long"


def test_entries_of_the_log_are_dated_and_short() -> None:
    _, *entries = (DOCS / "log.md").read_text().split("\n## ")
    assert entries
    for entry in entries:
        title, _, body = entry.partition("\n")
        assert re.match(r"\d{4}-\d{2}-\d{2}: \S", title), title
        assert len(body.strip().splitlines()) <= 6, title


def cells_of(page: str, head: str) -> list[list[str]]:
    """Return the cells of the table that begins with `head`."""
    rows = page[page.index(head) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def flags_in(text: str) -> list[str]:
    """Return the names of the flags in a text, as settings are spelt."""
    return [flag.lstrip("-").replace("-", "_") for flag in re.findall(r"`(--?[a-z-]+)`", text)]


@pytest.mark.parametrize("name", ["tuning", "cuda", "text-drafts", "editors"])
def test_flags_of_pages_exist(name: str) -> None:
    flags = re.findall(r"`--(?:no-)?([a-z-]+)", (DOCS / f"{name}.md").read_text())
    assert flags
    assert not sorted({flag.replace("-", "_") for flag in flags} - set(Serve.model_fields))


def test_flags_of_other_servers_are_what_the_page_says() -> None:
    page = (DOCS / "coming-from.md").read_text()
    for here, *elsewhere in cells_of(page, "| here | vLLM"):
        ours = {name.removeprefix("no_") for name in flags_in(here)} or {"model"}
        for flag in flags_in(" ".join(elsewhere)):
            name = foreign_flags.OPPOSITE.get(flag, foreign_flags.SAME.get(flag, flag)).removeprefix("no_")
            assert name in ours | {"speculative_config"}, flag
            assert name in Serve.model_fields or name == "speculative_config", flag
    ignored = page[page.index("**Without effect**") : page.index("**Refused**")]
    refused = " ".join(cells[0] for cells in cells_of(page, "| flag | instead"))
    for text, is_refused in ((ignored, False), (refused, True)):
        for flag in set(flags_in(text)) - {"speculative_config"}:
            assert foreign_flags.FOREIGN[flag].is_refused == is_refused, flag


def test_commands_for_other_servers_mean_the_same_here() -> None:
    page = (DOCS / "coming-from.md").read_text()
    block = re.search(r"```sh\n(.*?)```", page, re.DOTALL)
    ours = re.search(r"the same daemon as `polydraft serve ([^`]*)`", page)
    assert block is not None
    assert ours is not None
    wanted = parse_flags(ours[1].split())
    commands = [shlex.split(line) for line in block[1].splitlines()]
    assert len(commands) == 3
    assert all(parse_flags(command[2:]) == wanted for command in commands)


def test_fields_for_other_servers_exist() -> None:
    page = (DOCS / "coming-from.md").read_text()
    same = page[page.index("## Request fields") : page.index("| elsewhere | send")]
    sent = " ".join(cells[1] for cells in cells_of(page, "| elsewhere | send"))
    names = {*re.findall(r"`(\w+)`", same), *re.findall(r"`(\w+)`", sent)} - {"regex", "json", "grammar"}
    assert names <= set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert len(names) > 20
    for elsewhere, send in cells_of(page, "| elsewhere | send"):
        for name in re.findall(r"`(\w+)`", elsewhere):
            word = re.findall(r"`(\w+)`|leave it out", send)[0] or "leave it out"
            assert word in foreign_fields.FOREIGN[name].way_out, name
    ignored = page[page.index("Names that cannot change") :].partition("\n\n")[0]
    assert not set(re.findall(r"`(\w+)`", ignored)) & (set(foreign_fields.FOREIGN) | set(ChatRequest.model_fields))
