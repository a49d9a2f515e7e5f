// Three turns of /v1/responses by the AI SDK, which names earlier items by their ids. Prints the texts and kinds of items as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText } from "ai";

const [url, model] = process.argv.slice(2);
const kinds = new Set();
const noting = (address, call) => {
  for (const item of JSON.parse(call.body).input) kinds.add(item.type ?? "message");
  return fetch(address, call);
};
const asked = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none", fetch: noting }).responses(model);
const messages = [];
const texts = [];
for (const question of ["Hello.", "A story, please.", "And its end?"]) {
  messages.push({ role: "user", content: question });
  const answer = await generateText({ model: asked, messages, maxOutputTokens: 6, temperature: 0, maxRetries: 0 });
  messages.push(...answer.response.messages);
  texts.push(answer.text);
}
console.log(JSON.stringify({ texts, kinds: [...kinds] }));
