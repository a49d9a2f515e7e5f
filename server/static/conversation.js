// A conversation, and its copy in this tab's session storage, which a reload reads again. The copy has a bound.

const NAME = "polydraft-conversation";
export const MOST_CHARACTERS = 1_000_000;

/** Turns: {role, text}, and of answers also {thought, steps, metrics, note, isText}; isText: a continued plain text. */
export class Conversation {
  constructor() {
    this.turns = [];
    try {
      const read = JSON.parse(sessionStorage.getItem(NAME) ?? "[]");
      if (Array.isArray(read)) this.turns = read.filter(turn => typeof turn?.text === "string");
    } catch {
      sessionStorage.removeItem(NAME);
    }
  }

  /** Add a message of the user and the answer to come; the answer. isChat: it answers, and does not go on with a text. */
  ask(text, isChat = true) {
    const answer = {role: "assistant", text: "", thought: "", steps: [], metrics: null, note: "", isText: !isChat};
    this.turns.push({role: "user", text}, answer);
    return answer;
  }

  /** Remove the last message and its answer; the message. */
  takeBack() {
    const [asked] = this.turns.splice(-2);
    return asked.text;
  }

  clear() {
    this.turns = [];
    this.save();
  }

  /** What the server is sent: all turns but the answer to come. */
  messages(system) {
    const first = system ? [{role: "system", content: system}] : [];
    return [...first, ...this.turns.slice(0, -1).map(turn => ({role: turn.role, content: turn.text}))];
  }

  /** Store the conversation: without the drafts of its oldest answers, then without its oldest turns, if it is long. */
  save() {
    const turns = this.turns.map(turn => ({...turn}));
    const withDrafts = turns.filter(turn => turn.steps?.length);
    for (;;) {
      const text = JSON.stringify(turns);
      if (text.length <= MOST_CHARACTERS && stored(text)) return;
      if (!turns.length) return;
      if (withDrafts.length) withDrafts.shift().steps = [];
      else turns.splice(0, 2);
    }
  }
}

function stored(text) {
  try {
    sessionStorage.setItem(NAME, text);
    return true;
  } catch {
    return false; // the browser's own bound
  }
}
