// Vercel's AI SDK, by its provider for compatible servers and by that for OpenAI: text, streams, tools, objects.
import { createRequire } from "node:module";
import { assert, base, model, resumed, run } from "./checks.mjs";

const require = createRequire(`${process.cwd()}/`);
const { generateText, streamText, Output, stepCountIs, tool } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { createOpenAI } = require("@ai-sdk/openai");
const { z } = require("zod");

const compatible = createOpenAICompatible({
  name: "ssmd",
  baseURL: base,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
})(model);
const openai = createOpenAI({ baseURL: base, apiKey: "none" }).chat(model);
const Weather = z.object({ city: z.string().max(20), unit: z.enum(["celsius", "fahrenheit"]) });
const messages = [{ role: "user", content: "How is the weather in Bonn?" }];
const same = { model: compatible, messages, temperature: 0, maxOutputTokens: 16, maxRetries: 0 };
const tools = {
  weather: tool({
    description: "Tells the weather of a city.",
    inputSchema: z.object({ city: z.string().max(20) }),
    execute: async ({ city }) => `It rains in ${city}.`,
  }),
};
const calling = { ...same, tools, maxOutputTokens: 200, toolChoice: { type: "tool", toolName: "weather" } };
// The first step has to call, the second one to answer.
const twoSteps = {
  ...calling,
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => (stepNumber === 0 ? {} : { toolChoice: "none" }),
};

async function drained(result) {
  for await (const part of result.fullStream) if (part.type === "error") throw part.error;
  return result;
}

await run({
  async chat() {
    const { text, usage } = await generateText(same);
    assert(text && usage.outputTokens <= 16);
  },
  async streamed() {
    const result = await drained(streamText(same));
    assert((await result.text) === (await generateText(same)).text && (await result.usage).inputTokens > 0);
  },
  async "two turns"() {
    const first = await generateText(same);
    const more = [...messages, ...first.response.messages, { role: "user", content: "And in Cologne?" }];
    const second = await generateText({ ...same, messages: more });
    assert(second.usage.inputTokenDetails.cacheReadTokens >= first.usage.inputTokens);
  },
  async tools() {
    const { steps, text } = await generateText(twoSteps);
    assert(steps.length === 2 && steps[0].toolResults[0].output.startsWith("It rains in") && text);
    await resumed(steps[0].usage.inputTokens);
  },
  async "tools streamed"() {
    const result = await drained(streamText(twoSteps));
    const steps = await result.steps;
    assert(steps.length === 2 && steps[0].toolCalls[0].input.city !== undefined);
  },
  async schema() {
    const { output } = await generateText({ ...same, maxOutputTokens: 200, output: Output.object({ schema: Weather }) });
    Weather.parse(output);
  },
  async "schema streamed"() {
    const result = streamText({ ...same, maxOutputTokens: 200, output: Output.object({ schema: Weather }) });
    let last;
    for await (const part of result.partialOutputStream) last = part;
    Weather.parse(last);
  },
  async "a choice"() {
    const { output } = await generateText({ ...same, output: Output.choice({ options: ["sun", "rain"] }) });
    assert(["sun", "rain"].includes(output));
  },
  async "openai.chat: text"() {
    assert((await generateText({ ...same, model: openai })).text);
  },
  async "openai.chat: tools"() {
    assert((await generateText({ ...twoSteps, model: openai })).steps.length === 2);
  },
  async "openai.chat: schema"() {
    const output = Output.object({ schema: Weather });
    Weather.parse((await generateText({ ...same, model: openai, maxOutputTokens: 200, output })).output);
  },
  async frequencyPenalty() {
    assert((await generateText({ ...same, frequencyPenalty: 0.5, presencePenalty: 0.1, seed: 1 })).text);
  },
});
