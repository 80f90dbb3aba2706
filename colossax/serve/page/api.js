// The server's answers, whole and in pieces, and its refusals as sentences.

const KEY = "colossax-key";

/** What stands in the way, in a sentence for people. */
export class Trouble extends Error {
  constructor(message, { status = 0, afterS = 0 } = {}) {
    super(message);
    this.status = status;
    this.afterS = afterS;
  }
}

/** The key of this tab; it is kept nowhere else. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** How server and engine are. */
export async function stats(signal) {
  const response = await asked("stats", { signal });
  try {
    return await response.json();
  } catch (problem) {
    throw broken(problem);
  }
}

/** What the model says, as it comes: `{text, finish, usage}`, each of which may be missing. */
export async function* said(path, body, signal) {
  const sent = { ...body, stream: true, stream_options: { include_usage: true } };
  const headers = { "Content-Type": "application/json" };
  const response = await asked(path, { method: "POST", headers, body: JSON.stringify(sent), signal });
  for await (const event of events(response.body)) {
    if (event === "[DONE]") return;
    yield told(JSON.parse(event));
  }
  throw new Trouble("The server went away before the end of its answer.");
}

async function asked(path, { headers = {}, ...rest }) {
  if (key.get()) headers = { ...headers, Authorization: `Bearer ${key.get()}` };
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...rest, headers, cache: "no-store" });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    if (problem.message?.includes("ISO-8859-1")) throw new Trouble("The key has characters that no header can hold.", { status: 401 });
    throw new Trouble("The server does not answer; it may have ended, or the network is down.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const afterS = Number(response.headers.get("Retry-After")) || 0;
  let message = `The server refused, with status ${response.status}.`;
  try {
    message = sentence((await response.json()).error.message);
  } catch {
    // The answer is somebody else's, such as a proxy's: the status has to do.
  }
  if (afterS) message += ` Ask again in ${afterS} s.`;
  return new Trouble(message, { status: response.status, afterS });
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? "" : ".");

const broken = (problem) =>
  problem.name === "AbortError" ? problem : new Trouble("The connection to the server broke.");

function told(value) {
  if (value.error) throw new Trouble(sentence(value.error.message));
  const choice = value.choices?.[0];
  return {
    text: choice?.delta?.content ?? choice?.text ?? "",
    finish: choice?.finish_reason ?? null,
    usage: value.usage ?? null,
  };
}

/** The data of server-sent events. */
async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await reader.read().catch((problem) => { throw broken(problem); });
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
