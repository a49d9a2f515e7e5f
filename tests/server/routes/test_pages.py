"""The pages without a browser: files, policy, colours, and origins of tokens."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.api import Timing
from tests.server.conftest import PREFIX
from tests.server.daemon_process import MODEL, ROOT

STATIC = ROOT / "server" / "static"
LIBRARIES = (STATIC / "lezer", STATIC / "temml")
CSS = (STATIC / "page.css").read_text()
TYPES = {"js": "text/javascript", "css": "text/css"}
CODE = ("keyword", "string", "number", "comment", "name")
# (text, ground) of everything that is read.
PAIRS = [
    ("text", "bg"), ("text", "card"), ("dim", "card"), ("dim", "bg"), ("accent", "card"), ("on-accent", "accent"),
    ("bad", "card"), ("bad", "bad-bg"), ("good", "good-bg"), ("own", "own-bg"), ("text", "own-bg"),
    *((text, f"draft-{number}") for text in ("text", *CODE) for number in range(1, 6)),
    *((text, "bg") for text in CODE),
]  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_root_leads_to_the_page(http: httpx.Client, method: str) -> None:
    """A browser and a probing agent both end at the page."""
    first = http.request(method, "/")
    assert (first.status_code, first.headers["location"]) == (307, "dashboard")
    last = http.request(method, "/", follow_redirects=True)
    assert (last.status_code, last.url.path) == (200, "/dashboard")
    assert bool(last.text) == (method == "GET")


@pytest.mark.parametrize("path", ["/dashboard/static/main.js", "/docs/static/swagger-ui.css"])
def test_a_file_is_found_behind_a_proxy(one_seat_http: httpx.Client, path: str) -> None:
    """With and without its prefix, which some proxies strip."""
    for prefix in ("", PREFIX):
        assert one_seat_http.get(prefix + path).status_code == 200


@pytest.mark.parametrize("path", ["/dashboard", "/docs"])
def test_a_page_runs_nothing_but_its_own_files(http: httpx.Client, path: str) -> None:
    """Every script and style has the nonce of this answer alone; no file is of another host."""
    answer, again = http.get(path), http.get(path)
    policy = answer.headers["content-security-policy"]
    (nonce,) = set(re.findall(r"'nonce-([^']+)'", policy))
    assert nonce not in again.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'; ")
    for name in ("script-src", "style-src"):
        assert re.search(rf"{name} 'nonce-[^' ]+'(;|$)", policy)
    assert "unsafe" not in policy.replace("style-src-attr 'unsafe-inline'", "" if path == "/docs" else "-")
    elements = re.findall(r"<(?:script|style|link rel=\"stylesheet\")[^>]*>", answer.text)
    assert elements
    assert all(f'nonce="{nonce}"' in element for element in elements)
    assert not re.search(r" on[a-z]+=|style=", answer.text)
    sources = re.findall(r'<(?:script|link)[^>]* (?:src|href)="([^"]+\.(?:js|css))"', answer.text)
    assert len(sources) == len([one for one in elements if "src=" in one or "href=" in one])
    for source in sources:
        assert_file(http, source)


def assert_file(http: httpx.Client, source: str) -> None:
    """A file of a page, and those that it imports, are served below the page's own address."""
    assert not re.match(r"[a-z]+:|/", source)
    served = http.get(f"/{source}")
    assert served.status_code == 200
    assert served.headers["content-type"].startswith(TYPES[source.rpartition(".")[2]])
    assert served.headers["x-content-type-options"] == "nosniff"
    if source.startswith("dashboard"):
        for name in re.findall(r'from "\./([^"]+)"', served.text):
            assert_file(http, f"{source.rpartition('/')[0]}/{name}")


