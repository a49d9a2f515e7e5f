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
LEZER = STATIC / "lezer"
CSS = (STATIC / "page.css").read_text()
TYPES = {"js": "text/javascript", "css": "text/css"}
# (text, ground) of everything that is read.
PAIRS = [
    ("text", "bg"), ("text", "card"), ("dim", "card"), ("dim", "bg"), ("accent", "card"), ("on-accent", "accent"),
    ("bad", "card"), ("bad", "bad-bg"), ("good", "good-bg"), ("own", "own-bg"), ("text", "own-bg"),
    *(("text", f"draft-{number}") for number in range(1, 6)),
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
    sums = dict(line.split()[::-1] for line in (LEZER / "SHA256SUMS").read_text().splitlines() if line[:1] != "#")
    assert set(sums) == {file.name for file in LEZER.glob("*.js")}
    scripts = [file.read_text() for file in (*STATIC.glob("*.js"), *LEZER.glob("*.js"))]
    imported = {name for text in scripts for name in re.findall(r"from ['\"](\w*@[^'\"]+)['\"]", text)}
    assert imported == set(packages)
    for address in packages.values():
        served = http.get(address.removeprefix("."))
        assert served.headers["content-type"].startswith(TYPES["js"])
        assert sha256(served.content).hexdigest() == sums[address.rpartition("/")[2]]


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


def test_the_speedup_of_the_page_counts_tokens_of_measured_steps(one_seat_http: httpx.Client) -> None:
    """The page shows their number next to their speedup."""
    before = totals_of(one_seat_http)
    call = {"model": MODEL, "prompt": "hello", "max_tokens": 60, "ignore_eos": True, "seed": 1}
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
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in re.findall(r":root \{(.*?)\}", CSS, re.S)
    )
    colours = light if scheme == "light" else light | dark
    assert set(dark) == set(light)
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


# Session storage with a bound on its characters, and what is read again of eight turns of 200,000
# with drafts as long.
STORAGE = """
globalThis.sessionStorage = {value: null, getItem() { return this.value; }, setItem(name, value) {
  if (value.length > ROOM) throw new Error("full"); this.value = value; }};
"""
STORED = """(() => {
  const long = new page.Conversation(), text = "a".repeat(2e5), steps = [{tokens: [text], chains: [], num_accepted: 0}];
  for (let i = 0; i < 8; i++) Object.assign(long.ask("question " + i), {text, steps});
  long.save();
  const turns = new page.Conversation().turns;
  return [turns.length / 2, turns.filter(turn => turn.steps?.length).length, turns.at(-2)?.text];
})()"""


@pytest.mark.parametrize(("room", "left"), [(10**9, [4, 0, "question 7"]), (500_000, [2, 0, "question 7"])])
def test_a_stored_conversation_has_a_bound(room: int, left: list[Any]) -> None:
    """The newest turns are what a reload reads."""
    assert evaluated("conversation.js", STORED, before=STORAGE.replace("ROOM", str(room))) == left


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
