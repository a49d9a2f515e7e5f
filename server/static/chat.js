// The conversation on the page: its turns, the message that is written, and the answer that runs.

import {addCall} from "./calls.js";
import {byId, copyFor} from "./dom.js";
import {reason, startTooltip} from "./figures.js";
import {current, keep, startLibrary} from "./library.js";
import {serverSpeculation} from "./monitor.js";
import {KeyRefused, stream} from "./server.js";
import {bodyOf, isChat} from "./settings.js";
import {Turn} from "./turn.js";

const LIST = byId("turns"), FORM = byId("ask"), MESSAGE = byId("message");
/** Least time between two stores of an answer that grows. */
const KEEP_MS = 2000;
/** The note of an answer until its end: a reload finds it in what was stored. */
const INTERRUPTED = "interrupted by a reload";
let stopper = null, running = null, shown = new Map(), modelName, onKeyRefused;

const does = {
  isBusy: () => stopper !== null,
  edit: (turn, text) => ask(current().edit(turn, text, isChat()), text),
  regenerate: turn => run(current().regenerate(turn)),
  show(turn) {
    current().show(turn);
    draw();
    shown.get(turn).box.querySelector(".versions button:enabled").focus();
    keep(current());
  },
  keep: () => keep(current()),
  grow: followEnd,
};

/** Show the stored conversation and listen; name(): what requests name; onRefused(error): of a key. */
export function startChat(name, onRefused) {
  modelName = name;
  onKeyRefused = onRefused;
  FORM.addEventListener("submit", event => {
    event.preventDefault();
    const text = MESSAGE.value;
    // Results of calls may go without a message.
    if (!text.trim() && !current().branch.at(-1)?.calls?.length) return MESSAGE.focus();
    MESSAGE.value = "";
    ask(current().ask(text, isChat()), text);
  });
  FORM.addEventListener("invalid", () => { byId("settings").open = true; }, true);
  MESSAGE.addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!stopper) FORM.requestSubmit();
  });
  // While an answer runs the button submits nothing, so Enter in a field of the settings does not stop it.
  byId("send").addEventListener("click", () => stopper?.abort());
  addEventListener("keydown", event => { if (event.key === "Escape") stopper?.abort(); });
  byId("markdown").addEventListener("change", () => { for (const turn of shown.values()) turn.update(true); });
  startTooltip(LIST);
  document.addEventListener("language", () => { for (const turn of shown.values()) turn.update(true); });
  LIST.addEventListener("click", event => {
    const button = event.target.closest(".copy-code");
    if (button) copyFor(button, button.closest(".code").querySelector("code").textContent);
  });
  const showDrafts = () => byId("chat").classList.toggle("with-drafts", byId("show-drafts").checked);
  byId("show-drafts").addEventListener("change", showDrafts);
  showDrafts();
  addEventListener("pagehide", () => { if (stopper) keep(current()); });
  return startLibrary(open);
}

/** Show another conversation; an answer that runs ends. */
function open() {
  stopper?.abort();
  byId("problem").textContent = "";
  draw();
  showEnd();
}

/** Let one button send or stop: stop is what aborts the answer that runs, null without one. */
function setStopper(stop) {
  stopper = stop;
  byId("send").textContent = stop ? "Stop" : "Send";
  byId("send").type = stop ? "button" : "submit";
  LIST.setAttribute("aria-busy", String(stop !== null));
}

/** Show the turns of the current branch; elements of turns that stay are the same ones. */
function draw() {
  const talk = current(), turns = talk.branch.map(turn => shown.get(turn) ?? drawn(turn));
  shown = new Map(turns.map(one => [one.turn, one]));
  turns.forEach((one, i) => {
    one.showVersions(talk.versions(one.turn));
    if (LIST.children[i] !== one.box) LIST.insertBefore(one.box, LIST.children[i] ?? null);
  });
  while (LIST.children.length > turns.length) LIST.lastChild.remove();
  byId("welcome").hidden = turns.length > 0;
  byId("legend").hidden = !turns.length;
}

function drawn(turn) {
  const made = new Turn(turn, does);
  if (turn === running) made.update(true);
  else made.finish();
  return made;
}

/** Ask for the answer to a text, which returns to its field if nothing was answered. */
async function ask(answer, text) {
  const talk = current();
  await run(answer);
  if (!talk.turns.includes(answer)) MESSAGE.value ||= text;
}

/** Ask for the answer that the current conversation waits for. */
async function run(answer) {
  const talk = current(), stop = new AbortController();
  const path = answer.isText ? "v1/completions" : "v1/chat/completions";
  let keptAt = performance.now();
  setStopper(stop);
  running = answer;
  byId("problem").textContent = "";
  answer.note = INTERRUPTED;
  draw();
  showEnd();
  keep(talk);
  const box = shown.get(answer);
  try {
    const body = bodyOf(modelName(), talk);
    for await (const chunk of stream(path, body, stop.signal)) {
      take(chunk, answer, body.speculation.enabled);
      box.updateSoon();
      if (performance.now() < keptAt + KEEP_MS) continue;
      keptAt = performance.now();
      keep(talk);
    }
    if (answer.note === INTERRUPTED) answer.note = "";
  } catch (error) {
    answer.note = error.name === "AbortError" ? "stopped" : error.message;
    if (error instanceof KeyRefused) onKeyRefused(error);
    if (!answer.text && !answer.thought && !answer.calls.length && talk === current()) {
      talk.takeBack(); // nothing was answered: the conversation is as before
      byId("problem").textContent = error.name === "AbortError" ? "" : error.message;
    }
  }
  if (stopper === stop) setStopper(null);
  if (running === answer) running = null;
  draw();
  followEnd(() => box.finish());
  keep(talk);
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

/** Add what a chunk of a stream has to an answer. isEnabled: drafts were asked for. */
function take(chunk, answer, isEnabled) {
  for (const choice of chunk.choices) {
    answer.text += choice.text ?? choice.delta?.content ?? "";
    answer.thought += choice.delta?.reasoning_content ?? "";
    for (const call of choice.delta?.tool_calls ?? []) addCall(answer.calls, call);
    answer.steps.push(...choice.drafts ?? []);
    if (choice.finish_reason === "length") answer.note = "ended at its largest number of tokens";
  }
  if (!chunk.metrics) return;
  answer.metrics = chunk.metrics;
  answer.whyPlain = reason(isEnabled, serverSpeculation(), chunk.metrics);
}

/** Suggest a first message and say what the model is, if it is the demonstration pair. */
export function introduce(model) {
  const isDemo = model === "polydraft-demo";
  byId("demo-note").hidden = !isDemo;
  if (!isDemo || current().turns.length || MESSAGE.value) return;
  MESSAGE.value = "I would like to book a table for two tonight.";
}
