// Asks /v1/messages by each living major of the AI SDK, whole and streamed. Prints the answers as JSON.
const [url, model] = process.argv.slice(2);
const found = {};
for (const major of [2, 3, 4]) {
  const { createAnthropic } = await import(`ai-sdk-anthropic-${major}`);
  const asked = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model);
  const call = {
    prompt: [{ role: "user", content: [{ type: "text", text: "Hi!" }] }],
    maxOutputTokens: 12,
    temperature: 0,
  };
  const whole = await asked.doGenerate(call);
  const { stream } = await asked.doStream(call);
  let streamed = "";
  for await (const part of stream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") streamed += part.delta;
  }
  found[major] = { whole: whole.content.map((part) => part.text).join(""), streamed };
}
console.log(JSON.stringify(found));
