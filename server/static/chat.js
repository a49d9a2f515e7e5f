// The conversation on the page: turns, the message that is written, and its settings.

import {paint, style} from "./answer.js";
import {Conversation} from "./conversation.js";
import {byId, element, shown} from "./dom.js";
import {countsOf} from "./origin.js";
import {KeyRefused, stream} from "./server.js";
import {bodyOf, isChat} from "./settings.js";
import {drawStep} from "./tree.js";

const LIST = byId("turns"), FORM = byId("ask");
const conversation = new Conversation();
/** Pause after a drawing of an answer that grows, in durations of the drawing. */
const PAUSE_FACTOR = 4, LEAST_PAUSE_MS = 30;
let stopper = null;
let shownTurns = [];

/** Show the stored conversation and listen; modelName(): what requests name; onKeyRefused(error). */
export function startChat(modelName, onKeyRefused) {
  byId("chat").classList.toggle("with-drafts", byId("show-drafts").checked);
  for (const turn of conversation.turns) add(new Turn(turn));
  showEmptiness();
  showEnd();
  FORM.addEventListener("submit", event => {
    event.preventDefault();
    if (byId("message").value.trim()) send(modelName(), onKeyRefused);
    else byId("message").focus();
  });
  FORM.addEventListener("invalid", () => { byId("settings").open = true; }, true);
  byId("message").addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!stopper) FORM.requestSubmit();
  });
  // While an answer runs the button submits nothing, so Enter in a field of the settings does not stop it.
  byId("send").addEventListener("click", () => stopper?.abort());
  byId("clear").addEventListener("click", () => {
    stopper?.abort();
    conversation.clear();
    LIST.replaceChildren();
    shownTurns = [];
    showEmptiness();
  });
  byId("markdown").addEventListener("change", () => {
    for (const turn of shownTurns) turn.update(true);
  });
  LIST.addEventListener("click", event => {
    const button = event.target.closest(".copy-code");
    if (button) copyFor(button, button.closest(".code").querySelector("code").textContent);
  });
  byId("show-drafts").addEventListener("change", event => {
    byId("chat").classList.toggle("with-drafts", event.target.checked);
  });
  addEventListener("pagehide", () => {
    if (stopper) conversation.turns.at(-1).note = "interrupted by a reload";
    conversation.save();
  });
}

function add(turn) {
  shownTurns.push(turn);
  LIST.append(turn.box);
}

/** Let one button send or stop: stop is what aborts the answer that runs, null without one. */
function setStopper(stop) {
  stopper = stop;
  byId("send").textContent = stop ? "Stop" : "Send";
  byId("send").type = stop ? "button" : "submit";
  LIST.setAttribute("aria-busy", String(stop !== null));
}

function showEmptiness() {
  byId("clear").disabled = !conversation.turns.length;
  byId("welcome").hidden = conversation.turns.length > 0;
}

async function send(model, onKeyRefused) {
  setStopper(new AbortController());
  const path = isChat() ? "v1/chat/completions" : "v1/completions";
  const answer = conversation.ask(byId("message").value, isChat());
  const turns = conversation.turns.slice(-2).map(turn => new Turn(turn));
  const shownTurn = turns[1];
  turns.forEach(add);
  showEnd();
  byId("message").value = byId("problem").textContent = "";
  showEmptiness();
  try {
    for await (const chunk of stream(path, bodyOf(model, conversation), stopper.signal)) {
      take(chunk, answer);
      shownTurn.updateSoon();
    }
  } catch (error) {
    answer.note = error.name === "AbortError" ? "stopped" : error.message;
    if (!answer.steps.length) takeBack(turns, error);
    if (error instanceof KeyRefused) onKeyRefused(error);
  }
  setStopper(null);
  followEnd(() => shownTurn.finish());
  conversation.save();
  showEmptiness();
}

/** Pixels that the list has to scroll to show the end of the last answer; the drawings of its steps follow below. */
function pixelsToEnd() {
  const foot = byId("show-drafts").checked ? LIST.querySelector(".turn:last-child .foot") : null;
  if (!foot) return LIST.scrollHeight - LIST.scrollTop - LIST.clientHeight;
  const below = foot.getBoundingClientRect().bottom - LIST.getBoundingClientRect().bottom + 8;
  return Math.max(below, -LIST.scrollTop);
}

function showEnd() {
  LIST.scrollTop += pixelsToEnd();
}

/** Let the list grow; who was at its end sees what is new. */
function followEnd(grow) {
  const isAtEnd = Math.abs(pixelsToEnd()) < 60;
  grow();
  if (isAtEnd) showEnd();
}

/** Nothing was answered: the message can be changed and sent again. */
function takeBack(turns, error) {
  if (!conversation.turns.length) return; // cleared meanwhile
  const asked = conversation.takeBack();
  byId("message").value ||= asked;
  for (const turn of turns) turn.box.remove();
  shownTurns = shownTurns.filter(turn => !turns.includes(turn));
  byId("problem").textContent = error.name === "AbortError" ? "" : error.message;
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
    this.text = element("div", "text");
    this.text.dir = "auto";
    if (turn.role === "user") {
      this.text.textContent = turn.text;
      this.box.append(this.text);
      return;
    }
    this.thought = element("div", "text thought");
    this.thought.dir = "auto";
    this.origins = element("p", "origins");
    this.summary = element("p", "summary");
    this.steps = element("div", "steps");
    this.steps.tabIndex = 0;
    this.copy = element("button", "quiet", "Copy");
    this.copy.type = "button";
    this.copy.addEventListener("click", () => copyFor(this.copy, this.turn.text));
    this.box.append(this.thought, this.text, this.origins, element("div", "foot", null, this.copy, this.summary), this.steps);
    this.numDrawn = 0;
    this.timer = null;
    this.pauseMs = LEAST_PAUSE_MS;
    this.update(true);
    if (stopper === null) this.finish();
  }

  /** Show what the answer has grown by, after a pause that grows with what a drawing takes. */
  updateSoon() {
    this.timer ??= setTimeout(() => {
      const began = performance.now();
      followEnd(() => this.update(false));
      this.pauseMs = Math.max(LEAST_PAUSE_MS, PAUSE_FACTOR * (performance.now() - began));
      this.timer = null;
    }, this.pauseMs);
  }

  /** Show what the answer has grown by; isWhole: draw all of it again. */
  update(isWhole) {
    if (this.turn.role === "user") return;
    const {steps, isText} = this.turn;
    // Only beside drafted tokens does the colour of the target's own tokens say something.
    this.box.classList.toggle("has-drafts", steps.some(step => step.num_accepted > 0));
    paint(this, this.turn, byId("markdown").checked && !isText, isWhole);
    for (; this.numDrawn < steps.length; this.numDrawn++)
      this.steps.append(drawStep(this.numDrawn + 1, steps[this.numDrawn]));
  }

  /** Show the figures of the whole answer. */
  finish() {
    clearTimeout(this.timer);
    this.update(true);
    const {metrics, note, steps, text, thought} = this.turn;
    const counts = countsOf(steps).filter(one => one.count);
    this.origins.replaceChildren(...counts.map(one => element("span", "origin " + style(one.draft), `${nameOf(one)}: ${one.count}`)));
    this.summary.textContent = [note || (text + thought ? "" : "empty answer"), ...figures(metrics)].filter(Boolean).join(" · ");
    this.copy.hidden = !text;
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
}

/** Put a text into the clipboard, and say so on the button. */
async function copyFor(button, text) {
  await copied(text);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
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
