// What this page asks of its server. The API key lives in this tab's session storage and nowhere else.

const KEY = "polydraft-key";

/** The server refused a request because of its API key. */
export class KeyRefused extends Error {}

const hasKey = () => sessionStorage.getItem(KEY) !== null;

export const setKey = value => sessionStorage.setItem(KEY, value);

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key === null ? {} : {authorization: "Bearer " + key};
}

async function call(path, options) {
  let answer;
  try {
    answer = await fetch(path, {...options, headers: {...options.headers, ...headers()}, cache: "no-store"});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer.");
  }
  if (answer.ok) return answer;
  if (answer.status === 401)
    throw new KeyRefused(hasKey() ? "The server refused this API key." : "This server needs an API key.");
  const body = await answer.json().catch(() => null);
  throw new Error(body?.error?.message ?? `The server answered with status ${answer.status}.`);
}

/** Totals, running requests and facts of the server. */
export async function state() {
  return (await call("dashboard/state", {})).json();
}

/** The chunks of a streamed answer; throws an error that the stream reports. */
export async function* stream(path, body, signal) {
  const answer = await call(path, {
    method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(body), signal,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame === "data: [DONE]") return;
      if (!frame.startsWith("data: ")) continue;
      const chunk = JSON.parse(frame.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
