// Calls of tools in an answer: what a stream adds to them, and what the page shows.

import {element, patch} from "./dom.js";

/** Add the part of a call that a chunk of a stream has. */
export function addCall(calls, {index, id, function: part}) {
  calls[index] ??= {id, name: "", arguments: "", result: ""};
  calls[index].id ??= id;
  calls[index].name += part?.name ?? "";
  calls[index].arguments += part?.arguments ?? "";
}

/** The elements of calls; onResult() follows each change of a result, without it there are no fields for results. */
export function showCalls(box, calls, onResult = null) {
  patch(box, calls.map(call => {
    const code = element("pre", "", indented(call.arguments));
    code.tabIndex = 0;
    const made = element("details", "fold call", null, element("summary", "", `Call of ${call.name}`), code);
    made.open = true;
    return made;
  }));
  if (!onResult) return;
  calls.forEach((call, i) => {
    const area = element("textarea"), label = element("label", "", "Result, sent with the next message", area);
    area.value = call.result;
    area.addEventListener("input", () => { call.result = area.value; onResult(); });
    box.children[i].append(label);
  });
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it has not come whole
  }
}
