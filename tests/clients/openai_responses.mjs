// OpenAI's npm client against /v1/responses of a running server. Run by hand, from a folder that has the package:
// node openai_responses.mjs URL
// Checked with openai 6.49.0 (npm).

import assert from "node:assert";
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const OpenAI = require("openai").default;


const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const tool = {
  type: "function",
  name: "get_weather",
  description: "The weather of a city.",
  parameters: {
    type: "object",
    properties: { city: { type: "string", enum: ["Paris", "Oslo"] } },
    required: ["city"],
    additionalProperties: false,
  },
  strict: true,
};

const asked = { model, input: "Say hello.", max_output_tokens: 24, temperature: 0 };
const plain = await client.responses.create(asked);
assert(plain.output_text.length > 0);
console.log("plain:", plain.status, JSON.stringify(plain.output_text), JSON.stringify(plain.usage));

let text = "";
let number = 0;
for await (const event of await client.responses.create({ ...asked, stream: true })) {
  assert.equal(event.sequence_number, number++);
  if (event.type === "response.output_text.delta") text += event.delta;
}
assert.equal(text, plain.output_text);
const helper = client.responses.stream(asked);
assert.equal((await helper.finalResponse()).output_text, plain.output_text);
console.log("stream:", number, "events");

const withTools = {
  ...asked,
  input: [{ role: "user", content: "What is the weather in Paris?" }],
  tools: [tool],
  tool_choice: "required",
  parallel_tool_calls: false,
  max_output_tokens: 64,
};
const called = await client.responses.create(withTools);
const call = called.output.find((item) => item.type === "function_call");
assert(["Paris", "Oslo"].includes(JSON.parse(call.arguments).city));
let streamedArguments = "";
for await (const event of await client.responses.create({ ...withTools, stream: true })) {
  if (event.type === "response.function_call_arguments.delta") streamedArguments += event.delta;
}
assert.equal(streamedArguments, call.arguments);
const result = { type: "function_call_output", call_id: call.call_id, output: "Sunny, 21 degrees." };
const after = await client.responses.create({
  ...withTools,
  input: [...withTools.input, ...called.output, result],
  tool_choice: "none",
});
console.log("tools:", call.name, call.arguments, "after the result:", JSON.stringify(after.output_text));

const schema = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};
const parsed = await client.responses.parse({
  ...asked,
  input: "Ada is 36 years old. Who is it?",
  max_output_tokens: 128,
  text: { format: { type: "json_schema", name: "person", schema, strict: true } },
});
const person = JSON.parse(parsed.output_text);
assert.equal(typeof person.age, "number");
console.log("parse:", JSON.stringify(person));

const hosted = { tools: [{ type: "web_search" }], tool_choice: "required" };
for (const extra of [{ previous_response_id: "resp_1" }, { background: true }, hosted]) {
  await assert.rejects(client.responses.create({ ...asked, ...extra }), (error) => {
    console.log("refused:", error.status, error.param, "|", error.message);
    return error.status === 400;
  });
}
await assert.rejects(client.responses.retrieve("resp_1"), { status: 404 });
console.log("openai (npm)", require("openai/version").VERSION, "done");
