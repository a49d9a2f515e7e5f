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

startSettings();
startChat(modelName, onError);
watch(onState, onError);
