// One JavaScript client against a daemon, as its documentation uses it: node clients.mjs URL MODEL PACKAGE.
import assert from "node:assert";

const [url, model, wanted] = process.argv.slice(2);
const v1 = `${url}/v1`;
const key = "unused";
const question = "What is the weather in Paris?";
const messages = [{ role: "user", content: question }];

const clients = {
  async openai() {
    const { default: OpenAI } = await import("openai");
    const client = new OpenAI({ baseURL: v1, apiKey: key });
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 24, stream: true });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    assert(text);
    assert((await client.responses.create({ model, input: question, max_output_tokens: 24 })).output_text);
  },
  async "@anthropic-ai/sdk"() {
    const { default: Anthropic } = await import("@anthropic-ai/sdk");
    const client = new Anthropic({ baseURL: url, apiKey: key });
    assert((await client.messages.create({ model, messages, max_tokens: 24 })).content[0].text);
    assert(await client.messages.stream({ model, messages, max_tokens: 24 }).finalText());
    assert((await client.messages.countTokens({ model, messages })).input_tokens);
  },
  async "@ai-sdk/openai-compatible"() {
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    const { generateText, streamText } = await import("ai");
    const provider = createOpenAICompatible({ name: "polydraft", baseURL: v1, apiKey: key, includeUsage: true });
    assert((await generateText({ model: provider(model), prompt: question, maxOutputTokens: 24 })).text);
    const streamed = streamText({ model: provider(model), prompt: question, maxOutputTokens: 24 });
    let text = "";
    for await (const part of streamed.textStream) text += part;
    assert(text);
    assert((await streamed.usage).outputTokens);
  },
  async "@langchain/openai"() {
    const { ChatOpenAI } = await import("@langchain/openai");
    const chat = new ChatOpenAI({ model, apiKey: key, maxTokens: 24, configuration: { baseURL: v1 } });
    assert((await chat.invoke(question)).content);
    let text = "";
    for await (const part of await chat.stream(question)) text += part.content;
    assert(text);
  },
  async "@openai/agents"() {
    const { Agent, OpenAIChatCompletionsModel, run, setTracingDisabled, tool } = await import("@openai/agents");
    const { default: OpenAI } = await import("openai");
    setTracingDisabled(true);
    const weather = tool({
      name: "weather",
      description: "The weather.",
      parameters: { type: "object", properties: {}, required: [], additionalProperties: false },
      strict: true,
      execute: async () => "sunny",
    });
    const agent = new Agent({
      name: "a",
      model: new OpenAIChatCompletionsModel(new OpenAI({ baseURL: v1, apiKey: key }), model),
      tools: [weather],
      modelSettings: { maxTokens: 200, toolChoice: "required" },
    });
    assert((await run(agent, question)).finalOutput !== undefined);
  },
};
await clients[wanted]();
