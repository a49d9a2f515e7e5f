// OpenAI's client: a stream and a response: npm install openai, node openai.mjs
import OpenAI from "openai";

const url = process.env.POLYDRAFT_URL ?? "http://localhost:8000";
const v1 = `${url}/v1`;
const model = process.env.POLYDRAFT_MODEL ?? "polydraft-demo";
const key = process.env.POLYDRAFT_API_KEY ?? "none";
const question = "What is the weather in Paris?";
const messages = [{ role: "user", content: question }];

const client = new OpenAI({ baseURL: v1, apiKey: key });
const stream = await client.chat.completions.create({ model, messages, max_tokens: 24, stream: true });
let text = "";
for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
console.log(text);
console.log((await client.responses.create({ model, input: question, max_output_tokens: 24 })).output_text);
