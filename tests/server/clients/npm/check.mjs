// The official JavaScript client against a daemon: node check.mjs URL MODEL. Prints one JSON document.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "A short story, please." }];
const wish = { model, messages, max_tokens: 20, temperature: 0 };

const whole = await client.chat.completions.create(wish);
let streamed = "";
let usage = null;
const chunks = await client.chat.completions.create({ ...wish, stream: true, stream_options: { include_usage: true } });
for await (const chunk of chunks) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const helper = await client.chat.completions.stream(wish).finalChatCompletion();
const response = await client.responses.create({ model, input: messages[0].content, max_output_tokens: 20, temperature: 0 });
const events = [];
const eventStream = await client.responses.create({ model, input: "x", max_output_tokens: 5, stream: true });
for await (const event of eventStream) events.push(event.type);
let refusal = null;
try {
  await client.chat.completions.create({ ...wish, temperature: 9 });
} catch (error) {
  refusal = { status: error.status, param: error.param };
}
console.log(JSON.stringify({
  whole: whole.choices[0].message.content,
  streamed,
  helper: helper.choices[0].message.content,
  response: response.output_text,
  completionTokens: usage.completion_tokens,
  events,
  refusal,
}));