def test_every_package_of_the_page_is_served_as_it_was_published(http: httpx.Client) -> None:
    """The page's map leads to the files of the listed versions."""
    (text,) = re.findall(r'<script type="importmap"[^>]*>(.*?)</script>', http.get("/dashboard").text, re.S)
    packages: dict[str, str] = json.loads(text)["imports"]
    scripts = [file.read_text() for folder in (STATIC, *LIBRARIES) for file in folder.glob("*.js")]
    imported = {name for text in scripts for name in re.findall(r"from ['\"](\w*@[^'\"]+)['\"]", text)}
    loaded = {f"@lezer/{name}" for name in re.findall(r'lezer\("(\w+)"', (STATIC / "code.js").read_text())}
    assert imported | loaded == set(packages)
    listed = {f"./dashboard/static/lezer/{name.rpartition('/')[2]}.js": name for name in packages}
    assert {address: name for name, address in packages.items()} == listed
    for folder in LIBRARIES:
        lines = (folder / "SHA256SUMS").read_text().splitlines()[1:]
        sums = dict(line.split()[::-1] for line in lines)
        assert set(sums) == {file.name for file in folder.glob("*.js")}
        for name, expected in sums.items():
            served = http.get(f"/dashboard/static/{folder.name}/{name}")
            assert served.headers["content-type"].startswith(TYPES["js"])
            assert sha256(served.content).hexdigest() == expected
            assert (folder / f"{name.partition('.')[0]}.LICENSE").read_text().startswith(("MIT", "The MIT"))


@pytest.mark.parametrize("file", [*STATIC.glob("*.*")], ids=lambda file: file.name)
def test_a_file_is_short_names_no_host_and_writes_no_markup(file: Path) -> None:
    text = file.read_text().replace("http://www.w3.org/2000/svg", "")
    assert len(text.splitlines()) < 400
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert "localStorage" not in text or file.name == "settings.js", "the key is in no other storage than the tab's"


@pytest.mark.parametrize("path", ["/dashboard/static/nothing.js", "/dashboard/static/../app.py", "/docs/static/"])
def test_no_other_file_is_served(http: httpx.Client, path: str) -> None:
    """Requested byte by byte: the client leaves the dots as they are."""
    request = http.build_request("GET", "/")
    request.url = request.url.copy_with(raw_path=path.encode())
    assert http.send(request).status_code == 404


