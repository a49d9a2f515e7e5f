// LangChain's ChatOpenAI: an answer and a stream: npm install @langchain/openai, node langchain_openai.mjs
import { ChatOpenAI } from "@langchain/openai";

const url = process.env.POLYDRAFT_URL ?? "http://localhost:8000";
const v1 = `${url}/v1`;
const model = process.env.POLYDRAFT_MODEL ?? "polydraft-demo";
const key = process.env.POLYDRAFT_API_KEY ?? "none";
const question = "What is the weather in Paris?";

const chat = new ChatOpenAI({ model, apiKey: key, maxTokens: 24, configuration: { baseURL: v1 } });
console.log((await chat.invoke(question)).content);
let text = "";
for await (const part of await chat.stream(question)) text += part.content;
console.log(text);
