// The adapter upload form: begin a version, send both files to the object store by parts, then tell
// the console that they are uploaded. An unfinished upload is noted in the browser: after a reload
// the person chooses the same files again, and the upload continues.

import { Paused, Refused, Transfer } from "./parts.js";

const form = document.querySelector("[data-upload]");
const inputs = { config: form.elements.config, tensors: form.elements.tensors };
const panel = form.querySelector("[data-progress]");
const bar = panel.querySelector("progress");
const status = panel.querySelector("[data-status]");
const submit = form.querySelector("[type=submit]");
const stop = form.querySelector("[data-pause]");
const drop = form.querySelector("[data-drop]");
const unfinished = form.querySelector("[data-unfinished]");
const NOTE = `lorikeet-upload ${form.dataset.tenant}`;
const NAMES = { config: "adapter_config.json", tensors: "adapter_model.safetensors" };

let begun = null; // what the console answered when the upload began
let transfer = null;

class FieldErrors extends Error {
  constructor(errors) {
    super("The form has errors.");
    this.errors = errors;
  }
}

function showErrors(errors) {
  form.querySelectorAll("[data-errors]").forEach((list) => list.replaceChildren());
  form.querySelectorAll("[aria-invalid]").forEach((field) => field.removeAttribute("aria-invalid"));
  for (const [name, messages] of Object.entries(errors)) {
    const known = form.querySelector(`[data-errors="${CSS.escape(name)}"]`);
    const list = known ?? form.querySelector('[data-errors="__all__"]');
    for (const message of messages) {
      const item = document.createElement("li");
      item.textContent = known || name === "__all__" ? message : `${name}: ${message}`;
      list.append(item);
    }
    form.elements[name]?.setAttribute("aria-invalid", "true");
  }
  form.querySelector("[aria-invalid]")?.focus();
}

async function call(url, body) {
  const response = await fetch(url, {
    method: body ? "POST" : "GET",
    headers: {
      Accept: "application/json",
      "Content-Type": "application/json",
      "X-CSRFToken": form.elements.csrfmiddlewaretoken.value,
    },
    body: body && JSON.stringify(body),
  });
  if (response.redirected) throw new Refused("You are signed out. Reload the page and sign in.");
  const answer = await response.json().catch(() => ({}));
  if (response.ok) return answer;
  if (answer.errors) throw new FieldErrors(answer.errors);
  const message = answer.error?.message ?? `The console answered ${response.status}.`;
  const isFinal = response.status < 500 && ![408, 429].includes(response.status);
  throw new (isFinal ? Refused : Error)(message);
}

function size(numBytes) {
  if (numBytes < 1e6) return `${Math.max(1, Math.round(numBytes / 1e3))} kB`;
  return `${(numBytes / 1e6).toFixed(1)} MB`;
}

function chosenFiles() {
  const missing = {};
  for (const [field, name] of Object.entries(NAMES)) {
    const file = inputs[field].files[0];
    if (!file) missing[field] = [`Choose the file ${name}.`];
    else if (!file.size) missing[field] = ["This file is empty."];
    else if (begun && file.size !== begun.sizes[field])
      missing[field] = [`The upload began with another file, of ${size(begun.sizes[field])}.`];
  }
  if (Object.keys(missing).length) throw new FieldErrors(missing);
  return { config: inputs.config.files[0], tensors: inputs.tensors.files[0] };
}

function report({ sent, total, checked, waits_s }) {
  bar.value = sent / total;
  const amount = `${size(sent)} of ${size(total)}`;
  if (checked) status.textContent = `Comparing ${checked} with what was sent…`;
  else if (waits_s)
    status.textContent = `The connection broke at ${amount}. Trying again in ${Math.ceil(waits_s)} s…`;
  else status.textContent = `Uploading: ${amount}`;
}

