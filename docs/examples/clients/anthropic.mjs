// Anthropic's client: a message, a stream, counted tokens: npm install @anthropic-ai/sdk, node anthropic.mjs
import Anthropic from "@anthropic-ai/sdk";

const url = process.env.POLYDRAFT_URL ?? "http://localhost:8000";
const model = process.env.POLYDRAFT_MODEL ?? "polydraft-demo";
const key = process.env.POLYDRAFT_API_KEY ?? "none";
const question = "What is the weather in Paris?";
const messages = [{ role: "user", content: question }];

const client = new Anthropic({ baseURL: url, apiKey: key });
console.log((await client.messages.create({ model, messages, max_tokens: 24 })).content[0].text);
console.log(await client.messages.stream({ model, messages, max_tokens: 24 }).finalText());
console.log((await client.messages.countTokens({ model, messages })).input_tokens);
