// A conversation with branches, and what requests and files have of it. It is values alone: no element, no storage.

/** Most characters of drafts that are stored with a conversation. */
export const MOST_CHARACTERS = 1_000_000;
const NAME_LENGTH = 48;

const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2);

/** Turns form a tree: {parent, role, text}, and answers also {thought, calls, steps, metrics, note, isText}.
 *
 * A parent is the number of an earlier turn, -1 of none. isText: a continued plain text. The shown branch ends at `leaf`.
 */
export class Conversation {
  constructor(record = {}) {
    Object.assign(this, {id: newId(), name: "", changed: 0, turns: [], leaf: -1}, record);
  }

  /** The turns of the shown branch. */
  get branch() {
    const branch = [];
    for (let at = this.leaf; at >= 0; at = this.turns[at].parent) branch.unshift(this.turns[at]);
    return branch;
  }

  /** Add a message of the user after a turn's number, and the answer to come; the answer. */
  ask(text, isChat = true, parent = this.leaf) {
    this.undo = {count: this.turns.length, leaf: this.leaf};
    this.name ||= text.trim().split("\n")[0].slice(0, NAME_LENGTH);
    return this.#answerTo(this.turns.push({parent, role: "user", text}) - 1, isChat);
  }

  /** Add a changed copy of a message next to it, and the answer to come; the answer. */
  edit(turn, text, isChat = true) {
    return this.ask(text, isChat, turn.parent);
  }

  /** Add another answer next to one; the answer to come. */
  regenerate(answer) {
    this.undo = {count: this.turns.length, leaf: this.leaf};
    return this.#answerTo(answer.parent, !answer.isText);
  }

  #answerTo(parent, isChat) {
    const answer = {parent, role: "assistant", text: "", thought: "", calls: [], steps: [], metrics: null, note: "", isText: !isChat};
    this.leaf = this.turns.push(answer) - 1;
    return answer;
  }

  /** Remove what was asked last. */
  takeBack() {
    this.turns.length = this.undo.count;
    this.leaf = this.undo.leaf;
    if (!this.turns.length) this.name = "";
  }

  /** The versions of a turn: the turns with its parent. */
  versions(turn) {
    return this.turns.filter(one => one.parent === turn.parent);
  }

  /** Show the newest branch through a turn. */
  show(turn) {
    let at = this.turns.indexOf(turn);
    for (let next = at; next >= 0; next = this.turns.findLastIndex(one => one.parent === at)) at = next;
    this.leaf = at;
  }

  /** The messages of a request: the shown branch without the answer to come. */
  messages(system) {
    const first = system ? [{role: "system", content: system}] : [];
    return [...first, ...this.branch.slice(0, -1).flatMap(messagesOf)];
  }

  /** The record to store: a long one is without the drafts of its oldest answers. */
  record() {
    const {id, name, changed, leaf} = this;
    let room = MOST_CHARACTERS;
    const turns = this.turns.toReversed().map(turn => {
      if (!turn.steps?.length) return turn;
      room -= JSON.stringify(turn.steps).length;
      return room >= 0 ? turn : {...turn, steps: []};
    });
    return {id, name, changed, leaf, turns: turns.toReversed()};
  }

  /** The shown branch as Markdown. */
  markdown() {
    const parts = this.branch.flatMap(turn => [
      turn.role === "user" ? "## You" : "## Model",
      turn.thought && turn.thought.trim().replace(/^/gm, "> "),
      turn.text.trim(),
      ...(turn.calls ?? []).map(call => "```json\n" + JSON.stringify({name: call.name, arguments: call.arguments}) + "\n```"),
    ]);
    return [`# ${this.name}`, ...parts].filter(Boolean).join("\n\n") + "\n";
  }
}

/** A turn as messages of a request: an answer with calls is followed by their results. */
function messagesOf({role, text, thought, calls}) {
  if (!calls?.length) return role === "user" && !text ? [] : [{role, content: text, ...thought && {reasoning_content: thought}}];
  const made = calls.map(call => ({id: call.id, type: "function", function: {name: call.name, arguments: call.arguments}}));
  const results = calls.map(call => ({role: "tool", tool_call_id: call.id, content: call.result ?? ""}));
  return [{role, content: text || null, ...thought && {reasoning_content: thought}, tool_calls: made}, ...results];
}