async function begin(files) {
  const sizes = { config: files.config.size, tensors: files.tensors.size };
  const { name, base_model, accept_base_mismatch: accepts } = form.elements;
  const answer = await call(form.dataset.upload, {
    name: name.value.trim(),
    base_model: base_model.value,
    accept_base_mismatch: accepts.checked,
    ...sizes,
  });
  begun = {
    ...answer,
    sizes,
    name: name.value.trim(),
    base_model: base_model.value,
    accepts_base_mismatch: accepts.checked,
  };
  keepNote();
  lockFields();
}

async function upload() {
  const files = chosenFiles();
  panel.hidden = false;
  status.textContent = "Preparing…";
  if (!begun) await begin(files);
  transfer = new Transfer({
    files,
    report,
    state: async () => (await call(begun.state_url)).files,
    sign: (file, number, sha256) => call(begun.parts_url, { file, number, sha256 }),
  });
  stop.hidden = false;
  await transfer.run();
  stop.hidden = true;
  status.textContent = "Uploaded. Starting the checks…";
  await call(begun.complete_url, {});
  forgetNote();
  location.assign(begun.version_url);
}

function keepNote() {
  try {
    localStorage.setItem(NOTE, JSON.stringify(begun));
  } catch {} // without it a reload starts the upload again
}

function forgetNote() {
  try {
    localStorage.removeItem(NOTE);
  } catch {}
}

// A begun upload is of one adapter and one base model.
function lockFields() {
  for (const field of ["name", "base_model"]) {
    form.elements[field].value = begun[field];
    form.elements[field].disabled = true;
  }
  const accepts = form.elements.accept_base_mismatch;
  accepts.checked = Boolean(begun.accepts_base_mismatch);
  accepts.disabled = true;
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  showErrors({});
  submit.disabled = true;
  unfinished.hidden = true;
  try {
    await upload();
  } catch (error) {
    stop.hidden = true;
    submit.disabled = false;
    if (begun) submit.textContent = "Continue";
    if (error instanceof Paused) {
      status.textContent = `Paused. ${status.textContent}`;
      return;
    }
    panel.hidden = true;
    showErrors(error instanceof FieldErrors ? error.errors : { __all__: [error.message] });
    unfinished.hidden = !begun;
  }
});

stop.addEventListener("click", () => transfer.pause());

async function offerUnfinished() {
  let note = null;
  try {
    note = JSON.parse(localStorage.getItem(NOTE));
  } catch {}
  if (!note) return;
  const state = await call(note.state_url).catch((error) => {
    if (error instanceof Refused) forgetNote(); // it has ended, or its version is deleted
  });
  if (!state) return;
  if (state.status !== "uploading") {
    forgetNote();
    return;
  }
  const parts = Object.values(state.files).flatMap((file) => file.parts);
  const there = parts.filter((part) => part.is_uploaded);
  const sent = there.reduce((sum, part) => sum + part.num_bytes, 0);
  begun = note;
  lockFields();
  const total = note.sizes.config + note.sizes.tensors;
  unfinished.querySelector("[data-of]").textContent =
    `The upload of ${note.name} is not finished: ${size(sent)} of ${size(total)} arrived.`;
  submit.textContent = "Continue";
  unfinished.hidden = false;
}

unfinished.querySelector("[data-discard]").addEventListener("click", async () => {
  try {
    await call(begun.abort_url, {});
  } catch (error) {
    if (!(error instanceof Refused)) {
      showErrors({ __all__: [error.message] });
      return;
    }
  }
  forgetNote();
  location.reload();
});

offerUnfinished();

// Files dropped on the area are assigned to the two fields by their names.

function place(files) {
  for (const file of files) {
    const isTensors = file.name.endsWith(".safetensors");
    if (!isTensors && !file.name.endsWith(".json")) continue;
    const transfer = new DataTransfer();
    transfer.items.add(file);
    (isTensors ? inputs.tensors : inputs.config).files = transfer.files;
  }
}

for (const name of ["dragenter", "dragover"]) {
  drop.addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
}
for (const name of ["dragleave", "drop"]) {
  drop.addEventListener(name, () => drop.classList.remove("over"));
}
drop.addEventListener("drop", (event) => {
  event.preventDefault();
  place(event.dataTransfer.files);
});
