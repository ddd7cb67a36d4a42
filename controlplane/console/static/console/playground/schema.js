// The schema's field: while it is typed, the linter's report appears beside it.

import { send } from "./stream.js";

const REST_MS = 400;
const MOST_SHOWN = 200;
const TONES = { enforced: "good", checked: "warn", unsupported: "bad", annotation: "" };

function element(name, text, className) {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Returns the schema in the field, or null without one. Throws for text that is not a JSON object.
export function schemaIn(form) {
  const text = form.elements.schema.value.trim();
  if (!text) return null;
  const schema = JSON.parse(text);
  if (typeof schema !== "object" || schema === null || Array.isArray(schema)) {
    throw new Error("A schema is a JSON object.");
  }
  return schema;
}

function findings(report) {
  const order = Object.keys(TONES).reverse();
  const sorted = [...report.findings].sort((a, b) => order.indexOf(a.status) - order.indexOf(b.status));
  const list = element("ul", "", "findings");
  for (const finding of sorted.slice(0, MOST_SHOWN)) {
    const item = document.createElement("li");
    const what = document.createElement("span");
    what.append(element("code", finding.path || "/"));
    if (finding.reason) what.append(` ${finding.reason}`);
    item.append(element("span", finding.status, `badge ${TONES[finding.status] ?? ""}`), what);
    list.append(item);
  }
  return list;
}

export function watchSchema(form, token) {
  const field = form.elements.schema;
  const report = form.querySelector("[data-report]");
  let timer, running;

  const show = (isWrong, ...nodes) => {
    report.replaceChildren(...nodes);
    if (isWrong) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  };
  const lint = async () => {
    running?.abort();
    running = new AbortController();
    const { signal } = running;
    try {
      const schema = schemaIn(form);
      if (schema === null) {
        show(false);
        return;
      }
      const found = await (await send(form.dataset.lint, { schema }, token, signal)).json();
      const summary = found.strict_ok
        ? "Every keyword is enforced while the answer is written. Strict is possible."
        : "Not every keyword can be enforced while the answer is written.";
      show(false, element("p", summary), findings(found));
    } catch (error) {
      if (signal.aborted) return;
      const message = error instanceof SyntaxError ? `This is not JSON yet: ${error.message}` : error.message;
      show(true, element("p", message, "bad-text"));
    }
  };
  field.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(lint, REST_MS);
  });
}
