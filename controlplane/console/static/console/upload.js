// The adapter upload form: get presigned URLs from the console, PUT both files directly to the object
// store with a progress bar, then tell the console that they are uploaded.

const form = document.querySelector("[data-upload]");
const inputs = { config: form.elements.config, tensors: form.elements.tensors };
const panel = form.querySelector("[data-progress]");
const bar = panel.querySelector("progress");
const status = panel.querySelector("[data-status]");
const submit = form.querySelector("[type=submit]");
const drop = form.querySelector("[data-drop]");

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

async function post(url, body) {
  const response = await fetch(url, {
    method: "POST",
    headers: {
      Accept: "application/json",
      "Content-Type": "application/json",
      "X-CSRFToken": form.elements.csrfmiddlewaretoken.value,
    },
    body: JSON.stringify(body),
  });
  if (response.redirected) throw new Error("You are signed out. Reload the page and sign in.");
  const answer = await response.json().catch(() => ({}));
  if (response.ok) return answer;
  if (answer.errors) throw new FieldErrors(answer.errors);
  throw new Error(answer.error?.message ?? `The console answered ${response.status}.`);
}

function put(url, file, onProgress) {
  return new Promise((resolve, reject) => {
    // fetch() cannot report how much of a body was sent.
    const request = new XMLHttpRequest();
    request.open("PUT", url);
    request.upload.addEventListener("progress", (event) => onProgress(event.loaded));
    request.addEventListener("load", () => {
      if (request.status < 300) resolve();
      else reject(new Error(`The object store refused ${file.name} (${request.status}).`));
    });
    request.addEventListener("error", () => {
      reject(new Error(`The connection broke while sending ${file.name}. Try again.`));
    });
    request.send(file);
  });
}

function size(numBytes) {
  if (numBytes < 1e6) return `${Math.max(1, Math.round(numBytes / 1e3))} kB`;
  return `${(numBytes / 1e6).toFixed(1)} MB`;
}

async function upload() {
  const config = inputs.config.files[0];
  const tensors = inputs.tensors.files[0];
  const missing = {};
  if (!config) missing.config = ["Choose the file adapter_config.json."];
  if (!tensors) missing.tensors = ["Choose the file adapter_model.safetensors."];
  if (config && !config.size) missing.config = ["This file is empty."];
  if (tensors && !tensors.size) missing.tensors = ["This file is empty."];
  if (Object.keys(missing).length) throw new FieldErrors(missing);

  status.textContent = "Preparing…";
  const started = await post(form.dataset.upload, {
    name: form.elements.name.value.trim(),
    base_model: form.elements.base_model.value,
    config: config.size,
    tensors: tensors.size,
  });

  const total = config.size + tensors.size;
  const report = (sent) => {
    bar.value = sent / total;
    status.textContent = `Uploading: ${size(sent)} of ${size(total)}`;
  };
  report(0);
  await put(started.urls.config, config, report);
  await put(started.urls.tensors, tensors, (sent) => report(config.size + sent));

  status.textContent = "Uploaded. Starting the checks…";
  await post(started.complete_url, {});
  location.assign(started.version_url);
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  showErrors({});
  submit.disabled = true;
  panel.hidden = false;
  bar.value = 0;
  try {
    await upload();
  } catch (error) {
    panel.hidden = true;
    submit.disabled = false;
    showErrors(error instanceof FieldErrors ? error.errors : { __all__: [error.message] });
  }
});

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
