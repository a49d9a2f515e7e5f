// A batch by the official JavaScript client: node batches.mjs URL MODEL. Prints one JSON document.
import OpenAI, { toFile } from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const endpoint = "/v1/completions";
const line = (custom_id, more) =>
  JSON.stringify({ custom_id, method: "POST", url: endpoint, body: { model, prompt: "once", max_tokens: 3, ...more } });
const text = [line("a"), line("b"), line("bad", { temperature: 9 }), line("c")].join("\n");
const read = async (id) => (await (await client.files.content(id)).text()).trim().split("\n").map((row) => JSON.parse(row));

const file = await client.files.create({ file: await toFile(Buffer.from(text), "lines.jsonl"), purpose: "batch" });
let batch = await client.batches.create({ input_file_id: file.id, endpoint, completion_window: "24h" });
while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
  await new Promise((wake) => setTimeout(wake, 50));
  batch = await client.batches.retrieve(batch.id);
}
const listed = [];
for await (const known of client.batches.list({ limit: 1 })) listed.push(known.id);
console.log(JSON.stringify({
  id: batch.id,
  status: batch.status,
  counts: batch.request_counts,
  answers: await read(batch.output_file_id),
  faults: await read(batch.error_file_id),
  listed,
  deleted: (await client.files.delete(file.id)).deleted,
}));
