// Talking to the server: the models it serves, and an answer as a stream of chunks.

export class Failed extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Failed(body?.error?.message ?? `The server answered ${response.status}.`, response.status);
}

/** The cards of /v1/models. */
export async function models(key) {
  const response = await checked(await fetch("v1/models", { headers: headers(key) }));
  return (await response.json()).data;
}

/** The chunks of an answer, as they come. Throws Failed, or AbortError when `signal` says so. */
export async function* chat(body, key, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const response = await checked(
    await fetch("v1/chat/completions", { method: "POST", headers: headers(key), body: JSON.stringify(asked), signal }),
  );
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Failed(chunk.error.message, chunk.error.code);
    yield chunk;
  }
  throw new Failed("The connection ended before the answer did.", 0);
}

/** The data of server-sent events; comments and other fields are passed over. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}
