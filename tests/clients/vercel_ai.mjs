// Vercel's ai package against a running server, with @ai-sdk/openai-compatible (chat) and @ai-sdk/openai (chat and
// responses). Run by hand, from a folder that has the packages: node vercel_ai.mjs URL
// Checked with ai 6.0.326, @ai-sdk/openai-compatible 2.0.87, @ai-sdk/openai 3.0.139 (npm).

import assert from "node:assert";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const { generateObject, generateText, streamObject, streamText, tool, stepCountIs, Output } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { createOpenAI } = require("@ai-sdk/openai");
const { z } = require("zod");

const url = process.argv[2];
const baseURL = `${url}/v1`;
const name = (await (await fetch(`${baseURL}/models`)).json()).data[0].id;
const compatible = { name: "headway", baseURL, includeUsage: true };
const models = {
  "openai-compatible": createOpenAICompatible(compatible)(name),
  "openai-compatible, schemas": createOpenAICompatible({ ...compatible, supportsStructuredOutputs: true })(name),
  "openai chat": createOpenAI({ baseURL, apiKey: "none" }).chat(name),
  "openai responses": createOpenAI({ baseURL, apiKey: "none" }).responses(name),
};
const schema = z.object({ name: z.enum(["Ada", "Grace"]), age: z.number().int().min(0).max(120) });
const anyObject = z.looseObject({});
const tools = {
  getWeather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.enum(["Paris", "Oslo"]) }),
    execute: async ({ city }) => `${city}: Sunny, 21 degrees.`,
  }),
};
const common = { temperature: 0, maxOutputTokens: 96, maxRetries: 0 };
const asked = 'Say {"name": "Ada", "age": 36} as JSON, and nothing else.';
// The model must call first, and may not call again: the smallest one would never end.
const called = {
  ...common,
  prompt: "What is the weather in Paris?",
  tools,
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
};

let number = 0;
let failed = 0;
async function check(label, body) {
  number++;
  try {
    console.log(`ok     ${label}: ${JSON.stringify(await body())?.slice(0, 140)}`);
  } catch (error) {
    failed++;
    console.log(`FAILED ${label}: ${error} ${error.responseBody ?? ""} ${error.cause ?? ""}`);
  }
}

function checkSteps(steps) {
  assert.equal(steps.length, 2);
  assert.equal(steps[0].finishReason, "tool-calls");
  assert(steps[0].toolResults.length > 0);
  return steps[0].toolCalls.map((call) => call.input);
}

const versions = ["ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai"].map(
  (one) => `${one} ${JSON.parse(readFileSync(`node_modules/${one}/package.json`)).version}`,
);
console.log("versions:", versions.join(", "));
for (const [label, model] of Object.entries(models)) {
  // Without schemas, the provider asks for json_object: any object must do.
  const wanted = label === "openai-compatible" ? anyObject : schema;
  await check(`${label}: generateText`, async () => (await generateText({ ...common, model, prompt: asked })).text);
  await check(`${label}: streamText`, async () => {
    const result = streamText({ ...common, model, prompt: asked, onError: () => {} });
    let text = "";
    for await (const part of result.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "text-delta") text += part.text;
    }
    assert((await result.usage).outputTokens > 0);
    return text;
  });
  await check(`${label}: generateText with tools`, async () =>
    checkSteps((await generateText({ ...called, model })).steps));
  await check(`${label}: streamText with tools`, async () => {
    const result = streamText({ ...called, model, onError: () => {} });
    for await (const part of result.fullStream) if (part.type === "error") throw part.error;
    return checkSteps(await result.steps);
  });
  await check(`${label}: generateObject`, async () =>
    (await generateObject({ ...common, model, schema: wanted, prompt: asked })).object);
  await check(`${label}: streamObject`, async () => {
    const result = streamObject({ ...common, model, schema: wanted, prompt: asked, onError: () => {} });
    for await (const _ of result.partialObjectStream);
    return await result.object;
  });
  await check(`${label}: generateText with Output.object`, async () =>
    (await generateText({ ...common, model, prompt: asked, output: Output.object({ schema: wanted }) })).output);
}
console.log(`${number - failed} of ${number} checks passed`);
process.exit(failed ? 1 : 0);
