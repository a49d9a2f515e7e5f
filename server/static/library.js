// The list of conversations: begin, choose, rename, delete, and save as a file.

import {Conversation} from "./conversation.js";
import {button, byId, element, patch} from "./dom.js";
import {names, read, remove, write} from "./shelf.js";

const CURRENT = "polydraft-current";
let talk = new Conversation(), onOpen;

export const current = () => talk;

/** Show the list and the conversation that this tab has shown last; onOpen() follows each change of it. */
export async function startLibrary(open) {
  onOpen = open;
  byId("new").addEventListener("click", () => { show(new Conversation()); byId("message").focus(); });
  byId("name").addEventListener("change", () => { talk.name = byId("name").value.trim(); showName(); keep(talk); });
  byId("name").addEventListener("keydown", event => { if (event.key === "Enter") byId("name").blur(); });
  byId("delete").addEventListener("click", deleteCurrent);
  byId("save-json").addEventListener("click", () => save(JSON.stringify(talk.record(), null, 1), "application/json", ".json"));
  byId("save-markdown").addEventListener("click", () => save(talk.markdown(), "text/markdown", ".md"));
  await attempt(async () => {
    const record = await read(sessionStorage.getItem(CURRENT) ?? "");
    show(new Conversation(record));
  });
}

/** Store a conversation and show its name in the list; an empty one is in neither. */
export async function keep(kept) {
  if (!kept.isDeleted) await attempt(() => kept.turns.length ? write(kept) : remove(kept.id));
  await list();
}

/** Say what the browser's database refuses: the conversation then lasts as long as the page. */
async function attempt(call) {
  try {
    await call();
  } catch (error) {
    byId("problem").textContent = `The browser does not store this conversation: ${error.message}`;
  }
}

function show(next) {
  talk = next;
  onOpen();
  return list();
}

async function list() {
  sessionStorage.setItem(CURRENT, talk.id);
  showName();
  await attempt(async () => patch(byId("talks-list"), (await names()).map(item)));
}

function showName() {
  if (document.activeElement !== byId("name")) byId("name").value = talk.name;
  document.title = talk.name ? `${talk.name} · Polydraft` : "Polydraft";
  for (const id of ["name", "delete", "save-json", "save-markdown"]) byId(id).disabled = !talk.turns.length;
}

function item({id, name}) {
  const choice = button(name || "without a name", () => attempt(async () => {
    if (id === talk.id) return;
    await show(new Conversation(await read(id)));
    byId("talks-list").querySelector("[aria-current]")?.focus();
  }));
  choice.dataset.id = id; // so that no element of another conversation is taken for this one
  if (id === talk.id) choice.setAttribute("aria-current", "true");
  return element("li", "", null, choice);
}

async function deleteCurrent() {
  if (!confirm(`Delete “${talk.name}”? It cannot be restored.`)) return;
  talk.isDeleted = true; // an answer that runs ends and is not stored
  await attempt(() => remove(talk.id));
  await show(new Conversation());
}

function save(text, type, ending) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = (talk.name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation") + ending;
  link.click();
  URL.revokeObjectURL(link.href);
}
