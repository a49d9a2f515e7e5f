// OpenAI's Agents SDK: an agent that must call its tool; needs the package openai, too: npm install @openai/agents, node openai_agents.mjs
import { Agent, OpenAIChatCompletionsModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";

const url = process.env.POLYDRAFT_URL ?? "http://localhost:8000";
const v1 = `${url}/v1`;
const model = process.env.POLYDRAFT_MODEL ?? "polydraft-demo";
const key = process.env.POLYDRAFT_API_KEY ?? "none";
const question = "What is the weather in Paris?";

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
console.log((await run(agent, question)).finalOutput);
