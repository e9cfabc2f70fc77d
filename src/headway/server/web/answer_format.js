// What the answer must look like, and the tools that the model may call: the part of the chat behind its button.

import { isObject, readJson } from "./json_text.js";

const $ = (id) => document.getElementById(id);

const KINDS = { text: "free text", json: "JSON", schema: "JSON schema", choice: "choice" };
const BOXES = ["schema", "choices", "tools"];
const SWITCHES = ["with-tools", "must-call"];
const EXAMPLES = {
  schema: `{
  "type": "object",
  "properties": {
    "name": {"type": "string"},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "likes": {"type": "array", "items": {"enum": ["music", "sport", "books"]}, "minItems": 1, "maxItems": 3}
  },
  "required": ["name", "age", "likes"],
  "additionalProperties": false
}`,
  choices: "yes\nno\nmaybe",
  tools: `[{"type": "function", "function": {
  "name": "get_weather",
  "description": "The weather in a city.",
  "parameters": {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"]
  }
}}]`,
};
/** Of which box a refusal speaks, by the field it names. */
const REFUSED = [[/^response_format/, "schema"], [/^structured_outputs/, "choices"], [/^tool/, "tools"]];

export class AnswerFormat {
  /** `onChange()` when something was chosen or typed. */
  constructor({ onChange }) {
    this.onChange = onChange;
    for (const id of BOXES) $(id).value = EXAMPLES[id];
    $("format-toggle").addEventListener("click", () => this.#open($("format").hidden));
    $("format").addEventListener("change", (event) => {
      if (BOXES.includes(event.target.id)) this.#showProblem(event.target.id);
      this.#changed();
    });
    for (const id of BOXES) {
      $(id).addEventListener("input", () => {
        if (!$(`${id}-error`).hidden) this.#showProblem(id);
        this.onChange();
      });
    }
    this.#show();
  }

  get #kind() {
    return document.querySelector("input[name=kind]:checked").value;
  }

  /** The boxes that are sent. */
  get #used() {
    return [...{ text: [], json: [], schema: ["schema"], choice: ["choices"] }[this.#kind], ...($("with-tools").checked ? ["tools"] : [])];
  }

  /**
   * {fields, isJson} for a request; null if a box cannot be read, which then says why. Results of calls may be followed
   * by an answer even where a message must be followed by a call.
   */
  read({ isResult }) {
    const problems = this.#used.filter((id) => this.#showProblem(id));
    if (problems.length > 0) {
      this.#open(true);
      $(problems[0]).focus();
      return null;
    }
    const kind = this.#kind;
    const fields = {};
    if (kind === "json") fields.response_format = { type: "json_object" };
    if (kind === "schema") fields.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: readJson($("schema").value).value } };
    if (kind === "choice") fields.structured_outputs = { choice: choices() };
    if ($("with-tools").checked) {
      fields.tools = readJson($("tools").value).value;
      fields.tool_choice = $("must-call").checked && !isResult ? "required" : "auto";
    }
    return { fields, isJson: kind === "json" || kind === "schema" };
  }

  /** The server's word, beside the box it is about. */
  refuse({ message, param }) {
    const id = REFUSED.find(([field]) => field.test(param ?? ""))?.[1];
    if (!this.#used.includes(id)) return;
    this.#open(true);
    say(id, message.replace(/^(response_format\.json_schema|structured_outputs)\./, ""));
  }

  get settings() {
    const texts = BOXES.map((id) => [id, $(id).value]);
    const switches = SWITCHES.map((id) => [id, $(id).checked ? "yes" : ""]);
    return Object.fromEntries([["kind", this.#kind], ...texts, ...switches]);
  }

  restore(settings) {
    for (const id of BOXES) if (id in settings) $(id).value = settings[id];
    for (const id of SWITCHES) $(id).checked = settings[id] === "yes";
    if (Object.hasOwn(KINDS, settings.kind)) document.querySelector(`input[name=kind][value=${settings.kind}]`).checked = true;
    this.#show();
  }

  #changed() {
    this.#show();
    this.onChange();
  }

  #open(isOpen) {
    $("format").hidden = !isOpen;
    $("format-toggle").setAttribute("aria-expanded", String(isOpen));
  }

  #show() {
    const hasTools = $("with-tools").checked;
    for (const part of document.querySelectorAll("#format [data-kind]")) part.hidden = part.dataset.kind !== this.#kind;
    $("tools-part").hidden = !hasTools;
    $("format-chosen").textContent = `${KINDS[this.#kind]}${hasTools ? ", tools" : ""}`;
    $("format-toggle").classList.toggle("chosen", this.#kind !== "text" || hasTools);
  }

  /** Whether there is one. */
  #showProblem(id) {
    const problem = problemOf(id);
    say(id, problem);
    return problem !== "";
  }
}

/** What keeps a box from being sent, in words; empty if nothing does. */
function problemOf(id) {
  if (id === "choices") return choices().length > 0 ? "" : "Write at least one choice, one per line.";
  const { value, problem } = readJson($(id).value);
  if (problem !== undefined) return `This is not JSON: ${problem}.`;
  if (id === "schema") return isObject(value) ? "" : "A schema is an object: { … }.";
  return Array.isArray(value) && value.length > 0 ? "" : "Tools are a list with at least one tool: [ { … } ].";
}

function say(id, problem) {
  $(`${id}-error`).textContent = problem;
  $(`${id}-error`).hidden = problem === "";
  $(id).setAttribute("aria-invalid", String(problem !== ""));
}

const choices = () => [...new Set($("choices").value.split("\n").map((line) => line.trim()).filter(Boolean))];
