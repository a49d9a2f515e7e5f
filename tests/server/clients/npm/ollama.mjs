// Ollama's JavaScript client against a daemon: node ollama.mjs URL MODEL. Prints one JSON document.
import { Ollama } from "ollama";

const [url, model] = process.argv.slice(2);
const client = new Ollama({ host: url });
const asked = {
  model,
  messages: [{ role: "user", content: "A short story, please." }],
  options: { num_predict: 8, temperature: 0 },
};

const whole = await client.chat(asked);
let streamed = "";
for await (const line of await client.chat({ ...asked, stream: true })) streamed += line.message.content;
const listed = (await client.list()).models[0].name;
let refusal = null;
try {
  await client.chat({ ...asked, model: "llama3.2:3b" });
} catch (error) {
  refusal = error.message;
}
console.log(JSON.stringify({ whole: whole.message.content, streamed, listed, refusal }));
