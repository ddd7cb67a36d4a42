// The playground: a form and up to three columns, each streaming by itself.

import { Column } from "./playground/column.js";
import { schemaIn, watchSchema } from "./playground/schema.js";
import { watchVectors } from "./playground/vectors.js";

const form = document.querySelector("[data-playground]");
const start = JSON.parse(document.querySelector("#playground-start").textContent);
const list = form.querySelector("[data-columns]");
const addButton = form.querySelector("[data-add]");
const stopButton = form.querySelector("[data-stop]");
const runButton = form.querySelector("[type=submit]");
const marks = form.querySelector("[data-diff]");
const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "seed"];

const page = {
  form,
  token: form.elements.csrfmiddlewaretoken.value,
  baseUrl: start.base_url,
  log: form.dataset.log,
  bodyOf,
};
let columns = [];

// Returns what a column sends, which is what its code shows. Throws for a schema that is not JSON.
function bodyOf(column) {
  const { elements } = form;
  const messages = [];
  if (elements.system.value.trim()) messages.push({ role: "system", content: elements.system.value });
  messages.push({ role: "user", content: elements.user.value });
  const body = { ...column.selector, messages };
  for (const name of NUMBERS) {
    const text = elements[name].value.trim();
    if (text) body[name] = Number(text);
  }
  if (elements.stop.value) body.stop = [elements.stop.value];
  const schema = schemaIn(form);
  if (schema !== null) {
    const strict = elements.strict.checked ? { strict: true } : {};
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, ...strict } };
  }
  return { ...body, stream: true, stream_options: { include_usage: true } };
}

function placeColumns() {
  columns.forEach((column, index) => column.place(index + 1, columns.length));
  addButton.hidden = columns.length >= Number(form.dataset.most);
  compare();
}

function addColumn(parts) {
  const column = new Column(page, parts, { onRemove: removeColumn, onEnd: update });
  columns.push(column);
  list.append(column.root);
  placeColumns();
  return column;
}

function removeColumn(column) {
  column.stop();
  columns = columns.filter((other) => other !== column);
  column.root.remove();
  placeColumns();
  addButton.focus();
}

function compare() {
  const [reference, ...others] = columns;
  if (reference.isDone) reference.compare(null);
  for (const column of others) {
    if (column.isDone) column.compare(marks.checked && reference.isDone ? reference.text : null);
  }
}

function update() {
  const isRunning = columns.some((column) => column.isRunning);
  if (!isRunning && document.activeElement === stopButton) runButton.focus();
  stopButton.hidden = !isRunning;
  compare();
}

function run() {
  if (!form.reportValidity()) return;
  try {
    schemaIn(form);
  } catch {
    form.querySelector("[data-schema-part]").open = true;
    form.elements.schema.focus();
    form.elements.schema.dispatchEvent(new Event("input"));
    return;
  }
  for (const column of columns) column.run();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
form.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  run();
});
form.addEventListener("input", () => columns.forEach((column) => column.showCode()));
stopButton.addEventListener("click", () => columns.forEach((column) => column.stop()));
addButton.addEventListener("click", () => {
  addColumn([{ name: "", weight: 1 }]).root.querySelector("[data-name]").focus();
});
marks.addEventListener("change", compare);

for (const [name, value] of Object.entries(start.parameters)) form.elements[name].value = value;
for (const parts of start.columns) addColumn(parts);
if (!columns.length) addColumn([{ name: "", weight: 1 }]);
watchSchema(form, page.token);
watchVectors(page.token);
