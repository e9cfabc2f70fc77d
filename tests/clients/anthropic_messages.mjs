// Anthropic's npm client against /v1/messages of a running server. Run by hand, from a folder that has the package:
// node anthropic_messages.mjs URL MODEL
// Checked with @anthropic-ai/sdk 1.8.0 (npm).

import assert from "node:assert";
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const Anthropic = require("@anthropic-ai/sdk").default;

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = process.argv[3] ?? (await client.models.list()).data[0].id;
const tool = {
  name: "get_weather",
  description: "The weather of a city.",
  input_schema: {
    type: "object",
    properties: { city: { type: "string", enum: ["Paris", "Oslo"] } },
    required: ["city"],
    additionalProperties: false,
  },
};

const asked = { model, max_tokens: 24, messages: [{ role: "user", content: "Say hello." }], temperature: 0 };
const plain = await client.messages.create(asked);
assert(plain.content[0].text.length > 0);
console.log("plain:", plain.stop_reason, JSON.stringify(plain.content[0].text), JSON.stringify(plain.usage));

const kinds = new Set();
const stream = client.messages.stream(asked).on("streamEvent", (event) => kinds.add(event.type));
const final = await stream.finalMessage();
assert.equal(final.content[0].text, plain.content[0].text);
assert.equal(final.stop_reason, plain.stop_reason);
console.log("stream:", [...kinds].join(" "));

const { input_tokens } = await client.messages.countTokens({ model, messages: asked.messages });
assert.equal(input_tokens, plain.usage.input_tokens + plain.usage.cache_read_input_tokens);
console.log("countTokens:", input_tokens);

const withTools = {
  ...asked,
  max_tokens: 64,
  messages: [{ role: "user", content: "What is the weather in Paris?" }],
  tools: [tool],
  tool_choice: { type: "any", disable_parallel_tool_use: true },
};
const called = await client.messages.create(withTools);
const call = called.content.find((block) => block.type === "tool_use");
assert.equal(called.stop_reason, "tool_use");
assert(["Paris", "Oslo"].includes(call.input.city));
const streamedCall = await client.messages.stream(withTools).finalMessage();
assert.deepEqual(streamedCall.content.at(-1).input, call.input);
const result = { type: "tool_result", tool_use_id: call.id, content: "Sunny, 21 degrees." };
const after = await client.messages.create({
  ...withTools,
  messages: [
    ...withTools.messages,
    { role: "assistant", content: called.content },
    { role: "user", content: [result] },
  ],
  tool_choice: { type: "none" },
});
console.log("tools:", call.name, JSON.stringify(call.input), "after:", JSON.stringify(after.content[0]?.text));

const schema = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};
const parsed = await client.messages.create({
  ...asked,
  max_tokens: 128,
  messages: [{ role: "user", content: "Ada is 36 years old. Who is it?" }],
  output_config: { format: { type: "json_schema", schema } },
});
assert.equal(typeof JSON.parse(parsed.content[0].text).age, "number");
console.log("output_config:", parsed.content[0].text);

const server = [{ type: "bash_20250124", name: "bash" }];
await assert.rejects(client.messages.create({ ...asked, tools: server }), (error) => {
  console.log("refused:", error.status, JSON.stringify(error.error), error.requestID);
  return error.status === 400 && error.error.type === "error";
});
console.log("@anthropic-ai/sdk", require("@anthropic-ai/sdk/version").VERSION, "done");
