// The conversation on the page: turns, the message that is written, and its settings.

import {Conversation} from "./conversation.js";
import {byId, element, shown} from "./dom.js";
import {countsOf, drafterOf, runsOf} from "./origin.js";
import {KeyRefused, stream} from "./server.js";
import {drawStep} from "./tree.js";

const SETTINGS = "polydraft-settings", LIST = byId("turns"), FORM = byId("ask");
const conversation = new Conversation();
let stopper = null;

/** Show the stored conversation and listen; modelName(): what requests name; onKeyRefused(error). */
export function startChat(modelName, onKeyRefused) {
  readSettings();
  for (const turn of conversation.turns) LIST.append(new Turn(turn).box);
  showEmptiness();
  showEnd();
  FORM.addEventListener("submit", event => {
    event.preventDefault();
    if (isSendable()) send(modelName(), onKeyRefused);
  });
  FORM.addEventListener("invalid", () => { byId("settings").open = true; }, true);
  FORM.addEventListener("input", () => { saveSettings(); showEmptiness(); });
  byId("message").addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    FORM.requestSubmit();
  });
  byId("stop").addEventListener("click", () => stopper?.abort());
  byId("clear").addEventListener("click", () => {
    stopper?.abort();
    conversation.clear();
    LIST.replaceChildren();
    showEmptiness();
  });
  byId("show-drafts").addEventListener("change", event => {
    byId("chat").classList.toggle("with-drafts", event.target.checked);
    saveSettings();
  });
  addEventListener("pagehide", () => {
    if (stopper) conversation.turns.at(-1).note = "interrupted by a reload";
    conversation.save();
  });
}

const isSendable = () => stopper === null && byId("message").value.trim() !== "";

function showEmptiness() {
  byId("send").disabled = !isSendable();
  byId("stop").disabled = stopper === null;
  byId("clear").disabled = !conversation.turns.length;
  byId("welcome").hidden = conversation.turns.length > 0;
}

async function send(model, onKeyRefused) {
  stopper = new AbortController();
  const answer = conversation.ask(byId("message").value);
  const turns = conversation.turns.slice(-2).map(turn => new Turn(turn));
  const shownTurn = turns[1];
  const isChat = byId("kind").value === "chat";
  LIST.append(...turns.map(turn => turn.box));
  showEnd();
  LIST.setAttribute("aria-busy", "true");
  byId("message").value = byId("problem").textContent = "";
  showEmptiness();
  try {
    for await (const chunk of stream(isChat ? "v1/chat/completions" : "v1/completions", bodyOf(model, isChat), stopper.signal)) {
      take(chunk, answer);
      followEnd(() => shownTurn.update());
    }
  } catch (error) {
    answer.note = error.name === "AbortError" ? "stopped" : error.message;
    if (!answer.steps.length) takeBack(turns, error);
    if (error instanceof KeyRefused) onKeyRefused(error);
  }
  stopper = null;
  LIST.setAttribute("aria-busy", "false");
  followEnd(() => shownTurn.finish());
  conversation.save();
  showEmptiness();
}

/** Show the end of the last answer; the drawings of its steps follow below. */
function showEnd() {
  const foot = byId("show-drafts").checked ? LIST.querySelector(".turn:last-child .foot") : null;
  if (!foot) LIST.scrollTop = LIST.scrollHeight;
  else LIST.scrollTop += foot.getBoundingClientRect().bottom - LIST.getBoundingClientRect().bottom + 8;
}

/** Let the list grow; who was at its end sees what is new. */
function followEnd(grow) {
  const isAtEnd = LIST.scrollHeight - LIST.scrollTop - LIST.clientHeight < 60;
  grow();
  if (isAtEnd) showEnd();
}

/** Nothing was answered: the message can be changed and sent again. */
function takeBack(turns, error) {
  if (!conversation.turns.length) return; // cleared meanwhile
  const asked = conversation.takeBack();
  byId("message").value ||= asked;
  for (const turn of turns) turn.box.remove();
  byId("problem").textContent = error.name === "AbortError" ? "" : error.message;
}

function bodyOf(model, isChat) {
  const body = {
    model, stream: true, metrics: true, temperature: +byId("temperature").value, 
    speculation: {enabled: byId("speculate").checked, return_drafts: true},
  };
  if (byId("length").value) body.max_tokens = +byId("length").value;
  if (byId("seed").value) body.seed = +byId("seed").value;
  if (byId("chains").value) body.speculation.num_drafts = +byId("chains").value;
  if (byId("depth").value) body.speculation.draft_length = +byId("depth").value;
  if (isChat) body.messages = conversation.messages(byId("system").value.trim() && byId("system").value);
  else body.prompt = conversation.turns.at(-2).text;
  return body;
}

function take(chunk, answer) {
  for (const choice of chunk.choices) {
    answer.text += choice.text ?? choice.delta?.content ?? "";
    answer.thought += choice.delta?.reasoning_content ?? "";
    answer.steps.push(...choice.drafts ?? []);
    if (choice.finish_reason === "length") answer.note = "ended at its largest number of tokens";
  }
  if (chunk.metrics) answer.metrics = chunk.metrics;
}

