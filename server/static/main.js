// Starts the page: the conversation, the figures, and the field for an API key.

import {introduce, startChat} from "./chat.js";
import {byId} from "./dom.js";
import {look, modelName, watch} from "./monitor.js";
import {KeyRefused, setKey} from "./server.js";
import {startSettings} from "./settings.js";

let isIntroduced = false;

function onState() {
  if (!isIntroduced && modelName()) introduce(modelName());
  isIntroduced ||= modelName() !== "";
  byId("key-row").hidden = true;
  byId("key-problem").textContent = "";
}

function onError(error) {
  if (!(error instanceof KeyRefused)) return;
  byId("key-row").hidden = false;
  if (byId("key-problem").textContent !== error.message) byId("key-problem").textContent = error.message;
}

byId("key-row").addEventListener("submit", event => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  look(onState, onError);
});

/** On a narrow window one part of the page is shown at a time, and the facts of the server are folded. */
function startTabs() {
  const wide = matchMedia("(min-width: 1100px)"), fold = () => { byId("facts").open = wide.matches; };
  wide.addEventListener("change", fold);
  fold();
  byId("tabs").addEventListener("click", event => showTab(event.target.dataset.tab));
  byId("talks").addEventListener("click", event => { if (event.target.closest("#new, #talks-list button")) showTab("chat"); });
}

function showTab(name) {
  if (!name) return;
  document.body.dataset.tab = name;
  for (const tab of byId("tabs").children) tab.setAttribute("aria-current", String(tab.dataset.tab === name));
}

startSettings();
startTabs();
await startChat(modelName, onError);
watch(onState, onError);
