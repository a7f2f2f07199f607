// A task of several steps by one library of Node's over one protocol: as steps.py. `steps.mjs WAY URL MODEL PROMPT`
import { exec } from "node:child_process";
import { createRequire } from "node:module";
import { promisify } from "node:util";

const [way, url, model, prompt] = process.argv.slice(2);
const require = createRequire(`${process.env.NODE_PACKAGES}/`);
const { z } = require("zod");

const base = `${url}/v1`;
const key = "none";
const system = "You work in a folder by a shell.";
const parameters = { type: "object", properties: { command: { type: "string" } }, required: ["command"] };
const described = { name: "shell", description: "Run a command.", parameters };

async function shell({ command }) {
  return (await promisify(exec)(command)).stdout;
}

async function openaiChat() {
  const { OpenAI } = require("openai");
  const runner = new OpenAI({ baseURL: base, apiKey: key }).chat.completions.runTools({
    model,
    stream: true,
    messages: [
      { role: "system", content: system },
      { role: "user", content: prompt },
    ],
    tools: [{ type: "function", function: { ...described, parse: JSON.parse, function: shell } }],
  });
  return await runner.finalContent();
}

async function openaiResponses() {
  const { OpenAI } = require("openai");
  const client = new OpenAI({ baseURL: base, apiKey: key });
  const input = [{ role: "user", content: prompt }];
  for (;;) {
    const tools = [{ type: "function", ...described, strict: false }];
    const stream = client.responses.stream({ model, instructions: system, input, tools });
    const answer = await stream.finalResponse();
    const calls = answer.output.filter((one) => one.type === "function_call");
    if (!calls.length) return answer.output_text;
    input.push(...answer.output);
    for (const { call_id, arguments: given } of calls)
      input.push({ type: "function_call_output", call_id, output: await shell(JSON.parse(given)) });
  }
}

async function anthropic() {
  const { Anthropic } = require("@anthropic-ai/sdk");
  const { betaZodTool } = require("@anthropic-ai/sdk/helpers/beta/zod");
  const tool = betaZodTool({
    name: "shell",
    description: "Run a command.",
    inputSchema: z.object({ command: z.string() }),
    run: shell,
  });
  const messages = [{ role: "user", content: prompt }];
  const client = new Anthropic({ baseURL: url, apiKey: key });
  const asked = { model, max_tokens: 400, system, messages, tools: [tool] };
  return (await client.beta.messages.toolRunner(asked)).content.at(-1).text;
}

async function ollama() {
  const { Ollama } = require("ollama");
  const client = new Ollama({ host: url });
  const messages = [
    { role: "system", content: system },
    { role: "user", content: prompt },
  ];
  for (;;) {
    const whole = { role: "assistant", content: "", tool_calls: [] };
    const tools = [{ type: "function", function: described }];
    for await (const { message } of await client.chat({ model, messages, tools, stream: true })) {
      whole.content += message.content;
      whole.tool_calls.push(...(message.tool_calls ?? []));
    }
    messages.push(whole);
    if (!whole.tool_calls.length) return whole.content;
    for (const call of whole.tool_calls)
      messages.push({ role: "tool", tool_name: "shell", content: await shell(call.function.arguments) });
  }
}

async function aiSdk(of) {
  const { streamText, stepCountIs, tool } = require("ai");
  const result = streamText({
    model: of,
    system,
    prompt,
    tools: {
      shell: tool({ description: "Run a command.", inputSchema: z.object({ command: z.string() }), execute: shell }),
    },
    stopWhen: stepCountIs(9),
  });
  for await (const part of result.fullStream) if (part.type === "error") throw part.error;
  return await result.text;
}

const ways = {
  "openai-chat": openaiChat,
  "openai-responses": openaiResponses,
  anthropic,
  ollama,
  "ai-compatible": () =>
    aiSdk(require("@ai-sdk/openai-compatible").createOpenAICompatible({ name: "ssmd", baseURL: base, apiKey: key })(model)),
  "ai-openai": () => aiSdk(require("@ai-sdk/openai").createOpenAI({ baseURL: base, apiKey: key })(model)),
  "ai-openai-chat": () => aiSdk(require("@ai-sdk/openai").createOpenAI({ baseURL: base, apiKey: key }).chat(model)),
  "ai-anthropic": () => aiSdk(require("@ai-sdk/anthropic").createAnthropic({ baseURL: base, apiKey: key })(model)),
  "ai-ollama": () => aiSdk(require("ollama-ai-provider-v2").createOllama({ baseURL: `${url}/api` })(model)),
};

console.log(await ways[way]());
