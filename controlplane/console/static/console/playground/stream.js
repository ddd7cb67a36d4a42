// Ask the console for one answer, and read its stream.

// What the console or the platform refused; `details` are those of OpenAI's error body.
export class Refused extends Error {
  constructor(details, status) {
    super(details.message);
    const kind = [details.type, details.code].filter(Boolean).join(", ");
    this.kind = status ? `${status} ${kind}` : kind;
    this.param = details.param;
  }
}

export async function send(url, body, token, signal) {
  const response = await fetch(url, {
    method: "POST",
    headers: { Accept: "application/json", "Content-Type": "application/json", "X-CSRFToken": token },
    body: JSON.stringify(body),
    signal,
  });
  if (response.redirected) throw new Error("You are signed out. Reload the page and sign in.");
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  if (error) throw new Refused(error, response.status);
  throw new Error(`The console answered ${response.status}. Reload the page and try again.`);
}

// Yields the JSON of each event. Throws Refused for an error in the stream, Error if it breaks off.
export async function* chunksOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection broke before the answer ended.");
    buffer += value;
    let end;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      const event = buffer.slice(0, end);
      buffer = buffer.slice(end + 2);
      if (!event.startsWith("data: ")) continue; // a comment
      if (event === "data: [DONE]") return;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Refused(chunk.error);
      yield chunk;
    }
  }
}
