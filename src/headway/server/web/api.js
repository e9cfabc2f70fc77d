// The server's API as this page uses it: the key, and refusals in words.

const KEY = "headway-api-key";

/** The code of what a server says that takes no more requests. */
export const SHUTTING_DOWN = "server_shutting_down";

let apiKey = "";
try {
  apiKey = sessionStorage.getItem(KEY) ?? "";
} catch {
  // Storage may be forbidden; the key then lasts as long as the page.
}

export const getApiKey = () => apiKey;

export function setApiKey(key) {
  apiKey = key.trim();
  try {
    sessionStorage.setItem(KEY, apiKey);
  } catch {
    // As above.
  }
}

/** The server could not be reached (`status` is null), or refused, perhaps because of a field. The message can be shown. */
export class ApiError extends Error {
  constructor(message, { status = null, param = null, code = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.code = code;
  }
}

/** fetch with the key. Throws an ApiError; an abort stays an AbortError. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey) headers.authorization = `Bearer ${apiKey}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const { message, param, code } = await response.json().then((body) => body.error ?? {}, () => ({}));
  return new ApiError(refusalText(response, message, code), { status: response.status, param, code });
}

function refusalText(response, said, code) {
  const retry = response.headers.get("retry-after");
  if (response.status === 401) return apiKey ? "The server does not know this API key." : "The server asks for an API key: enter it under “Parameters and API key”.";
  if (response.status === 429) return `The server has too much to do${retry ? `; try again in ${retry} s` : ""}. ${said ?? ""}`.trim();
  if (code === SHUTTING_DOWN) return "The server is restarting. Please ask again in a few seconds.";
  if (response.status === 503) return `The engine is not available right now. ${said ?? ""}`.trim();
  return said ?? `The server answered with status ${response.status}.`;
}

/** What a stream says in the middle when it cannot go on. */
export function streamError(data) {
  return data.error ? new Error(data.error.message ?? "The server ended the stream with an error.") : null;
}

let modelName = null;

/** It may be another one: the server was started again. */
export function forgetModel() {
  modelName = null;
}

/** The served model's name, asked for once. */
export async function getModel() {
  if (modelName === null) {
    const list = await (await call("/v1/models")).json();
    modelName = list.data?.[0]?.id ?? "";
  }
  return modelName;
}
