// One turn's elements: a message with what edits it, or an answer with its figures and drawings.

import {paint} from "./answer.js";
import {showCalls} from "./calls.js";
import {button, byId, copyFor, element} from "./dom.js";
import {figuresOf} from "./figures.js";
import {drawStep} from "./tree.js";

/** Pause after a drawing of an answer that grows, in durations of the drawing. */
const PAUSE_FACTOR = 4, LEAST_PAUSE_MS = 30;

/** Elements of a turn.
 *
 * does: what the conversation does, {isBusy(), edit(turn, text), regenerate(turn), show(turn), keep(), grow(change)}.
 */
export class Turn {
  constructor(turn, does) {
    this.turn = turn;
    this.does = does;
    this.box = element("article", "turn " + turn.role, null, element("h3", "", turn.role === "user" ? "You" : "Model"));
    this.text = element("div", "text");
    this.text.dir = "auto";
    this.versions = element("span", "versions");
    if (turn.role === "user") this.#buildMessage();
    else this.#buildAnswer();
  }

  #buildMessage() {
    this.text.textContent = this.turn.text || "(results of the calls)";
    this.box.append(this.text, element("div", "foot", null, button("Edit", () => this.#edit()), this.versions));
  }

  #buildAnswer() {
    this.thought = element("div", "text thought");
    this.thought.dir = "auto";
    this.fold = element("details", "fold", null, element("summary", "", "Thoughts"), this.thought);
    this.calls = element("div", "calls");
    this.note = element("span", "summary");
    this.figure = button("", () => {});
    this.figure.className = "figure";
    this.figure.setAttribute("aria-describedby", "tip");
    this.steps = element("div", "steps");
    this.steps.tabIndex = 0;
    this.copy = button("Copy", () => copyFor(this.copy, this.turn.text));
    const again = button("Regenerate", () => this.does.regenerate(this.turn));
    this.box.append(this.fold, this.text, this.calls,
      element("div", "foot", null, this.copy, again, this.versions, this.note, this.figure), this.steps);
    this.numDrawn = 0;
    this.timer = null;
    this.pauseMs = LEAST_PAUSE_MS;
  }

  /** Let the message be changed in its place. */
  #edit() {
    const area = element("textarea"), hidden = [...this.box.children].slice(1);
    area.value = this.turn.text;
    area.setAttribute("aria-label", "changed message");
    const close = () => {
      form.remove();
      for (const one of hidden) one.hidden = false;
      this.box.querySelector("button").focus();
    };
    const form = element("form", "edit", null, area, element("button", "", "Send"), button("Cancel", close));
    form.addEventListener("submit", event => {
      event.preventDefault();
      if (!area.value.trim() || this.does.isBusy()) return;
      close();
      this.does.edit(this.turn, area.value);
    });
    form.addEventListener("keydown", event => { if (event.key === "Escape") close(); });
    for (const one of hidden) one.hidden = true;
    this.box.append(form);
    area.focus();
  }

  /** Show the number of this version, and ways to its neighbours. */
  showVersions(versions) {
    const at = versions.indexOf(this.turn);
    const step = (text, to, label) => {
      const made = button(text, () => this.does.show(versions[to]), label);
      made.disabled = !versions[to];
      return made;
    };
    const parts = [step("<", at - 1, "previous version"), `${at + 1} / ${versions.length}`, step(">", at + 1, "next version")];
    this.versions.replaceChildren(...versions.length > 1 ? parts : []);
  }

  /** Show what the answer has grown by, after a pause that grows with what a drawing takes. */
  updateSoon() {
    this.timer ??= setTimeout(() => {
      const began = performance.now();
      this.does.grow(() => this.update(false));
      this.pauseMs = Math.max(LEAST_PAUSE_MS, PAUSE_FACTOR * (performance.now() - began));
      this.timer = null;
    }, this.pauseMs);
  }

  /** Show what the answer has grown by; isWhole: draw all of it again. */
  update(isWhole) {
    if (this.turn.role === "user") return;
    const {calls, steps, isText, text, thought} = this.turn;
    this.fold.hidden = !thought;
    // Thoughts are open until the answer begins, and then as the reader leaves them.
    const isThinking = thought !== "" && !text && !calls.length && !isWhole;
    if (isThinking !== this.isThinking) this.fold.open = this.isThinking = isThinking;
    if (!this.isFinished) showCalls(this.calls, calls);
    paint(this, this.turn, byId("markdown").checked && !isText, isWhole);
    for (; this.numDrawn < steps.length; this.numDrawn++)
      this.steps.append(drawStep(this.numDrawn + 1, steps[this.numDrawn]));
  }

  /** Show the figures of the whole answer. */
  finish() {
    if (this.turn.role === "user") return;
    clearTimeout(this.timer);
    this.isFinished = true; // its calls have fields for results, which no drawing replaces
    this.update(true);
    const {calls, note, text, thought} = this.turn, figures = figuresOf(this.turn);
    showCalls(this.calls, calls, this.does.keep);
    this.note.textContent = note || (text || thought || calls.length ? "" : "empty answer");
    this.figure.textContent = figures.shown;
    this.figure.dataset.lines = figures.lines.join("\n");
    this.copy.hidden = !text;
  }
}