/** One turn's elements. */
class Turn {
  constructor(turn) {
    this.turn = turn;
    this.box = element("article", "turn " + (turn.role === "user" ? "user" : "assistant"));
    this.box.append(element("h3", "", turn.role === "user" ? "You" : "Model"));
    this.text = element("p", "text");
    this.text.dir = "auto";
    if (turn.role === "user") {
      this.text.textContent = turn.text;
      this.box.append(this.text);
      return;
    }
    this.thought = element("p", "text thought");
    this.thought.dir = "auto";
    this.origins = element("p", "origins");
    this.summary = element("p", "summary");
    this.steps = element("div", "steps");
    this.steps.tabIndex = 0;
    this.copy = element("button", "quiet", "Copy");
    this.copy.type = "button";
    this.copy.addEventListener("click", () => this.copyText());
    this.box.append(this.thought, this.text, this.origins, element("div", "foot", null, this.copy, this.summary), this.steps);
    this.numDrawn = 0;
    if (stopper === null) this.finish();
  }

  /** Show what the answer has grown by. */
  update() {
    const {thought, text, steps} = this.turn;
    const runs = steps.length ? runsOf(thought + text, steps) : [{text: thought + text, draft: null, step: -1}];
    // Only beside drafted tokens does the colour of the target's own tokens say something.
    this.box.classList.toggle("has-drafts", steps.some(step => step.num_accepted > 0));
    paint(this.thought, part(runs, 0, thought.length), steps);
    paint(this.text, part(runs, thought.length, Infinity), steps);
    for (; this.numDrawn < steps.length; this.numDrawn++)
      this.steps.append(drawStep(this.numDrawn + 1, steps[this.numDrawn]));
  }

  /** Show the figures of the whole answer. */
  finish() {
    this.update();
    const {metrics, note, steps, text, thought} = this.turn;
    const counts = countsOf(steps).filter(one => one.count);
    this.origins.replaceChildren(...counts.map(one => element("span", "origin " + style(one.draft), `${nameOf(one)}: ${one.count}`)));
    this.summary.textContent = [note || (text + thought ? "" : "empty answer"), ...figures(metrics)].filter(Boolean).join(" · ");
    this.copy.hidden = !text;
  }

  async copyText() {
    await copied(this.turn.text);
    this.copy.textContent = "Copied";
    setTimeout(() => { this.copy.textContent = "Copy"; }, 1500);
  }
}

const nameOf = ({draft, drafter}) =>
  draft === 0 ? "target's own" : drafter === "model" ? `draft ${draft}` : `draft ${draft} (${drafter})`;

function figures(metrics) {
  if (!metrics) return [];
  const counts = metrics.speculative_decoding;
  const shared = [shown(metrics.tokens_per_second, 0) + " tokens/s"];
  if (!counts) return [...shared, "no drafts"];
  return [...shared, shown(counts.tokens_per_pass) + " tokens per pass",
    shown(counts.mean_acceptance_length) + " in passes with drafts",
    counts.speedup == null ? "" : shown(counts.speedup) + "× plain decoding", "rule " + counts.rule];
}

/** Suggest a first message and say what the model is, if it is the demonstration pair. */
export function introduce(model) {
  const isDemo = model === "polydraft-demo";
  byId("demo-note").hidden = !isDemo;
  if (!isDemo || conversation.turns.length || byId("message").value) return;
  byId("message").value = "I would like to book a table for two tonight.";
  showEmptiness();
}

const style = draft => draft === null ? "" : draft === 0 ? "own" : "draft-" + Math.min(draft, 5);

/** The part of the runs from one character to another. */
function part(runs, from, to) {
  let at = 0;
  return runs.map(run => {
    const begin = at;
    at += run.text.length;
    return {...run, text: run.text.slice(Math.max(0, from - begin), Math.max(0, to - begin))};
  }).filter(run => run.text);
}

/** Replace the runs that changed since the last call; those before them stay. */
function paint(box, runs, steps) {
  const shownRuns = box.runs ?? [];
  let same = 0;
  while (same < runs.length && shownRuns[same]?.text === runs[same].text && shownRuns[same].draft === runs[same].draft) same++;
  while (box.childNodes.length > same) box.lastChild.remove();
  for (const run of runs.slice(same)) {
    const span = element("span", style(run.draft), run.text);
    if (run.draft !== null) span.title = `step ${run.step + 1}: ` + (run.draft
      ? `accepted from draft ${run.draft} (${drafterOf(steps[run.step], run.draft)})` : "the target's own token");
    box.append(span);
  }
  box.runs = runs;
}

/** Put a text into the clipboard, also where the page is not served over TLS. */
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

const fields = () => [...FORM.querySelectorAll("[data-stored]"), byId("show-drafts")];

function saveSettings() {
  const values = fields().map(field => [field.id, field.type === "checkbox" ? field.checked : field.value]);
  sessionStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(values)));
}

function readSettings() {
  const read = JSON.parse(sessionStorage.getItem(SETTINGS) ?? "{}");
  for (const field of fields()) {
    if (!(field.id in read)) continue;
    if (field.type === "checkbox") field.checked = read[field.id];
    else field.value = read[field.id];
  }
  byId("chat").classList.toggle("with-drafts", byId("show-drafts").checked);
}
