// The openai library for Node: chat, its helpers for streams, schemas and tools, completions, errors.
import { createRequire } from "node:module";
import { assert, base, model, resumed, run } from "./checks.mjs";

const require = createRequire(`${process.cwd()}/`);
const { OpenAI, BadRequestError, NotFoundError } = require("openai");
const { zodResponseFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const client = new OpenAI({ baseURL: base, apiKey: "none", maxRetries: 0 });
const same = { model, temperature: 0 };
const messages = [{ role: "user", content: "How is the weather in Bonn?" }];
const Weather = z.object({ city: z.string().max(20), unit: z.enum(["celsius", "fahrenheit"]) });
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};
const described = { name: "weather", description: "Tells the weather of a city.", parameters };
const tools = [{ type: "function", function: { ...described, strict: true } }];
const named = { type: "function", function: { name: "weather" } };
const chat = (fields) => client.chat.completions.create({ ...same, messages, max_tokens: 16, ...fields });

await run({
  async chat() {
    const answer = await chat();
    assert(answer.choices[0].message.content && answer.usage.total_tokens);
  },
  async streamed() {
    let text = "";
    for await (const chunk of await chat({ stream: true })) text += chunk.choices[0].delta.content ?? "";
    assert(text === (await chat()).choices[0].message.content);
  },
  async "two turns"() {
    const first = await chat();
    const more = [...messages, first.choices[0].message, { role: "user", content: "And in Cologne?" }];
    const second = await chat({ messages: more });
    assert(second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens);
    assert(second.usage.ssmd.session === first.usage.ssmd.session);
  },
  async tools() {
    const first = await chat({ tools, tool_choice: named, max_tokens: 200 });
    const [call] = first.choices[0].message.tool_calls;
    assert(Object.keys(JSON.parse(call.function.arguments)).join() === "city");
    const result = { role: "tool", tool_call_id: call.id, content: "It rains." };
    const second = await chat({ messages: [...messages, first.choices[0].message, result], tools });
    assert(second.choices[0].message.content);
    await resumed(first.usage.prompt_tokens);
  },
  async "tools streamed"() {
    const given = { ...same, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 };
    const stream = client.chat.completions.stream(given);
    let parts = 0;
    stream.on("tool_calls.function.arguments.delta", () => parts++);
    const [call] = (await stream.finalMessage()).tool_calls;
    assert(parts > 0 && JSON.parse(call.function.arguments).city !== undefined);
  },
  async schema() {
    const response_format = zodResponseFormat(Weather, "weather");
    const answer = await client.chat.completions.parse({ ...same, messages, response_format, max_tokens: 200 });
    Weather.parse(answer.choices[0].message.parsed);
  },
  async "schema streamed"() {
    const response_format = zodResponseFormat(Weather, "weather");
    const stream = client.chat.completions.stream({ ...same, messages, response_format, max_tokens: 200 });
    Weather.parse((await stream.finalChatCompletion()).choices[0].message.parsed);
  },
  async runTools() {
    const told = [];
    const weather = ({ city }) => (told.push(city), "It rains.");
    const tool = { type: "function", function: { ...described, function: weather, parse: JSON.parse } };
    const given = { ...same, messages, tools: [tool], tool_choice: "required", max_tokens: 200 };
    const runner = client.chat.completions.runTools({ ...given, parallel_tool_calls: false }, { maxChatCompletions: 2 });
    await runner.done();
    assert(told.length === 2, `the function was called ${told.length} times`);
    assert(runner.messages.filter((message) => message.role === "tool").length === 2);
    await resumed();
  },
  async "runTools streamed"() {
    const told = [];
    const weather = ({ city }) => (told.push(city), "It rains.");
    const tool = { type: "function", function: { ...described, function: weather, parse: JSON.parse } };
    const given = { ...same, messages, tools: [tool], tool_choice: named, max_tokens: 200, stream: true };
    await client.chat.completions.runTools(given).done();
    assert(told.length === 1);
  },
  async completions() {
    const answer = await client.completions.create({ ...same, prompt: "Once upon", max_tokens: 8 });
    assert(answer.choices[0].text);
  },
  async "a stream that is left"() {
    const stream = await chat({ stream: true, max_tokens: 400 });
    for await (const _ of stream) break;
  },
  async "typed errors"() {
    for (const [kind, fields] of [[NotFoundError, { model: "gpt-9" }], [BadRequestError, { messages: [] }]]) {
      const error = await chat(fields).then(() => null, (said) => said);
      assert(error instanceof kind, `${error}`);
    }
  },
});
