// Vercel's AI SDK: a text and a stream; needs the package ai, too: npm install @ai-sdk/openai-compatible, node ai_sdk.mjs
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const url = process.env.POLYDRAFT_URL ?? "http://localhost:8000";
const v1 = `${url}/v1`;
const model = process.env.POLYDRAFT_MODEL ?? "polydraft-demo";
const key = process.env.POLYDRAFT_API_KEY ?? "none";
const question = "What is the weather in Paris?";

const provider = createOpenAICompatible({ name: "polydraft", baseURL: v1, apiKey: key, includeUsage: true });
console.log((await generateText({ model: provider(model), prompt: question, maxOutputTokens: 24 })).text);
const streamed = streamText({ model: provider(model), prompt: question, maxOutputTokens: 24 });
let text = "";
for await (const part of streamed.textStream) text += part;
console.log(text);
console.log((await streamed.usage).outputTokens);