def test_the_state_has_no_text_of_a_request(http: httpx.Client) -> None:
    """A request of another client is in the table while it runs, and in the totals afterwards."""
    call = {"model": MODEL, "prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=call) as stream:
        lines = stream.iter_lines()
        next(lines)
        state = http.get("/dashboard/state").json()
        for _ in lines:
            pass
    assert "hello" not in str(state)
    assert state["num_requests"] == 1
    assert state["requests"][0]["num_prompt_tokens"] > 0
    assert state["about"]["speculation"] == "bv_race, up to 4 drafts of 5 tokens"
    assert (state["about"]["dtype"], state["about"]["max_model_len"]) == ("float32", 2048)
    assert set(state["about"]["sampling"]) == {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    assert http.get("/dashboard/state").json()["requests"] == []


def totals_of(http: httpx.Client) -> dict[str, float]:
    """Totals of the page, with those of its timed steps."""
    state: dict[str, Any] = http.get("/dashboard/state").json()
    return {**state["totals"], **state["timing"]}


@pytest.mark.usefixtures("measured_seat")
def test_the_speedup_of_the_page_counts_tokens_of_measured_steps(one_seat_http: httpx.Client) -> None:
    """The page shows their number next to their speedup."""
    call = {"model": MODEL, "prompt": "hello", "max_tokens": 60, "ignore_eos": True, "seed": 1}
    before = totals_of(one_seat_http)
    call["speculation"] = {"num_drafts": 4, "draft_length": 3}
    assert one_seat_http.post("/v1/completions", json=call).status_code == 200
    after = totals_of(one_seat_http)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["tokens"] == grown["num_tokens"] == 60
    assert 0 < grown["spec_steps"] <= grown["passes"] == grown["num_passes"] < 60
    assert grown["plain_s"] > 0


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(scheme: str) -> None:
    """A contrast of 4.5, which is AA for text of any size."""
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", CSS)
    colours = {name: light if scheme == "light" else dark for name, light, dark in found}
    used = {name for file in STATIC.glob("*.css") for name in re.findall(r"var\(--([\w-]+)\)", file.read_text())}
    assert set(colours) == used
    for text, ground in PAIRS:
        lower, higher = sorted(luminance(colours[name]) for name in (text, ground))
        assert (higher + 0.05) / (lower + 0.05) >= 4.5, (text, ground)


def step(tokens: list[str], num_accepted: int, *chains: list[str]) -> dict[str, Any]:
    """A step as the server reports it."""
    return {"tokens": tokens, "num_accepted": num_accepted, "chains": list(chains)}


TWO = [step(["a", "b", "c"], 2, ["x"], ["a", "b", "d"]), step(["e"], 0, ["f"])]
ORIGINS: list[tuple[str, str, list[dict[str, Any]], list[list[Any]]]] = [
    ("whole", "abce", TWO, [["ab", 2], ["c", 0], ["e", 0]]),
    ("the text lags behind the tokens", "ab", TWO, [["ab", 2]]),
    ("a part of a token was shown", "abc!", TWO[:1], [["ab", 2], ["c", 0], ["!", None]]),
    ("special tokens are not shown", "ab", [step(["a", "<|x|>", "b", "<|end|>"], 1, ["a"])], [["a", 1], ["b", 0]]),
    (
        "a character of two tokens",
        "aéb",
        [step(["a", "\ufffd", "\ufffd", "b"], 2, ["a", "\ufffd"])],
        [["aé", 1], ["b", 0]],
    ),
    ("an unfinished character", "aé", [step(["a", "\ufffd"], 0)], [["aé", 0]]),
    ("no steps", "abc", [], [["abc", None]]),
]  # fmt: skip


def evaluated(module: str, expression: str, *, before: str = "") -> Any:
    """The value of an expression of JavaScript that knows a module's exports as `page`."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine")
    script = f"{before}; const page = await import({json.dumps((STATIC / module).as_uri())});"
    script += f"console.log(JSON.stringify({expression}))"
    command = [node, "--input-type=module", "--no-warnings", "--eval", script]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def test_each_part_of_an_answer_has_its_origin() -> None:
    """The page's module finds origins also if the text is not the tokens' texts joined."""
    cases = json.dumps([[text, steps] for _, text, steps, _ in ORIGINS])
    runs = f"{cases}.map(one => page.runsOf(...one).map(run => [run.text, run.draft]))"
    assert evaluated("origin.js", runs) == [runs for *_, runs in ORIGINS]


# A message with two answers, and a changed message: [texts shown, versions of the last turn].
BRANCHES = """(() => {
  const talk = new page.Conversation(), texts = () => talk.branch.map(turn => turn.text), found = [];
  const note = () => found.push([texts(), talk.versions(talk.branch.at(-1)).length]);
  const first = talk.ask("hello");
  first.text = "A";
  note();
  talk.regenerate(first).text = "B";
  note();
  talk.ask("more").text = "C";
  const asked = talk.branch[0];
  talk.edit(asked, "bye").text = "D";
  note();
  talk.show(first);
  note();
  talk.show(asked);
  note();
  talk.ask("lost");
  talk.takeBack();
  note();
  return found;
})()"""


def test_changes_branch_and_keep_what_was() -> None:
    assert evaluated("conversation.js", BRANCHES) == [
        [["hello", "A"], 1],
        [["hello", "B"], 2],
        [["bye", "D"], 1],
        [["hello", "A"], 2],
        [["hello", "B", "more", "C"], 1],
        [["hello", "B", "more", "C"], 1],
    ]


LONG = """(() => {
  const long = new page.Conversation(), text = "a".repeat(2e5), steps = [{tokens: [text], chains: [], num_accepted: 0}];
  for (let i = 0; i < 8; i++) Object.assign(long.ask("question " + i), {text, steps});
  const answers = new page.Conversation(JSON.parse(JSON.stringify(long.record()))).branch.filter(turn => turn.steps);
  return answers.map(turn => turn.text.length / 2e5 + turn.steps.length);
})()"""


def test_drafts_of_a_stored_conversation_have_a_bound() -> None:
    """The newest answers keep their drafts, and all keep their texts."""
    assert evaluated("conversation.js", LONG) == [1] * 4 + [2] * 4


CALLED = """(() => {
  const talk = new page.Conversation();
  const calls = [{id: "c1", name: "look", arguments: "{}", result: "sun"}];
  Object.assign(talk.ask("Weather?"), {thought: "Hm.", calls});
  Object.assign(talk.ask(""), {text: "Sun."});
  talk.ask("Thanks");
  return [talk.messages("Be brief."), talk.markdown()];
})()"""


def test_a_request_and_a_file_have_the_calls_and_their_results() -> None:
    messages, markdown = evaluated("conversation.js", CALLED)
    function = {"name": "look", "arguments": "{}"}
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "assistant", "content": "Sun."},
        {"role": "user", "content": "Thanks"},
    ]
    assert markdown.startswith("# Weather?\n\n## You\n\nWeather?\n\n## Model\n\n> Hm.\n\n```json\n")


REASONS = [
    ((False, "bv_race", {}), "they are switched off in the settings"),
    ((True, "off (--spec-rule off)", {}), "(--spec-rule off)"),
    ((True, "off, as nothing drafts; --draft-model", {}), "nothing drafts; --draft-model"),
    ((True, "bv_race", {"num_resting_passes": 3}), "plain decoding was as fast at this load"),
    ((True, "bv_race", {}), "none was found for this text"),
]


def test_an_answer_says_why_it_has_no_drafts() -> None:
    calls = json.dumps([call for call, _ in REASONS])
    assert evaluated("figures.js", f"{calls}.map(one => page.reason(...one))") == [reason for _, reason in REASONS]


@pytest.mark.parametrize(
    ("speedup", "text"),
    [
        (1.34, "1.3× faster"),
        (0.96, "as fast as plain decoding"),
        (0.94, "0.9× the speed of plain decoding"),
        (None, "2.5 tokens per pass"),
    ],
)
def test_an_answer_has_one_number(speedup: float | None, text: str) -> None:
    counts = {"speedup": speedup, "tokens_per_pass": 2.5, "rule": "bv_race"}
    turn = json.dumps({"metrics": {"speculative_decoding": counts}, "steps": TWO})
    assert evaluated("figures.js", f"page.figuresOf({turn}).shown") == text


def test_the_page_computes_the_speedup_of_answers() -> None:
    """The page's formula is that of `Timing`; the second case has the bound."""
    for usual_tokens_s in (0.5, 5.0):
        timing = Timing(3, 9, wall_s=0.4, plain_s=0.2, prompt_s=0.1, usual_s=0.25, usual_tokens_s=usual_tokens_s)
        of = f"page.speedupOf(name => ({json.dumps(asdict(timing))})[name])"
        found = evaluated("monitor.js", of, before="globalThis.sessionStorage = {getItem: () => null}")
        assert found == pytest.approx(timing.speedup)


def test_an_empty_sampler_is_not_sent() -> None:
    """The model's own default then holds; 0 is a value."""
    fields = [{"value": value, "dataset": {"sent": name}} for name, value in {"top_p": "", "top_k": "0"}.items()]
    found = evaluated("settings.js", f"page.filled({json.dumps([*fields, {'value': 'x', 'dataset': {}}])}, 'sent')")
    assert found == {"top_k": 0}
