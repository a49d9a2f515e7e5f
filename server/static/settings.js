// Settings of requests and of the page, stored in this browser. The API key is not among them.

import {byId} from "./dom.js";

const NAME = "polydraft-settings";
/** A bound that the server cuts to the room in the context: without one a plain text ends after 16 tokens. */
const ROOM_LEFT = 2 ** 31 - 1;

const stored = () => [...document.querySelectorAll("[data-stored]")];

/** Read the stored settings, and store each change. */
export function startSettings() {
  const read = readStored();
  for (const field of stored()) {
    if (field.id in read) write(field, read[field.id]);
    field.addEventListener("input", save);
  }
  const showTheme = () => { document.documentElement.dataset.theme = byId("theme").value; };
  byId("theme").addEventListener("input", showTheme);
  showTheme();
}

function readStored() {
  try {
    return JSON.parse(localStorage.getItem(NAME)) ?? {};
  } catch {
    return {};
  }
}

function write(field, value) {
  if (field.type === "checkbox") field.checked = value;
  else field.value = value;
}

function save() {
  const values = stored().map(field => [field.id, field.type === "checkbox" ? field.checked : field.value]);
  localStorage.setItem(NAME, JSON.stringify(Object.fromEntries(values)));
}

/** Show the model's own values in the fields of samplers that are empty. */
export function showDefaults(defaults) {
  for (const [name, value] of Object.entries(defaults)) byId(name).placeholder = value;
}

/** The fields of a request that have a value; an empty field is the model's own default and is not sent. */
export function filled(fields, key) {
  const sent = fields.filter(field => field.dataset[key] && field.value.trim() !== "");
  return Object.fromEntries(sent.map(field => [field.dataset[key], Number(field.value)]));
}

export const isChat = () => byId("kind").value === "chat";

/** The body of a request for the answer at the end of a conversation. */
export function bodyOf(model, talk) {
  const [asked, answer] = talk.branch.slice(-2);
  const speculation = {enabled: byId("speculate").checked, return_drafts: true, ...filled(stored(), "draft")};
  const body = {model, stream: true, metrics: true, ...filled(stored(), "sent"), speculation};
  if (answer.isText) return {max_tokens: ROOM_LEFT, ...body, prompt: asked.text};
  if (byId("tools").value.trim()) body.tools = toolsOf(byId("tools").value);
  return {...body, messages: talk.messages(byId("system").value.trim() && byId("system").value)};
}

function toolsOf(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`"Tools" in the settings is not JSON: ${error.message}`);
  }
}
