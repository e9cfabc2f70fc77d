// The conversation in the browser's local storage, so that it survives a reload. Of long ones the last turns are kept.

const KEY = "headway-chat";
const VERSION = 1;
const MAX_CHARS = 500_000; // browsers allow some millions for all pages of a server

/** {turns: [{role, content, facts, ...}], draft, settings}; empty if there is none, or none that this version can read. */
export function loadChat() {
  const empty = { turns: [], draft: "", settings: {} };
  try {
    const stored = JSON.parse(localStorage.getItem(KEY));
    if (stored?.version !== VERSION || !Array.isArray(stored.turns) || !stored.turns.every(isTurn)) return empty;
    return { ...empty, turns: stored.turns, draft: text(stored.draft), settings: settingsOf(stored.settings) };
  } catch {
    return empty; // storage may be forbidden, or hold something else
  }
}

export function saveChat({ turns, draft, settings }) {
  const kept = lastThatFit(turns, MAX_CHARS - draft.length);
  try {
    localStorage.setItem(KEY, JSON.stringify({ version: VERSION, turns: kept, draft: draft.slice(0, MAX_CHARS), settings }));
  } catch {
    // Forbidden or full: the conversation then lasts as long as the page.
  }
}

/** Questions go with their answers, and results with the calls before them. */
function lastThatFit(turns, maxChars) {
  let chars = 0;
  let first = turns.length;
  for (let i = turns.length - 2; i >= 0; i -= 2) {
    chars += JSON.stringify(turns.slice(i, i + 2)).length;
    if (chars > maxChars) break;
    if (turns[i].role === "user") first = i;
  }
  return turns.slice(first);
}

/** Questions and answers alternate; what a field may lack was stored before there were such fields. */
function isTurn(turn, index, turns) {
  const isQuestion = turn?.role === "user" || (turn?.role === "tool" && turns[index - 1]?.calls?.length > 0);
  return (
    (index % 2 === 0 ? isQuestion : turn?.role === "assistant") &&
    typeof turn.content === "string" &&
    typeof turn.facts === "string" &&
    typeof (turn.thoughts ?? "") === "string" &&
    isListOf(turn.calls, ["id", "name", "arguments"]) &&
    isListOf(turn.results, ["id", "name", "content"])
  );
}

const isListOf = (list = [], names) => Array.isArray(list) && list.every((each) => names.every((name) => typeof each?.[name] === "string"));

const text = (value) => (typeof value === "string" ? value : "");

const settingsOf = (value) => Object.fromEntries(Object.entries(value ?? {}).filter(([, each]) => typeof each === "string"));
