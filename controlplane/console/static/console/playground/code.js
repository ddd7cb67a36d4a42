// A request as a program would send it: curl, Python, JavaScript.

// Fields that OpenAI's Python library does not know go into extra_body.
const BEYOND = new Set(["adapters", "top_k"]);


function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${python(each)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

export const LANGUAGES = {
  curl(baseUrl, body) {
    const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
    return `curl -N ${baseUrl}/v1/chat/completions \\
  -H "Authorization: Bearer $LORIKEET_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '${text}'`;
  },
  python(baseUrl, body) {
    const known = { model: "", ...body }, extra = {};
    for (const name of Object.keys(known)) {
      if (!BEYOND.has(name)) continue;
      extra[name] = known[name];
      delete known[name];
    }
    const lines = Object.entries(known).map(([name, value]) => `    ${name}=${python(value)},`);
    if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra)},`);
    return `import os

from openai import OpenAI

client = OpenAI(
    base_url=${JSON.stringify(`${baseUrl}/v1`)},
    api_key=os.environ["LORIKEET_API_KEY"],
)
stream = client.chat.completions.create(
${lines.join("\n")}
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)`;
  },
  javascript(baseUrl, body) {
    return `import OpenAI from "openai";

const client = new OpenAI({
  baseURL: ${JSON.stringify(`${baseUrl}/v1`)},
  apiKey: process.env.LORIKEET_API_KEY,
});
const stream = await client.chat.completions.create(${JSON.stringify(body, null, 2)});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
}`;
  },
};
