// Server-sent events over fetch: unlike EventSource it can send a key, a body, and tell why it was refused.

/** Yields {event, data} for each event of a response body. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const parts = rest.split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const event = parseEvent(part);
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseEvent(text) {
  const event = { event: "message", data: "" };
  for (const line of text.split(/\r?\n/)) {
    if (line.startsWith("data:")) event.data += (event.data ? "\n" : "") + line.slice(5).trimStart();
    else if (line.startsWith("event:")) event.event = line.slice(6).trim();
  }
  return event;
}
